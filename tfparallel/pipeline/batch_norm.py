"""Batch normalization under micro-batches, by choice: deferred statistics.

Its moments are of the batch, and with a schedule that begins to go back before all micro-batches
have come forward nobody knows them in time. Under `batch_normalization="deferred"` each micro-batch
is normalized by its own statistics, and the moving averages move once a step, by those of the whole
batch (torchgpipe's `DeferredBatchNorm`; Kim et al., arXiv 2004.09910, 2020):

    n = Σ n_m,    μ = Σ n_m μ_m / n,    v = (Σ M_m + Σ n_m (μ_m − μ)²) / n

with the count n_m, the mean μ_m and the sum of squared deviations M_m of micro-batch m. So a step
is not that of plain Keras on one device; it is that of `GroupedBatchNormalization` on one device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.data.partition import row_ranges
from tfparallel.data.rows_of_replica import Shard
from tfparallel.extend import extend, original_class
from tfparallel.pipeline.pass_context import current_pass
from tfparallel.pipeline.remote_replicas import Others
from tfparallel.replication.batch_norm import SynchronizedBatchNormalization, in_rows
from tfparallel.seams.keras import layers_in

__all__ = ["DeferredBatchNormalization", "batch_norms", "grouped", "ungrouped", "write_averages"]


class DeferredBatchNormalization(SynchronizedBatchNormalization):
    """Extends `keras.layers.BatchNormalization`: in a pass, moments are kept for the step's end."""

    def call(self, inputs, training=None, mask=None):
        """Normalizes a micro-batch by its own moments; the averages stay as they are."""
        if current_pass() is None:
            return super().call(inputs, training=training, mask=mask)
        with keras.StatelessScope():
            return super().call(inputs, training=training, mask=mask)

    def _moments(self, inputs, mask):
        own = current_pass()
        moments = keras.layers.BatchNormalization._moments(self, inputs, mask)
        if own is None:
            return moments
        if mask is None:
            count, mean, deviations = self._own_moments(inputs)
        else:
            count, mean, deviations = self._own_masked_moments(inputs, mask)
        # Keras adds its epsilon to the count of a masked input.
        correction = tf.constant(0.0 if mask is None else keras.config.epsilon(), count.dtype)
        if own.shard.may_be_idle:
            has_rows = own.shard.num_rows > 0
            count = tf.where(has_rows, count, 0)
            deviations = tf.where(has_rows, deviations, 0)
        own.moments[self, *own.key(self)] = (count, mean, deviations, correction)
        return moments


def write_averages(moments: Mapping[Any, Sequence[tuple]], others: Others) -> None:
    """Moves the averages of each layer by the statistics of the whole batch, on its device.

    Args:
        moments: What the passes here have seen, by layer and call: of each micro-batch.
        others: The replicas in other processes.
    """
    for (layer, *_), found in moments.items():
        with tf.device(layer.moving_mean.value.device):
            here = [tf.stack(each) for each in zip(*found, strict=True)]
            counts, means, deviations, corrections = (
                tf.concat(tf.unstack(each, num=each.shape[0]), 0) for each in others.stacked(here)
            )
            counts = in_rows(counts)
            n = tf.reduce_sum(counts, 0) + corrections[0]
            mean = tf.reduce_sum(counts * means, 0) / n
            spread = tf.reduce_sum(counts * tf.math.squared_difference(means, mean), 0)
            variance = (tf.reduce_sum(deviations, 0) + spread) / n
            _move(layer, mean, variance)


def batch_norms(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """The layers of a model that normalize by the batch."""
    return [
        layer
        for layer in layers_in(model)
        if isinstance(layer, keras.layers.BatchNormalization)
    ]


class GroupedBatchNormalization:
    """Extends `keras.layers.BatchNormalization` on one device: each group of rows by its moments.

    What deferred statistics are held against: plain Keras on the parts, and on the whole.
    """

    def call(self, inputs, training=None, mask=None):
        """Normalizes M consecutive groups of rows; the averages are moved by the whole batch."""
        if not training or not self.trainable:
            return super().call(inputs, training=training, mask=mask)
        parts, number, num_rows = [], self._num_groups, tf.shape(inputs)[0]
        with keras.StatelessScope():
            for k, (start, size) in enumerate(row_ranges(num_rows, number)):
                # A group without rows computes one of another's, and drops it.
                shard = Shard(k, number, start, size, num_rows)
                rows = slice(shard.first_row_used, shard.first_row_used + shard.num_rows_used)
                own_mask = None if mask is None else mask[rows]
                part = super().call(inputs[rows], training=True, mask=own_mask)
                parts.append(shard.without_dummy_row(part))
        wide = keras.ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        _move(self, *self._moments(wide, mask))
        return keras.ops.concatenate(parts, 0)


def grouped(
    build_model: Callable[[], keras.Model], num_micro_batches: int
) -> Callable[[], keras.Model]:
    """Returns a function that builds the one-device model which deferred statistics equal."""

    def build() -> keras.Model:
        model = build_model()
        for layer in batch_norms(model):
            extend(layer, GroupedBatchNormalization, _num_groups=num_micro_batches)
        return model

    return build


def ungrouped(build_model: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
    """Undoes `grouped`, for a model that is to be built in parallel."""

    def build() -> keras.Model:
        model = build_model()
        for layer in batch_norms(model):
            layer.__class__ = original_class(layer)
        return model

    return build


def _move(layer, mean, variance):
    for average, new in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        old = keras.ops.cast(average, new.dtype)
        average.assign(old * layer.momentum + new * (1.0 - layer.momentum))
