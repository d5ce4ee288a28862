"""Exact gradients and updates in a custom loop: `GradientTape` under `strategy.run`.

def train_step(batch):                                     # on each replica
    with tf.GradientTape() as tape:
        loss = mean_loss(batch)                            # of this replica's n_k examples
    gradients = tape.gradient(loss, model.trainable_variables)
    gradients = tfparallel.reduce_gradients(gradients, weight=tf.shape(batch)[0])
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

optimizer = tfparallel.distribute_optimizer(optimizer)     # once, before the loop
"""

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfparallel.collectives import indexed_slices
from tfparallel.collectives.in_replica import all_gather, all_reduce
from tfparallel.extend import extend
from tfparallel.replication.places import ReplicaPlaces
from tfparallel.strategies import keras_trainer
from tfparallel.strategies.program import ProgramStrategy
from tfparallel.update.place_optimizer import prepare

_SHARED_MOMENTS = (
    "With BatchNormalization(synchronized=True), each replica's loss depends on the rows of all "
    "replicas, so `reduce_gradients` requires the same weight on every replica. Divide each "
    "replica's loss by the number of examples in the global batch before the tape ends, and call "
    "`reduce_gradients(gradients)` without a weight; or drop batches that do not divide evenly "
    "between the replicas. Received weights:"
)


@tf.autograph.experimental.do_not_convert  # It looks at its callers' frames, and has no branch.
def reduce_gradients(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
    weight: tf.Tensor | float | None = None,
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """Returns the gradients of the global loss, on each replica.

    Computes the weighted mean of the replicas' gradients, or, without a weight, their sum:

        g = Σ_k w_k g_k / Σ_k w_k        or        g = Σ_k g_k

    If g_k is the gradient of the mean loss of a replica's w_k examples (or tokens, or whatever the
    loss divides by), the first is the gradient of the mean loss of the global batch, for shards of
    any size. The second is for losses that are already shares of the global loss, such as
    `tf.nn.compute_average_loss` returns; it is exact for shards of equal size. One all-reduce
    carries all dense gradients of a dtype.

    Args:
        gradients: This replica's gradients; None for a variable without one.
        weight: w_k, a scalar: the divisor of this replica's mean loss; 0 for a replica without
            examples. None for the sum.

    Returns:
        The gradients of the global loss. Sparse gradients stay sparse, joined over the replicas.

    Raises:
        RuntimeError: Outside a replica, where there is nothing to reduce.
        ValueError: With a weight, if a Keras loss object has already divided its mean by the
            number of replicas, as it does under any `tf.distribute` strategy of several. A loss in
            a separate `tf.function` that was traced earlier and is called eagerly goes unnoticed.
        tf.errors.InvalidArgumentError: In the step, if the replicas have unequal weights and a
            batch normalization takes the moments of all of them.

    Example:
        >>> strategy = tfparallel.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> with strategy.scope():
        ...     model = build_model()
        ...     optimizer = tfparallel.distribute_optimizer(keras.optimizers.SGD(0.1))
        ...     optimizer.build(model.trainable_variables)
        >>> def step(x, y):  # On each replica.
        ...     with tf.GradientTape() as tape:
        ...         loss = tf.reduce_mean((model(x) - y) ** 2)
        ...     gradients = tape.gradient(loss, model.trainable_variables)
        ...     rows = tf.cast(tf.shape(x)[0], tf.float32)
        ...     gradients = tfparallel.reduce_gradients(gradients, weight=rows)
        ...     optimizer.apply(gradients, model.trainable_variables)
        >>> rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(15)
        >>> train = tf.function(lambda *batch: strategy.run(step, batch))
        >>> for batch in strategy.experimental_distribute_dataset(rows):
        ...     train(*batch)
    """
    if tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            "`reduce_gradients` sums over replicas and must be called in a function that "
            "`strategy.run` runs. Received: a call outside any replica. Move it into the step, "
            "after `tape.gradient`."
        )
    if weight is not None:
        keras_trainer.refuse_divided_loss()
    gradients = list(gradients)
    weigh = _weigher(weight)
    results: list = [None] * len(gradients)
    by_dtype: dict = {}
    for index, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            readings = [_of_all(each, weigh) for each in indexed_slices.readings(gradient)]
            results[index] = indexed_slices.together(readings, gradient.dense_shape)
        elif gradient is not None:
            gradients[index] = weigh(gradient)
            by_dtype.setdefault(gradient.dtype, []).append(index)
    for indices in by_dtype.values():
        flat = tf.concat([tf.reshape(gradients[index], [-1]) for index in indices], 0)
        flat = all_reduce(flat)
        sizes = [tf.size(gradients[index]) for index in indices]
        for index, part in zip(indices, tf.split(flat, sizes, num=len(sizes)), strict=True):
            results[index] = tf.reshape(part, tf.shape(gradients[index]))
            results[index].set_shape(gradients[index].shape)
    for result in results:
        if result is not None:
            # The gradient passes through the user's code before `apply_gradients`. This mark is
            # only read to raise an error: a gradient that was changed on the way has lost it.
            result._tfparallel_reduced = True
    return results


