"""Writes to variables of other processes, and the functions that would overtake them.

A variable of another process that is written eagerly (`reset_state`, `set_weights`) is written by a
message of its own, and a `tf.function` called next may overtake it: it reads the old value, and its
own update is lost or undoes the write.
"""

import functools
from collections.abc import Callable

from tensorflow.python.eager import context

__all__ = ["after_writes", "wait_for_writes"]


def wait_for_writes() -> None:
    """Waits until other processes have done all that was asked of them eagerly.

    A message to each of them and its answer; within one process, nothing to wait for.
    """
    context.async_wait()


def after_writes(function: Callable) -> Callable:
    """Has a function wait for what was written before it is called."""
    if hasattr(function, "waits_for_writes"):
        return function

    @functools.wraps(function)
    def waiting(*args, **kwargs):
        wait_for_writes()
        return function(*args, **kwargs)

    waiting.waits_for_writes = True
    return waiting
