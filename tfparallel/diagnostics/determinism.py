"""Makes a GPU compute the same sums twice, to full float32 precision."""

import tensorflow as tf

__all__ = ["make_deterministic"]


def make_deterministic(*, operations: bool = True) -> None:
    """Turns on deterministic operations and turns off TF32, for this process.

    Both change the speed, and TF32 keeps 10 bits of a float32's 23: no check
    could tell a wrong sum from a rounded one. A random seed must be set before
    the first operation that draws (`keras.utils.set_random_seed`).

    Args:
        operations: Whether operations are to be deterministic. Keras does not compile for XLA
            where they are.
    """
    if operations:
        tf.config.experimental.enable_op_determinism()
    tf.config.experimental.enable_tensor_float_32_execution(False)
