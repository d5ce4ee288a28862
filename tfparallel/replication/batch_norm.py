"""Batch normalization over the global batch, with one reduction a layer.

Each replica takes its own count n_k, mean m_k and sum of squared deviations M_k; all replicas
exchange these three, and each combines them (Chan, Golub, LeVeque, "Algorithms for computing the
sample variance", The American Statistician 37(3), 1983):

    n = Σ n_k,    m = Σ n_k m_k / n,    v = (Σ M_k + Σ n_k (m_k − m)²) / n

No large numbers are subtracted, as they are in E[x²] − E[x]². A replica without examples
computes one dummy row and counts it 0 times.
"""

import keras
import tensorflow as tf

from tfparallel.collectives import in_replica
from tfparallel.replication import shard as shards


class SynchronizedBatchNormalization:
    """Extends `keras.layers.BatchNormalization`: in a replicated call, moments are global."""

    synchronize = True  # False on the instance: each replica takes its own moments.

    def _moments(self, inputs, mask):
        shard = shards.current()
        if shard is None or not self.synchronize:
            return super()._moments(inputs, mask)
        axes = self._reduction_axes
        counted = tf.cast(shard.num_rows > 0, inputs.dtype)
        if mask is None:
            positions = tf.size(inputs) // inputs.shape[self.axis]
            count = counted * tf.cast(positions, inputs.dtype)
            mean, variance = tf.nn.moments(inputs, axes)
            deviations = variance * count
            correction = 0.0
        else:
            weights = tf.broadcast_to(tf.cast(mask[..., None], inputs.dtype), tf.shape(inputs))
            channel_counts = tf.reduce_sum(weights, axes)
            # `where`, not a product: a masked position may hold NaN.
            kept = tf.where(weights > 0, inputs, 0)
            mean = tf.math.divide_no_nan(tf.reduce_sum(kept, axes), channel_counts)
            squares = tf.math.squared_difference(
                inputs, tf.reshape(mean, self._channel_shape(inputs))
            )
            deviations = counted * tf.reduce_sum(tf.where(weights > 0, squares, 0), axes)
            count = counted * channel_counts[0]
            correction = keras.config.epsilon()  # Keras adds it to the count of a masked input.
        return _combine(shard, count, mean, deviations, correction)

    def _channel_shape(self, inputs):
        shape = [1] * inputs.shape.rank
        shape[self.axis] = inputs.shape[self.axis]
        return shape


def _combine(shard, count, mean, deviations, correction):
    """Exchanges (n_k, m_k, M_k) between the replicas; returns the global mean and variance."""
    own = tf.concat([count[None], mean, deviations], axis=0)
    row = tf.one_hot(shard.replica, shard.num_replicas, dtype=own.dtype)
    # A sum of rows that are zero but for one's own is an all-gather whose gradient is as simple.
    table = in_replica.all_reduce(row[:, None] * own[None, :])
    counts, means, all_deviations = tf.split(table, [1, mean.shape[0], mean.shape[0]], axis=1)
    total = tf.reduce_sum(counts) + correction
    global_mean = tf.reduce_sum(counts * means, axis=0) / total
    spread = counts * tf.math.squared_difference(means, global_mean)
    return global_mean, tf.reduce_sum(all_deviations + spread, axis=0) / total