def _of_all(reading: indexed_slices.Reading, weigh) -> indexed_slices.Reading:
    """Gathers a reading of this replica from all replicas."""
    values = weigh(reading.values)
    if reading.kind == indexed_slices.ONCE and _are_equal_on_all(reading.indices):
        return reading._replace(values=all_reduce(values))
    gathered = reading._replace(values=all_gather(values), indices=all_gather(reading.indices))
    return indexed_slices.merged(gathered)


def _are_equal_on_all(indices: tf.Tensor) -> bool:
    """Whether all replicas read a weight with the same indices; constants may differ by replica.

    What the trace cannot decide is checked in each step.
    """

    def compare(strategy, indices):
        first, *others = strategy.experimental_local_results(indices)
        values = [tf.get_static_value(each) for each in (first, *others)]
        if all(each is not None for each in values):
            return all(np.array_equal(values[0], each) for each in values[1:])
        for other in others:
            tf.debugging.assert_equal(
                first,
                other,
                "A weight is indexed with values that do not come from the step's arguments and "
                "differ between replicas. Pass the indices to `strategy.run`. Received:",
            )
        return True

    return tf.distribute.get_replica_context().merge_call(compare, args=(indices,))


def _weigher(weight) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function that multiplies by w_k / Σ w_k; with a weight of 0, even NaN gives 0."""
    if weight is None:
        return lambda tensor: tensor
    weight = tf.cast(weight, tf.float64)  # A share of 1/3 must not limit float64 gradients.
    checked = [_compared(weight)] if keras_trainer.moments_are_shared() else []
    with tf.control_dependencies(checked):
        share = weight / all_reduce(weight)
    return lambda tensor: tf.where(
        weight > 0, tensor * tf.cast(share, tensor.dtype), tf.zeros_like(tensor)
    )


def _compared(weight) -> tf.Tensor:
    """Returns the weight, after checking that it is equal on all replicas with examples.

    With moments of all rows, each loss depends on all rows. Their backward pass sums the replicas'
    gradients unweighted, and a weight that is applied later cannot correct that.
    """
    weights = all_gather(weight[None])
    is_equal = tf.reduce_all((weights == tf.reduce_max(weights)) | (weights == 0))
    with tf.control_dependencies([tf.debugging.Assert(is_equal, [_SHARED_MOMENTS, weights])]):
        return tf.identity(weight)


def distribute_optimizer(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Makes a Keras optimizer clip, accumulate and average after gradients are reduced.

    Under a strategy, Keras clips each replica's gradient before it sums; accumulation and
    `ema_overwrite_frequency` crash (keras#20582). The optimizer returned takes the gradients that
    `reduce_gradients` returns and updates every replica's copies exactly as on one device.

    Args:
        optimizer: A Keras optimizer; it, or this call, must be under the strategy's scope.

    Returns:
        The same object, with its class extended.

    Raises:
        ValueError: If it is not a Keras optimizer.

    Example:
        >>> strategy = tfparallel.MirroredStrategy(["GPU:0", "GPU:1"])
        >>> with strategy.scope():
        ...     model = build_model()
        ...     optimizer = keras.optimizers.Adam(global_clipnorm=1.0)
        ...     optimizer = tfparallel.distribute_optimizer(optimizer)
        ...     optimizer.build(model.trainable_variables)
    """
    if not isinstance(optimizer, keras.Optimizer):
        raise ValueError(
            "`distribute_optimizer` takes a Keras optimizer. Received: "
            f"{optimizer!r} (of type {type(optimizer).__name__}). Pass, for example, "
            "`keras.optimizers.Adam()`."
        )
    is_within = tf.distribute.has_strategy()
    strategy = tf.distribute.get_strategy() if is_within else optimizer._distribution_strategy
    if isinstance(strategy, ProgramStrategy):
        prepare(optimizer, ReplicaPlaces(strategy))
    return extend(optimizer, DistributedOptimizer)


class DistributedOptimizer:
    """Extends a Keras optimizer: in a replica, it applies the global gradients to all copies."""

    is_distributed = True

    def apply(self, grads, trainable_variables=None):
        """Applies gradients that `reduce_gradients` returned."""
        if tf.distribute.in_cross_replica_context() or not tf.distribute.has_strategy():
            return super().apply(grads, trainable_variables)
        keras_trainer.refuse_made_outside(self, tf.distribute.get_strategy())
        _refuse_unreduced(self, grads)
        apply = super().apply

        def apply_in_program(strategy):
            # The gradients are equal on all replicas, so the first replica's will do.
            with strategy.program():
                if not self.built:
                    with tf.init_scope():
                        self.build(trainable_variables)
                apply(grads, trainable_variables)

        return tf.distribute.get_replica_context().merge_call(apply_in_program)


def _refuse_unreduced(optimizer, gradients) -> None:
    missing = [
        index
        for index, gradient in enumerate(gradients)
        if gradient is not None and not getattr(gradient, "_tfparallel_reduced", False)
    ]
    if missing:
        raise ValueError(
            f"{type(optimizer).__name__} was prepared by `distribute_optimizer` and needs the "
            "global gradients that `tfparallel.reduce_gradients` returns. Received: "
            f"{len(missing)} of {len(gradients)} gradients from elsewhere (the first has index "
            f"{missing[0]}). Call `reduce_gradients` right before `apply_gradients`, and let the "
            "optimizer clip (`clipnorm`, `global_clipnorm`, `clipvalue`)."
        )
