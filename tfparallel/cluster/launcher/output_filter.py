"""Filters the workers' output for the screen: hides TensorFlow's chatter, shows each error once.

The log, if any, gets all output. The output of the user's program passes unchanged. Only lines of
stderr are hidden: known messages of TensorFlow's C++ code, Python warnings that another worker has
shown, and the fatal error of a worker if another one had the same.
"""

import re
from collections.abc import Callable

from tfparallel.chatter import is_chatter, may_hold_chatter
from tfparallel.cluster.worker_error import LINE, LINE_BYTES, WorkerError, begin_of_line

_WARNING = re.compile(rb"\S.*\.py:\d+: \w*Warning: ")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
# Bounds the memory for a program that warns again and again.
_MOST_WARNINGS, _WARNING_BYTES = 1000, 2000


class OutputFilter:
    """Filters the output of a `Reader`.

    Args:
        show: Writes to the screen; called with the worker, "stdout" or "stderr", and bytes.
        keep: Writes to the log; called with the worker and bytes.
        has_gpu: Whether the host has an NVIDIA GPU.
        is_quiet: Whether to hide anything.

    Attributes:
        errors: The fatal error by worker, for the workers that reported one.
    """

    def __init__(
        self,
        show: Callable[[int, str, bytes], None],
        keep: Callable[[int, bytes], None] = lambda worker, text: None,
        *,
        has_gpu: bool = False,
        is_quiet: bool = True,
    ):
        self.errors: dict[int, WorkerError] = {}
        self._show, self._keep = show, keep
        self._has_gpu, self._is_quiet = has_gpu, is_quiet
        self._begun: dict[int, bytes] = {}  # The start of an error's line, which may be split.
        self._warned: dict[bytes, int] = {}
        self._drops_source: set[int] = set()  # Workers whose next line is a hidden warning's code.

    def write(self, worker: int, stream: str, text: bytes) -> None:
        """Takes the output of a `Reader`."""
        if stream != "stderr":
            self._keep(worker, text)
            self._show(worker, stream, text)
            return
        text = self._begun.pop(worker, b"") + text
        end = text.rfind(b"\n") + 1
        begin = begin_of_line(text[end:])
        if 0 <= begin and len(text) - end - begin < LINE_BYTES:
            self._begun[worker] = text[end + begin :]
            text = text[: end + begin]
        self._pass_on(worker, text, end)

    def finish(self) -> None:
        """Passes on unfinished lines that began like the line of an error."""
        for worker, text in self._begun.items():
            self._pass_on(worker, text, 0)
        self._begun.clear()

    def _pass_on(self, worker: int, text: bytes, end: int) -> None:
        """Passes text on; looks for lines for the launcher before `end`."""
        logged, shown, position = [], [], 0
        for match in LINE.finditer(text, 0, end):
            error = WorkerError.from_line(match[0])
            if error is not None:
                before = text[position : match.start()]
                logged += before, error.whole.encode()
                shown += self._of_lines(worker, before), *self._of_error(worker, error)
                position = match.end()
        logged.append(text[position:])
        shown.append(self._of_lines(worker, text[position:]))
        if log_text := b"".join(logged):
            self._keep(worker, log_text)
        if screen_text := b"".join(shown):
            self._show(worker, "stderr", screen_text)

    def _of_lines(self, worker: int, text: bytes) -> bytes:
        """Returns the shown part of lines without a fatal error."""
        if not self._is_quiet:
            return text
        # Most output can skip the filter by line.
        if worker in self._drops_source or b"Warning: " in text or may_hold_chatter(text):
            lines = _LINE.findall(text)
            return b"".join(line for line in lines if not self._is_hidden(worker, line))
        return text

    def _of_error(self, worker: int, error: WorkerError) -> list[bytes]:
        is_repeated = any(error.place == other.place for other in self.errors.values())
        self.errors[worker] = error
        if not self._is_quiet:
            return [error.whole.encode()]
        return [] if is_repeated else [f"{line}\n".encode() for line in error.lines]

    def _is_hidden(self, worker: int, line: bytes) -> bool:
        if worker in self._drops_source:
            self._drops_source.discard(worker)
            if line.startswith(b"  "):
                return True
        if _WARNING.match(line) and len(line) < _WARNING_BYTES:
            if len(self._warned) < _MOST_WARNINGS:
                self._warned.setdefault(line, worker)
            if self._warned.get(line, worker) != worker:
                self._drops_source.add(worker)
                return True
        return is_chatter(line, self._has_gpu)
