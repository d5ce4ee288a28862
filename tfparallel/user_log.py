"""Lines for the person at the terminal, where nothing is wrong: what was chosen, and why.

absl hides information by default, and a warning alarms. A notice is a plain line on stderr; stdout
may be what the program puts out.
"""

import contextlib
import logging as python_logging
import sys
from collections.abc import Iterator

import keras
from absl import logging

__all__ = ["notice", "unnoticed"]

_shown: set[str] = set()  # Of this process, as Python's warnings remember theirs.
_state = {"is_silent": False}


def notice(text: str, *, once: bool = False) -> None:
    """Shows a line on stderr.

    After `keras.config.disable_interactive_logging()`, and where absl shows information anyway, it
    is a record of absl's instead.

    Args:
        text: The line.
        once: Whether the same line is shown once in a process.
    """
    if _state["is_silent"]:
        return
    if once:
        if text in _shown:
            return
        _shown.add(text)
    is_logged = logging.get_absl_logger().isEnabledFor(python_logging.INFO)
    if is_logged or not keras.config.is_interactive_logging_enabled():
        logging.info("%s", text)
    elif sys.stderr is not None:  # Under pythonw there is none.
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Drops the notices of the block: those of a trial that nobody asked for."""
    before, _state["is_silent"] = _state["is_silent"], True
    try:
        yield
    finally:
        _state["is_silent"] = before
