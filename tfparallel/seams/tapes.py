"""Tapes of TensorFlow that are entered again."""

import contextlib
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.python import pywrap_tfe


@contextlib.contextmanager
def recording_on(tape: tf.GradientTape) -> Iterator[None]:
    """Records the block on a persistent tape that has ended, its own gradients included.

    Entering it again with `with tape:` would do the same, but `tape.gradient` would warn.
    """
    pywrap_tfe.TFE_Py_TapeSetAdd(tape._tape._tape)
    try:
        yield
    finally:
        pywrap_tfe.TFE_Py_TapeSetRemove(tape._tape._tape)
