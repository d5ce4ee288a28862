"""Clipping by the norms of whole weights, where no gradient at hand is whole."""

import itertools
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.seams.optimizers import clipped_by_norm
from tfparallel.variables.split import whole_of

__all__ = ["clip_parts", "clip_shares"]


def clip_parts(
    optimizer: keras.Optimizer,
    gradients: Sequence[tf.Tensor | tf.IndexedSlices],
    parts: Sequence[keras.Variable],
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Clips each gradient by its norm, those of the parts of a weight by that of the weight.

    Args:
        optimizer: One with a `clipnorm`.
        gradients: Of the parts.
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
        own = _by_norm_of_all([gradients[index] for index in indices], optimizer.clipnorm)
        for index, gradient in zip(indices, own, strict=True):
            clipped[index] = gradient
    return clipped


def clip_shares(
    optimizer: keras.Optimizer,
    shares: Sequence[Sequence[tf.Tensor]],
    others: Sequence[tf.Tensor | tf.IndexedSlices],
    workers: ProcessGroup | None,
) -> tuple[list[Sequence[tf.Tensor]], list[tf.Tensor | tf.IndexedSlices]]:
    """Clips gradients of which each place has a share. A norm is a sum of squares over shares.

    Args:
        optimizer: One that clips or not.
        shares: Of gradients what each place of this worker has.
        others: Gradients that are whole, the same on all workers.
        workers: The workers; None for one.

    Returns:
        The shares and the others.
    """
    if not (optimizer.clipnorm or optimizer.global_clipnorm):
        most = optimizer.clipvalue
        if not most:
            return list(shares), list(others)
        clipped = [[tf.clip_by_value(each, -most, most) for each in own] for own in shares]
        return clipped, [tf.clip_by_value(each, -most, most) for each in others]
    dtypes = [each.dtype for each in (*itertools.chain(*shares), *others)]
    dtype = tf.float64 if tf.float64 in dtypes else tf.float32
    squares = [tf.add_n([_square_of(each, dtype) for each in own]) for own in shares]
    if workers is not None and squares:
        squares = tf.unstack(workers.all_reduce([tf.stack(squares)])[0])
    squares += [_square_of(each, dtype) for each in others]
    if optimizer.clipnorm:
        most = tf.constant(optimizer.clipnorm, dtype)
        factors = [most / tf.maximum(tf.sqrt(square), most) for square in squares]
    else:
        # As Keras's: a norm that is no number, or infinite, makes none of all gradients; and of an
        # embedding's it makes dense ones.
        most = tf.constant(optimizer.global_clipnorm, dtype)
        norm = tf.sqrt(tf.add_n(squares))
        factors = [most * tf.minimum(1 / norm, 1 / most) + (norm - norm)] * len(squares)
        shares = [list(map(tf.convert_to_tensor, own)) for own in shares]
        others = [tf.convert_to_tensor(each) for each in others]
    pairs = zip(shares, factors, strict=False)
    clipped = [[_times(each, factor) for each in own] for own, factor in pairs]
    pairs = zip(others, factors[len(shares) :], strict=True)
    return clipped, [_times(each, factor) for each, factor in pairs]


def _square_of(gradient, dtype: tf.DType) -> tf.Tensor:
    """The square of a norm, where the gradient is."""
    values = _values(gradient)
    with tf.device(values.device):
        return tf.reduce_sum(tf.square(tf.cast(values, dtype)))


def _by_norm_of_all(gradients, clipnorm) -> list:
    """`tf.clip_by_norm` of a gradient in parts: by the norm of the whole."""
    total = tf.add_n([tf.reduce_sum(_values(each) * _values(each)) for each in gradients])
    # As there: the gradient of a root is infinite at zero.
    is_some = total > 0
    norm = tf.where(is_some, tf.sqrt(tf.where(is_some, total, tf.ones_like(total))), total)
    clipped = [_values(each) * clipnorm / tf.maximum(norm, clipnorm) for each in gradients]
    return [_with_values(each, own) for each, own in zip(gradients, clipped, strict=True)]


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
