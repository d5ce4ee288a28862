"""Notices for the person at the terminal, such as which algorithm was chosen and why.

absl hides information by default, and a warning would alarm. A notice is a plain line on stderr;
stdout may be the program's output.
"""

import contextlib
import logging as python_logging
import sys
from collections.abc import Iterator

import keras
from absl import logging

_shown: set[str] = set()  # In this process, like Python's record of shown warnings.
_state = {"is_silent": False}


def notice(text: str, *, once: bool = False) -> None:
    """Shows a line on stderr.

    After `keras.config.disable_interactive_logging()`, or if absl shows information anyway, it is
    an absl record instead.

    Args:
        text: The line.
        once: Whether to show the same line only once per process.
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
    elif sys.stderr is not None:  # pythonw has no stderr.
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def unnoticed() -> Iterator[None]:
    """Drops the notices of the block, such as those of a trial run."""
    before, _state["is_silent"] = _state["is_silent"], True
    try:
        yield
    finally:
        _state["is_silent"] = before
