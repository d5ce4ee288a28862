"""Traces that are only looked at, of which the functions that they call keep nothing.

What a model computes is traced before its first step, for shapes, for a proof, for a plan. What
such a trace writes goes nowhere. A `tf.function` of the user's own, as of a metric's
`update_state`, would keep it, and its next call would be that one again: without what it writes.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfparallel.seams.tensorflow import FuncGraph, functions_traced_anew

__all__ = ["traced_apart"]


@contextlib.contextmanager
def traced_apart() -> Iterator[None]:
    """Has functions that are called within the block be traced for it alone."""
    with contextlib.ExitStack() as stack:
        if tf.executing_eagerly():
            stack.enter_context(FuncGraph("traced_apart").as_default())
        stack.enter_context(functions_traced_anew())
        yield
