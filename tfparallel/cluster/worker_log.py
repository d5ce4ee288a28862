"""The file that keeps what a worker writes, behind what is in it already.

A job that is started again, by a scheduler or by hand, goes on in the files of `launch --log_dir`.
A disk that is full costs what has no room there, and not the job.
"""

import os
import time
from collections.abc import Callable

__all__ = ["WorkerLog"]


class WorkerLog:
    """A worker's log. A context manager, which closes it.

    Args:
        path: The file.
        tell: Called with the error by which something could not be kept, the first time.
    """

    def __init__(self, path: str | os.PathLike, tell: Callable[[OSError], None]):
        self._tell = tell
        self._has_told, self._num_lost = False, 0
        self._file = None
        try:
            self._file = open(path, "ab", buffering=0)
            if self._file.tell():
                self._put(b"\n--- started again, %s ---\n" % time.strftime("%F %T").encode())
        except OSError as error:
            self._lose(0, error)

    def __enter__(self) -> "WorkerLog":
        return self

    def __exit__(self, *_):
        if self._file is not None:
            self._file.close()

    def write(self, text: bytes) -> None:
        """Keeps what the worker has written, if there is room."""
        if self._file is None:
            return
        if self._num_lost:  # There may be room again.
            lost, self._num_lost = self._num_lost, 0
            if not self._put(b"\n--- %d bytes had no room here ---\n" % lost):
                self._num_lost = lost + len(text)
                return
        self._put(text)

    def _put(self, text):
        """Whether all of it was written."""
        try:
            while text:  # What has room for a part takes the part.
                text = text[self._file.write(text) :]
        except OSError as error:
            self._lose(len(text), error)
        return not text

    def _lose(self, num_bytes, error):
        self._num_lost += num_bytes
        if not self._has_told:
            self._has_told = True
            self._tell(error)
