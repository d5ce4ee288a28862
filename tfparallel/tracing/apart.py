"""Traces made only to be inspected: a `tf.function` called in one keeps nothing of it.

Shapes, proofs and plans come from traces made before the first step, and whatever those write is
dropped. A `tf.function` of the user's own, such as a metric's `update_state`, would cache what was
traced there, without its write, and the step would reuse it.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfparallel.seams.tensorflow import FuncGraph, functions_traced_anew

__all__ = ["traced_apart"]


@contextlib.contextmanager
def traced_apart() -> Iterator[None]:
    """Within it, each `tf.function` that is called is traced for this trace alone."""
    with contextlib.ExitStack() as stack:
        if tf.executing_eagerly():
            stack.enter_context(FuncGraph("traced_apart").as_default())
        stack.enter_context(functions_traced_anew())
        yield
