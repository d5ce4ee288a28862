"""Gradients whose operations stand on the devices of the forward ones.

A `tf.GradientTape` takes no care of devices: whatever it records, the operations of the gradient
go to the device of the scope it is asked in, which is one for the whole model. The graph's own
differentiation can colocate each of them with the operation that it belongs to, and does so inside
a `tf.function` too.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

__all__ = ["gradients", "gradients_of_a_part"]


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


def gradients_of_a_part(targets: Sequence, sources: Sequence, seeds: Sequence) -> list[Any]:
    """Differentiates a part of the graph that is being traced, from what it made to what it read.

    Args:
        targets: Tensors that the part made.
        sources: Tensors that it was given, at which it ends, and variables.
        seeds: The gradients of the targets.

    Returns:
        The gradient of each source, or None, on the device of its first use.
    """
    return tf.compat.v1.gradients(
        targets,
        sources,
        grad_ys=seeds,
        stop_gradients=[source for source in sources if not isinstance(source, tf.Variable)],
        colocate_gradients_with_ops=True,
    )
