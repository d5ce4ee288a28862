"""Reads the workers' output without loss, shows it by line with the worker's name, and logs it.

A reader passes output on in whole lines; a carriage return ends a line too, for progress bars. An
unfinished line is passed on after a moment, to show a prompt or a row of dots.
"""

import codecs
import collections
import io
import os
import re
import selectors
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import BinaryIO

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_CHUNK_BYTES = 1 << 16
_PARTIAL_SECONDS = 0.2
# More than a report's lines need.
_TAIL_BYTES = 1 << 14
# Cyan, yellow, green, magenta, blue; red is for errors.
_COLOURS = (36, 33, 32, 35, 34)


class Reader(threading.Thread):
    """Reads the workers' pipes in a separate thread.

    A paused terminal (or `less`) blocks its writer; the launcher must still notice that a worker
    has died.

    Attributes:
        error: The exception of `on_output`, or None. After it, output is read and dropped, to
            avoid blocking the workers.
    """

    def __init__(
        self,
        on_output: Callable[[int, str, bytes], None],
        on_error: Callable[[], None],
    ):
        """Creates the reader; call `start()` after adding all pipes.

        Args:
            on_output: Called with the worker, "stdout" or "stderr", and bytes that end with a
                line or, after a pause, in the middle of one. Joined, they are the whole output.
            on_error: Called in the reader's thread once `error` is set.
        """
        super().__init__(name="output of the workers", daemon=True)
        self.error = None
        self._on_output = on_output
        self._on_error = on_error
        self._selector = selectors.DefaultSelector()
        self._partial = {}
        self._tails = collections.defaultdict(bytes)

    def add(self, worker: int, stream: str, pipe: BinaryIO) -> None:
        """Adds a pipe; the reader closes it at end of file."""
        self._selector.register(pipe, selectors.EVENT_READ, (worker, stream))

    def tail(self, worker: int) -> bytes:
        """Returns the end of the worker's output on both streams."""
        return self._tails[worker]

    def run(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select(_PARTIAL_SECONDS if self._partial else None):
                self._read(key.fileobj, key.data)
            overdue = time.monotonic() - _PARTIAL_SECONDS
            for source, (text, since) in list(self._partial.items()):
                if since <= overdue:
                    del self._partial[source]
                    self._pass_on(source, text)
        self._selector.close()

    def _read(self, pipe, source):
        chunk = os.read(pipe.fileno(), _CHUNK_BYTES)
        if not chunk:
            self._selector.unregister(pipe)
            pipe.close()
        text, since = self._partial.pop(source, (b"", time.monotonic()))
        text += chunk
        # An endless line must not fill the memory.
        whole = bool(chunk) and len(text) < _CHUNK_BYTES
        cut = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1 if whole else len(text)
        if cut < len(text):
            self._partial[source] = (text[cut:], time.monotonic() if cut else since)
        if cut:
            self._pass_on(source, text[:cut])

    def _pass_on(self, source, text):
        worker, stream = source
        self._tails[worker] = (self._tails[worker] + text)[-_TAIL_BYTES:]
        if self.error is not None:
            return
        try:
            self._on_output(worker, stream, text)
        except Exception as error:
            self.error = error
            self._on_error()


def last_lines(tail: bytes, num_lines: int) -> list[str]:
    """Returns the last lines of a tail; for a progress bar, its last state."""
    lines = []
    for line in tail.decode(errors="replace").split("\n"):
        shown = [part for part in line.split("\r") if part.strip()]
        lines += shown[-1:]
    return lines[-num_lines:]


class Prefixer:
    """Prefixes each line with `[worker] `; never mixes two workers' output in one line.

    If another worker's line is unfinished (a progress bar, a prompt), it is ended first.
    """

    def __init__(
        self, stdout: BinaryIO, stderr: BinaryIO, names: Mapping[int, str] | None = None
    ):
        """Takes two binary streams, possibly of the same file, and the names of named workers."""
        self._names = names or {}
        self._streams = {"stdout": stdout, "stderr": stderr}
        # The state of the last line; streams to the same terminal share one.
        self._states = {}
        self._keys = {name: _file_of(stream) for name, stream in self._streams.items()}
        self._colours = {
            name: stream.isatty() and not os.environ.get("NO_COLOR")
            for name, stream in self._streams.items()
        }

    def write(self, worker: int, stream: str, text: bytes) -> None:
        """Writes the output of a `Reader`; `OSError` if the stream's reader has gone."""
        author, last = self._states.get(self._keys[stream], (None, b"\n"))
        if last == b"\n" == text[-1:] and b"\r" not in text:
            self._states[self._keys[stream]] = ((worker, stream), last)
            self._put(stream, self._whole_lines(worker, stream, text))
            return
        out = []
        for segment in _LINE.findall(text):
            content = segment.rstrip(b"\r\n")
            end = segment[len(content) :]
            if author != (worker, stream) and last != b"\n":
                out.append(b"\n")
                last = b"\n"
            if last == b"\n" and content + end == b"\r":
                # A progress bar that starts with a carriage return.
                continue
            starts = last == b"\n" or (last == b"\r" and content)
            if starts:
                out.append(self._prefix(worker, stream, last, content))
            out.append(segment)
            author = (worker, stream)
            last = end[-1:]
        self._states[self._keys[stream]] = (author, last)
        self._put(stream, b"".join(out))

    def _whole_lines(self, worker, stream, text):
        """The fast path of `write` for whole lines, the most common case: ten times as fast."""
        name = self._prefix(worker, stream, b"\n", b"")
        lines = [name + b" " + line if line else name for line in text[:-1].split(b"\n")]
        return b"\n".join([*lines, b""])

    def _put(self, stream, text):
        self._streams[stream].write(text)
        self._streams[stream].flush()

    def finish(self) -> None:
        """Ends an unfinished line."""
        for name, stream in self._streams.items():
            author, last = self._states.get(self._keys[name], (None, b"\n"))
            if last != b"\n" and author[1] == name:
                stream.write(b"\n")
                stream.flush()

    def _prefix(self, worker, stream, last, content):
        name = b"[%s]" % self._names.get(worker, str(worker)).encode()
        if self._colours[stream]:
            name = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[worker % len(_COLOURS)], name)
            if last == b"\r":
                # The line before may have been longer.
                name = b"\x1b[K" + name
        return name + b" " if content else name


