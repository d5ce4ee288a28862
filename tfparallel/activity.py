"""Reports what a program is doing: a line on stderr for anything that takes over five seconds."""

import contextlib
import os
import sys
import threading
import time

_LOOK_SECONDS = 0.2
_PATIENCE_SECONDS = 5.0


class Activity:
    """Reports the current activity while it is open; a context manager.

    Args:
        text: The first activity, such as "tracing the step of 2 devices".
        is_shown: Whether to print at all; only one of several workers does.
        patience_seconds: The delay before a line is printed.

    Example:
    ```python
    with Activity("loading TensorFlow") as activity:
        ...
        activity.say("measuring layers")
        ...
    ```
    """

    def __init__(
        self, text: str, *, is_shown: bool = True, patience_seconds: float = _PATIENCE_SECONDS
    ):
        self._text, self._patience = text, patience_seconds
        self._is_shown = is_shown and sys.stderr is not None  # pythonw has no stderr.
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._stream = None

    def __enter__(self) -> "Activity":
        if self._is_shown and self._thread is None:
            try:
                # A duplicate, since stderr is filtered while TensorFlow loads.
                number = os.dup(sys.stderr.fileno())
                self._stream = os.fdopen(number, "w", encoding="utf-8", errors="replace")
            except (OSError, ValueError, AttributeError):
                return self  # A notebook, or a program, has replaced stderr.
            self._thread = threading.Thread(target=self._tell, name="activity", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def say(self, text: str) -> None:
        """Sets the current activity."""
        self._text = text

    def stop(self) -> None:
        """Stops reporting; a second call does nothing."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()
            self._stream = None

    def _tell(self) -> None:
        said, said_at = None, time.monotonic()
        with contextlib.suppress(OSError, ValueError):  # The reader has exited.
            while not self._stopped.wait(_LOOK_SECONDS):
                now = time.monotonic()
                if now - said_at >= self._patience and self._text != said:
                    said, said_at = self._text, now
                    print(f"{said} ...", file=self._stream, flush=True)
