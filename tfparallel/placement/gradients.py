"""Gradients whose operations stand on the devices of the forward ones.

A `tf.GradientTape` takes no care of devices: whatever it records, the operations of the gradient
go to the device of the scope it is asked in, which is one for the whole model. The graph's own
differentiation can colocate each of them with the operation that it belongs to, and does so inside
a `tf.function` too.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

__all__ = ["gradients"]


def gradients(loss: tf.Tensor, variables: Sequence[keras.Variable]) -> list[tf.Tensor | None]:
    """Differentiates in the graph that is being traced.

    Args:
        loss: A scalar of this graph.
        variables: What it depends on.

    Returns:
        ∂loss/∂v for each, on the device of v's first use; None where there is none.
    """
    return tf.compat.v1.gradients(
        loss, [variable.value for variable in variables], colocate_gradients_with_ops=True
    )
