"""What a program is doing, for a person who waits: a line that changes at a terminal, else a few.

It goes to stderr. At a terminal a sign turns and seconds are counted, and the line is gone when the
work is done. In a file or a pipe a plain line is written for what takes longer than five seconds.
"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import ClassVar

__all__ = ["Activity"]

_SIGNS = "|/-\\"
_ERASE = "\r\x1b[K"
_TURN_SECONDS = 0.2
_PATIENCE_SECONDS = 5.0


class Activity:
    """Shows what is being done for as long as it is open; a context manager.

    Args:
        text: What is being done first, such as "tracing the step of 2 devices".
        is_shown: Whether anything is shown at all; all but one of several workers say nothing.
        patience_seconds: After how long a line is written where there is no terminal.

    Example:
    ```python
    with Activity("loading TensorFlow") as activity:
        ...
        activity.say("measuring layers")
        ...
    ```
    """

    _shown: ClassVar["Activity | None"] = None  # The innermost of this process.

    def __init__(
        self, text: str, *, is_shown: bool = True, patience_seconds: float = _PATIENCE_SECONDS
    ):
        self._text, self._patience = text, patience_seconds
        self._began = time.monotonic()
        self._is_shown = is_shown and sys.stderr is not None  # Under pythonw there is none.
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stream = None

    def __enter__(self) -> "Activity":
        if self._is_shown and self._thread is None:
            try:
                # Of its own: what TensorFlow writes to stderr is held back while it loads.
                number = os.dup(sys.stderr.fileno())
                self._stream = os.fdopen(number, "w", encoding="utf-8", errors="replace")
            except (OSError, ValueError, AttributeError):
                return self  # A notebook's, or one that a program has put in its place.
            self._began = time.monotonic()
            Activity._shown = self
            self._thread = threading.Thread(target=self._show, name="activity", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    @classmethod
    @contextlib.contextmanager
    def paused(cls) -> Iterator[None]:
        """Takes away the line of the activity that is shown, if one is, while others write."""
        shown = cls._shown
        if shown is None or shown._stream is None or not shown._stream.isatty():
            yield
            return
        with shown._lock:
            print(_ERASE, end="", file=shown._stream, flush=True)
            yield

    def say(self, text: str) -> None:
        """Says what is being done from now on."""
        if text != self._text:
            self._text, self._began = text, time.monotonic()

    def stop(self) -> None:
        """Ends it, and takes the line away; a second call does nothing."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            Activity._shown = None
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()
            self._stream = None

    def _show(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # Whoever read it has gone.
            if self._stream.isatty():
                self._turn()
            else:
                self._tell()

    def _turn(self) -> None:
        turns = 0
        while not self._stopped.wait(_TURN_SECONDS):
            turns += 1
            seconds = time.monotonic() - self._began
            line = f"{_SIGNS[turns % len(_SIGNS)]} {self._text} ... {seconds:.0f} s"
            line = line[: shutil.get_terminal_size().columns - 1]
            with self._lock:
                print(f"{_ERASE}{line}", end="", file=self._stream, flush=True)
        if turns:
            print(_ERASE, end="", file=self._stream, flush=True)

    def _tell(self) -> None:
        said, said_at = None, time.monotonic()
        while not self._stopped.wait(_TURN_SECONDS):
            now = time.monotonic()
            if now - said_at >= self._patience and self._text != said:
                said, said_at = self._text, now
                print(f"{said} ...", file=self._stream, flush=True)
