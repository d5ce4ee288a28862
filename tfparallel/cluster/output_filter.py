"""What of the workers' output reaches the screen: without TensorFlow's chatter, errors once.

All of it goes to the log, if there is one. What a user's program prints passes as it is: held back
are lines of stderr alone that TensorFlow's C++ code is known to write, a warning of Python's that
another worker has shown, and the error that ends a worker, if another one has ended by the same.
"""

import re
from collections.abc import Callable

from tfparallel.chatter import is_chatter, may_hold_chatter
from tfparallel.cluster.worker_error import LINE, LINE_BYTES, WorkerError, begin_of_line

__all__ = ["OutputFilter"]

_WARNING = re.compile(rb"\S.*\.py:\d+: \w*Warning: ")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
# So that a program that warns again and again does not fill the memory.
_MOST_WARNINGS, _WARNING_BYTES = 1000, 2000


class OutputFilter:
    """Stands between a `Reader` and what it writes to.

    Args:
        show: Writes to the screen: the worker, "stdout" or "stderr", and bytes.
        keep: Writes to the log: the worker and bytes.
        has_gpu: Whether the host has an NVIDIA GPU.
        is_quiet: Whether anything is held back.

    Attributes:
        errors: The error that ended each worker that told it, by worker.
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
        self._begun: dict[int, bytes] = {}  # The line of an error, which may come in pieces.
        self._warned: dict[bytes, int] = {}
        self._drops_source: set[int] = set()  # Workers whose next line belongs to a warning.

    def write(self, worker: int, stream: str, text: bytes) -> None:
        """Takes what a `Reader` hands on."""
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
        """Passes on what began like the line of an error and has no end."""
        for worker, text in self._begun.items():
            self._pass_on(worker, text, 0)
        self._begun.clear()

    def _pass_on(self, worker: int, text: bytes, end: int) -> None:
        """Passes text on; lines for the launcher are looked for before `end`."""
        kept, shown, position = [], [], 0
        for found in LINE.finditer(text, 0, end):
            error = WorkerError.from_line(found[0])
            if error is not None:
                before = text[position : found.start()]
                kept += before, error.whole.encode()
                shown += self._of_lines(worker, before), *self._of_error(worker, error)
                position = found.end()
        kept.append(text[position:])
        shown.append(self._of_lines(worker, text[position:]))
        if whole := b"".join(kept):
            self._keep(worker, whole)
        if screened := b"".join(shown):
            self._show(worker, "stderr", screened)

    def _of_lines(self, worker: int, text: bytes) -> bytes:
        """What of lines that tell no error is shown."""
        if not self._is_quiet:
            return text
        # Most of what programs write need not be looked at line by line.
        if worker in self._drops_source or b"Warning: " in text or may_hold_chatter(text):
            lines = _LINE.findall(text)
            return b"".join(line for line in lines if not self._is_held_back(worker, line))
        return text

    def _of_error(self, worker: int, error: WorkerError) -> list[bytes]:
        is_known = any(error.place == other.place for other in self.errors.values())
        self.errors[worker] = error
        if not self._is_quiet:
            return [error.whole.encode()]
        return [] if is_known else [f"{line}\n".encode() for line in error.lines]

    def _is_held_back(self, worker: int, line: bytes) -> bool:
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