def _file_of(stream):
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return id(stream)
    return status.st_dev, status.st_ino


class TextOutput:
    """A bytes writer to the current `sys.stdout` or `sys.stderr`; a notebook's has no `buffer`."""

    def __init__(self, name: str):
        self._stream = getattr(sys, name) or io.StringIO()
        # A character may be split over two writes.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, text: bytes) -> None:
        decoded = self._decoder.decode(text)
        # A stream with another encoding shows "?" for characters it cannot encode.
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(decoded.encode(encoding, "replace").decode(encoding))

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


class WorkerLog:
    """A worker's log file. A context manager, which closes it.

    It appends: a job restarted by a scheduler or by hand continues in the files of
    `launch --log_dir`. A full disk loses output, but does not fail the job.

    Args:
        path: The file.
        tell: Called with the first error by which output was lost.
    """

    def __init__(self, path: str | os.PathLike, tell: Callable[[OSError], None]):
        self._tell = tell
        self._has_reported, self._num_lost = False, 0
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
        """Appends the worker's output, if there is room."""
        if self._file is None:
            return
        if self._num_lost:  # There may be room again.
            lost, self._num_lost = self._num_lost, 0
            if not self._put(b"\n--- %d bytes had no room here ---\n" % lost):
                self._num_lost = lost + len(text)
                return
        self._put(text)

    def _put(self, text):
        """Writes as much as fits; returns whether all of it was written."""
        try:
            while text:  # A nearly full disk takes a part.
                text = text[self._file.write(text) :]
        except OSError as error:
            self._lose(len(text), error)
        return not text

    def _lose(self, num_bytes, error):
        self._num_lost += num_bytes
        if not self._has_reported:
            self._has_reported = True
            self._tell(error)
