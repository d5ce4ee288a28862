"""Clips gradients of parts and shares by the norms of whole weights."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.seams.optimizers import clipped_by_norm
from tfparallel.variables.sharded import ShardedGradient
from tfparallel.variables.split import whole_of


def clip_parts(
    optimizer: keras.Optimizer,
    gradients: Sequence[tf.Tensor | tf.IndexedSlices],
    parts: Sequence[keras.Variable],
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Clips each gradient by its norm; the parts of a weight by the norm of the whole gradient.

    Args:
        optimizer: An optimizer with a `clipnorm`.
        gradients: The gradients of the parts.
        parts: Weights, or parts of weights.
    """
    groups: dict[int, list[int]] = {}
    for index, part in enumerate(parts):
        groups.setdefault(id(whole_of(part)), []).append(index)
    clipped = list(gradients)
    for indices in groups.values():
        if len(indices) == 1:
            clipped[indices[0]] = clipped_by_norm(optimizer, gradients[indices[0]])
            continue
        clipped_parts = _by_norm_of_all([gradients[index] for index in indices], optimizer.clipnorm)
        for index, gradient in zip(indices, clipped_parts, strict=True):
            clipped[index] = gradient
    return clipped


def norm_factors(
    optimizer: keras.Optimizer,
    gradients: Sequence[Any],
    parts: Sequence[keras.Variable],
    workers: ProcessGroup | None,
    scale: float | None = None,
) -> list[tf.Tensor] | None:
    """The factors by which clipping multiplies sharded gradients.

    A squared norm is summed over the shares of all places, and over the parts of a weight.

    Args:
        optimizer: Any optimizer; it need not clip.
        gradients: Each a `ShardedGradient`, or whole and the same on all workers; or None.
        parts: The weights, or parts of weights.
        workers: The workers; None for one.
        scale: The divisor of the gradients before they are clipped.

    Returns:
        A factor for each gradient; None if the optimizer does not clip by a norm.
    """
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    if not (present and (optimizer.clipnorm or optimizer.global_clipnorm)):
        return None
    terms = [g.terms if isinstance(g, ShardedGradient) else [g] for g in gradients]
    is_double = any(each.dtype == tf.float64 for i in present for each in terms[i])
    dtype = tf.float64 if is_double else tf.float32
    squares = {i: tf.add_n([_square_of(each, dtype) for each in terms[i]]) for i in present}
    sharded = [i for i in present if isinstance(gradients[i], ShardedGradient)]
    if workers is not None and sharded:
        sums = workers.all_reduce([tf.stack([squares[i] for i in sharded])])[0]
        squares |= dict(zip(sharded, tf.unstack(sums), strict=True))
    unscaled = 1.0 if scale is None else scale
    if optimizer.clipnorm:
        limit = tf.constant(optimizer.clipnorm, dtype)
        of_weight: dict[int, list[tf.Tensor]] = {}
        for i, square in squares.items():
            of_weight.setdefault(id(whole_of(parts[i])), []).append(square)
        norms = {key: tf.sqrt(tf.add_n(terms)) / unscaled for key, terms in of_weight.items()}
        return [limit / tf.maximum(norms.get(id(whole_of(part)), limit), limit) for part in parts]
    # As in Keras: a norm that is NaN or infinite turns all gradients into NaN.
    limit = tf.constant(optimizer.global_clipnorm, dtype)
    norm = tf.sqrt(tf.add_n(list(squares.values()))) / unscaled
    return [limit * tf.minimum(1 / norm, 1 / limit) + (norm - norm)] * len(gradients)


def clip_shares(
    optimizer: keras.Optimizer,
    gradients: Sequence[tf.Tensor | tf.IndexedSlices],
    factors: Sequence[tf.Tensor],
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Clips the gradients of one place's shares by their `norm_factors`."""
    if not optimizer.clipnorm:  # Like Keras, which makes an embedding's gradients dense.
        gradients = list(map(tf.convert_to_tensor, gradients))
    return [_times(*pair) for pair in zip(gradients, factors, strict=True)]


def _square_of(gradient, dtype: tf.DType) -> tf.Tensor:
    """The square of a norm, on the device of the gradient."""
    values = _values(gradient)
    with tf.device(values.device):
        return tf.reduce_sum(tf.square(tf.cast(values, dtype)))


def _by_norm_of_all(gradients, clipnorm) -> list:
    """Applies `tf.clip_by_norm` to a gradient in parts, by the norm of the whole."""
    total = tf.add_n([tf.reduce_sum(_values(each) * _values(each)) for each in gradients])
    # As in `tf.clip_by_norm`: the gradient of a square root is infinite at zero.
    is_nonzero = total > 0
    norm = tf.where(is_nonzero, tf.sqrt(tf.where(is_nonzero, total, tf.ones_like(total))), total)
    clipped = [_values(each) * clipnorm / tf.maximum(norm, clipnorm) for each in gradients]
    return [_with_values(each, values) for each, values in zip(gradients, clipped, strict=True)]


def _times(gradient, factor: tf.Tensor):
    values = _values(gradient)
    with tf.device(values.device):
        return _with_values(gradient, values * tf.cast(factor, values.dtype))


def _values(gradient) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _with_values(gradient, values: tf.Tensor):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values
