"""Traces for inspection only: a `tf.function` called in one does not cache its trace.

Shapes, proofs and plans come from traces before the first step, whose writes are dropped. A user's
own `tf.function`, such as a metric's `update_state`, would cache such a trace, without its write,
and the step would reuse it.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfparallel.compute_context import within
from tfparallel.seams.tensorflow import FuncGraph, functions_traced_anew


@contextlib.contextmanager
def traced_apart() -> Iterator[None]:
    """Traces each `tf.function` that is called within the block only for this trace."""
    with contextlib.ExitStack() as stack:
        if tf.executing_eagerly():
            stack.enter_context(FuncGraph("traced_apart").as_default())
        stack.enter_context(functions_traced_anew())
        stack.enter_context(within(gathers=None))  # Nothing that runs reads a weight here.
        yield
