"""Exact gradients and updates in a custom loop: `GradientTape` under `strategy.run`.

    def train_step(batch):                                     # on each replica
        with tf.GradientTape() as tape:
            loss = mean_loss(batch)                            # of this replica's n_k examples
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = tfparallel.reduce_gradients(gradients, weight=tf.shape(batch)[0])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    optimizer = tfparallel.distribute_optimizer(optimizer)     # once, before the loop
"""

from collections.abc import Sequence

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib

from tfparallel.collectives.in_replica import all_gather, all_reduce
from tfparallel.replication.extend import extend

__all__ = ["all_gather", "all_reduce", "distribute_optimizer", "reduce_gradients"]


def reduce_gradients(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None], weight: tf.Tensor | float = 1.0
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """Returns the weighted mean of the replicas' gradients, on each replica.

        g = Σ_k w_k g_k / Σ_k w_k

    With g_k the gradient of the mean loss of a replica's w_k examples (or tokens, or whatever the
    loss divides by), g is the gradient of the mean loss of the global batch, for any shard sizes.
    One all-reduce carries all dense gradients of a dtype and the weight.

    Args:
        gradients: This replica's gradients; None where there is none.
        weight: w_k, a scalar: what this replica's loss was divided by.

    Returns:
        The gradients of the global mean. Sparse ones stay sparse, joined over the replicas.

    Raises:
        RuntimeError: Outside a replica, where there is nothing to reduce.
    """
    if tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            "`reduce_gradients` sums over replicas. It must be called in a function that "
            "`strategy.run` runs. Received: a call outside any replica. Move it into the step, "
            "after `tape.gradient`."
        )
    gradients = list(gradients)
    weight = tf.convert_to_tensor(weight)
    weight = weight if weight.dtype.is_floating else tf.cast(weight, keras.config.floatx())
    total = tf.convert_to_tensor(all_reduce(weight))
    results: list = [None] * len(gradients)
    by_dtype: dict = {}
    for index, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            share = tf.cast(weight / total, gradient.values.dtype)
            results[index] = tf.IndexedSlices(
                all_gather(gradient.values * share), all_gather(gradient.indices), gradient.dense_shape
            )
        elif gradient is not None:
            by_dtype.setdefault(gradient.dtype, []).append(index)
    for dtype, indices in by_dtype.items():
        flat = tf.concat([tf.reshape(gradients[index], [-1]) for index in indices], 0)
        flat = all_reduce(flat * tf.cast(weight, dtype)) / tf.cast(total, dtype)
        sizes = [tf.size(gradients[index]) for index in indices]
        for index, part in zip(indices, tf.split(flat, sizes, num=len(sizes)), strict=True):
            results[index] = tf.reshape(part, tf.shape(gradients[index]))
            results[index].set_shape(gradients[index].shape)
    for result in results:
        if result is not None:
            result._is_reduced = True
    return results


def distribute_optimizer(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Makes a Keras optimizer clip, accumulate and average after the reduction over replicas.

    Under a strategy, Keras clips each replica's own gradient and then sums; accumulation and
    `ema_overwrite_frequency` crash (keras#20582). The optimizer returned takes gradients from
    `reduce_gradients` as they are, sums any others, as Keras does, and then updates each replica's
    copies exactly as on one device.

    Args:
        optimizer: A Keras optimizer, created under the strategy's scope.

    Returns:
        The same object, its class extended.

    Raises:
        ValueError: If it is no Keras optimizer.
    """
    if not isinstance(optimizer, keras.Optimizer):
        raise ValueError(
            "`distribute_optimizer` takes a Keras optimizer. Received: "
            f"{optimizer!r} (of type {type(optimizer).__name__}). Pass, for example, "
            "`keras.optimizers.Adam()`."
        )
    return extend(optimizer, DistributedOptimizer)


class DistributedOptimizer:
    """Extends a Keras optimizer: in a replica, it updates that replica's copies alone."""

    is_distributed = True

    def apply(self, grads, trainable_variables=None):
        """Applies gradients: reduces those that are not reduced, then updates."""
        context = tf.distribute.get_replica_context()
        strategy = tf.distribute.get_strategy()
        if context is None or strategy.num_replicas_in_sync == 1:
            return super().apply(grads, trainable_variables)
        grads = [_reduced(gradient) for gradient in grads]
        if not self.built:
            _build_outside(self, list(trainable_variables))
        return context.merge_call(
            _apply_in_program, args=(super().apply, grads, list(trainable_variables))
        )


def _reduced(gradient):
    if gradient is None or getattr(gradient, "_is_reduced", False):
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            all_gather(gradient.values), all_gather(gradient.indices), gradient.dense_shape
        )
    return all_reduce(gradient)


def _apply_in_program(strategy, apply, grads, trainable_variables):
    first = strategy.experimental_local_results
    grads = [g if g is None else first(g)[0] for g in grads]
    apply = first(apply)[0]
    with strategy.program():
        apply(grads, [first(v)[0] for v in trainable_variables])


def _build_outside(optimizer, variables):
    def build(strategy, variables):
        del strategy
        with tf.init_scope(), distribute_lib.get_strategy().scope():
            optimizer.build(variables)

    tf.distribute.get_replica_context().merge_call(build, args=(variables,))
