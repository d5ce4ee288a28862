"""Gradients summed in shares: each worker gets of a sum what its own replicas update.

    worker 0   g⁰ = g⁰₀ │ g⁰₁              g⁰₀ + g¹₀
    worker 1   g¹ = g¹₀ │ g¹₁      ──►                   g⁰₁ + g¹₁

A sum for all would send twice as much, and half of it to who does not read it. The norm that a
gradient is clipped by is a sum of squares over the shares: a number a weight, or one for all.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfparallel.collectives.between_workers import WorkerGroup
from tfparallel.collectives.reducer import Reducer

__all__ = ["clip_factors", "share_sums"]


def share_sums(
    wholes: Sequence[Sequence[tf.Tensor]],
    ops: tf.distribute.CrossDeviceOps | None,
    workers: WorkerGroup,
) -> list[tf.Tensor]:
    """Sums gradients over the replicas of all workers.

    Args:
        wholes: Of each weight a term of each replica here, in rows that the workers divide.
        ops: What sums over the replicas here.
        workers: The workers.

    Returns:
        Of each weight this worker's rows of the sum.
    """
    here, _ = Reducer(ops, None).totals(wholes, list)
    return workers.reduce_scatter(here)


def clip_factors(
    optimizer: keras.Optimizer,
    shares: Sequence[tf.Tensor],
    others: Sequence[tf.Tensor | tf.IndexedSlices],
    workers: WorkerGroup,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """By what an optimizer that clips by a norm multiplies gradients.

    Args:
        optimizer: One with a `clipnorm` or a `global_clipnorm`.
        shares: Of gradients what this worker has.
        others: Gradients that are whole, the same on all workers.
        workers: The workers.

    Returns:
        A factor for each of the shares, and for each of the others.
    """
    dtypes = [each.dtype for each in (*shares, *others)]
    dtype = tf.float64 if tf.float64 in dtypes else tf.float32
    own = [tf.reduce_sum(tf.square(tf.cast(share, dtype))) for share in shares]
    squares = tf.unstack(workers.all_reduce([tf.stack(own)])[0]) if own else []
    for each in others:
        values = each.values if isinstance(each, tf.IndexedSlices) else each
        squares.append(tf.reduce_sum(tf.square(tf.cast(values, dtype))))
    if optimizer.clipnorm:
        most = tf.constant(optimizer.clipnorm, dtype)
        factors = [most / tf.maximum(tf.sqrt(square), most) for square in squares]
    else:
        # As Keras's: a norm that is no number, or infinite, makes none of all gradients.
        most = tf.constant(optimizer.global_clipnorm, dtype)
        norm = tf.sqrt(tf.add_n(squares))
        factor = most * tf.minimum(1 / norm, 1 / most) + (norm - norm)
        factors = [factor] * len(squares)
    return factors[: len(shares)], factors[len(shares) :]
