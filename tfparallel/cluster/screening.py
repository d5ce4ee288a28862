"""What of the workers' output reaches the screen: without TensorFlow's chatter, errors once.

All of it goes to the log, if there is one. What a user's program prints passes as it is: held back
are lines of stderr alone that TensorFlow's C++ code is known to write, a warning of Python's that
another worker has shown, and the error that ends a worker, if another one has ended by the same.
"""

import re
from collections.abc import Callable

from tfparallel.chatter import is_chatter
from tfparallel.cluster.worker_error import WorkerError

__all__ = ["Screening"]

_WARNING = re.compile(rb"\S.*\.py:\d+: \w*Warning: ")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_MARK = b"\x1e"


class Screening:
    """Stands between a `Reader` and what it writes to.

    Attributes:
        errors: The error that ended each worker that told it, by worker.

    Args:
        show: Writes to the screen: the worker, "stdout" or "stderr", and bytes.
        keep: Writes to the log: the worker and bytes.
        has_gpu: Whether the host has an NVIDIA GPU.
        is_quiet: Whether anything is held back.
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
        kept, shown = [], []
        for line in _LINE.findall(text):
            if line.startswith(_MARK):
                if not line.endswith(b"\n"):
                    self._begun[worker] = line
                    continue
                error = WorkerError.from_line(line)
                if error is not None:
                    kept.append(error.whole.encode())
                    shown += self._of_error(worker, error)
                    continue
            kept.append(line)
            if not self._is_held_back(worker, line):
                shown.append(line)
        if kept:
            self._keep(worker, b"".join(kept))
        if shown:
            self._show(worker, stream, b"".join(shown))

    def _of_error(self, worker: int, error: WorkerError) -> list[bytes]:
        is_known = any(error.place == other.place for other in self.errors.values())
        self.errors[worker] = error
        if not self._is_quiet:
            return [error.whole.encode()]
        return [] if is_known else [f"{line}\n".encode() for line in error.lines]

    def _is_held_back(self, worker: int, line: bytes) -> bool:
        if not self._is_quiet:
            return False
        if worker in self._drops_source:
            self._drops_source.discard(worker)
            if line.startswith(b"  "):
                return True
        if _WARNING.match(line) and self._warned.setdefault(line, worker) != worker:
            self._drops_source.add(worker)
            return True
        return is_chatter(line, self._has_gpu)
