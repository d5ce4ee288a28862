"""Gradients whose operations are on the devices of the forward operations.

A `tf.GradientTape` ignores devices: it places all operations of the gradient on the device of the
scope in which it is called, one for the whole model. The graph's own differentiation can colocate
each of them with its forward operation, also inside a `tf.function`.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


def gradients(loss: tf.Tensor, variables: Sequence[keras.Variable]) -> list[tf.Tensor | None]:
    """Differentiates in the graph that is being traced.

    Args:
        loss: A scalar of this graph.
        variables: The variables to differentiate by.

    Returns:
        ∂loss/∂v for each, on the device of v's first use; None where there is none, and for a
        variable that a tape does not watch.
    """
    values = [variable.value for variable in variables]
    watched = [value for value in values if value.trainable]
    results = tf.compat.v1.gradients(loss, watched, colocate_gradients_with_ops=True)
    by_value = dict(zip(map(id, watched), results, strict=True))
    return [by_value.get(id(value)) for value in values]


def gradients_of_a_part(targets: Sequence, sources: Sequence, seeds: Sequence) -> list[Any]:
    """Differentiates a part of the graph that is being traced, from its outputs to its inputs.

    Args:
        targets: The outputs of the part.
        sources: The inputs of the part, where differentiation stops, and variables.
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
