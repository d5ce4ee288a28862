"""Writes to variables of other processes, and the functions that would overtake them.

A variable of another process that is written eagerly (`reset_state`, `set_weights`) is written by a
message of its own, and a `tf.function` called next may overtake it: it reads the old value, and its
own update is lost or undoes the write.
"""

import functools
from collections.abc import Callable

from tfparallel.seams.tensorflow import wait_for_other_processes

__all__ = ["after_writes"]


def after_writes(function: Callable) -> Callable:
    """Has a function wait for what was written before it is called."""
    if hasattr(function, "waits_for_writes"):
        return function

    @functools.wraps(function)
    def waiting(*args, **kwargs):
        wait_for_other_processes()
        return function(*args, **kwargs)

    waiting.waits_for_writes = True
    return waiting
