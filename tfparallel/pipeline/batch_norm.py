"""Deferred batch normalization under micro-batches: `batch_normalization="deferred"`.

Its moments are those of the batch; if a schedule starts backward passes before all micro-batches
have gone forward, no stage knows them in time. With "deferred", each micro-batch is normalized by
its own statistics, and the moving averages are updated once per step, from those of the whole batch
(torchgpipe's `DeferredBatchNorm`; Kim et al., arXiv 2004.09910, 2020):

    n = Σ n_m,    μ = Σ n_m μ_m / n,    v = (Σ M_m + Σ n_m (μ_m − μ)²) / n

with the count n_m, the mean μ_m and the sum of squared deviations M_m of micro-batch m. So a step
differs from that of plain Keras on one device; it equals that of `GroupedBatchNormalization`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.data.partition import row_ranges
from tfparallel.extend import extend, original_class
from tfparallel.piece import Piece
from tfparallel.pipeline.pass_context import current_pass
from tfparallel.pipeline.remote_replicas import Others
from tfparallel.replication.batch_norm import SynchronizedBatchNormalization, in_rows
from tfparallel.seams.keras import layers_in


class DeferredBatchNormalization(SynchronizedBatchNormalization):
    """Extends `keras.layers.BatchNormalization`: a pass keeps moments for the end of the step."""

    def call(self, inputs, training=None, mask=None):
        """Normalizes a micro-batch by its own moments; the averages do not change."""
        if current_pass() is None:
            return super().call(inputs, training=training, mask=mask)
        with keras.StatelessScope():
            return super().call(inputs, training=training, mask=mask)

    def _moments(self, inputs, mask):
        stage_pass = current_pass()
        moments = keras.layers.BatchNormalization._moments(self, inputs, mask)
        if stage_pass is None:
            return moments
        if mask is None:
            count, mean, deviations = self._own_moments(inputs)
        else:
            count, mean, deviations = self._own_masked_moments(inputs, mask)
        # Keras adds its epsilon to the count of a masked input.
        correction = tf.constant(0.0 if mask is None else keras.config.epsilon(), count.dtype)
        if stage_pass.piece.may_be_idle:
            has_rows = stage_pass.piece.num_rows > 0
            count = tf.where(has_rows, count, 0)
            deviations = tf.where(has_rows, deviations, 0)
        stage_pass.moments[self, *stage_pass.key(self)] = (count, mean, deviations, correction)
        return moments


def write_averages(moments: Mapping[Any, Sequence[tuple]], others: Others) -> None:
    """Updates each layer's averages by the statistics of the whole batch, on its device.

    Args:
        moments: The moments of the passes in this process, by layer and call.
        others: The replicas in other processes.
    """
    for (layer, *_), of_pieces in moments.items():
        with tf.device(layer.moving_mean.value.device):
            local = [tf.stack(each) for each in zip(*of_pieces, strict=True)]
            counts, means, deviations, corrections = (
                tf.concat(tf.unstack(each, num=each.shape[0]), 0) for each in others.stacked(local)
            )
            counts = in_rows(counts)
            n = tf.reduce_sum(counts, 0) + corrections[0]
            mean = tf.reduce_sum(counts * means, 0) / n
            spread = tf.reduce_sum(counts * tf.math.squared_difference(means, mean), 0)
            variance = (tf.reduce_sum(deviations, 0) + spread) / n
            _move(layer, mean, variance)


def batch_norms(model: keras.Model) -> list[keras.layers.BatchNormalization]:
    """Returns the layers of a model that normalize by batch statistics."""
    return [
        layer
        for layer in layers_in(model)
        if isinstance(layer, keras.layers.BatchNormalization)
    ]


class GroupedBatchNormalization:
    """Extends `keras.layers.BatchNormalization` on one device: normalizes groups of rows apart.

    The reference for deferred statistics: plain Keras on the parts, and on the whole.
    """

    def call(self, inputs, training=None, mask=None):
        """Normalizes M consecutive groups of rows; updates the averages by the whole batch."""
        if not training or not self.trainable:
            return super().call(inputs, training=training, mask=mask)
        parts, number, num_rows = [], self._num_groups, tf.shape(inputs)[0]
        with keras.StatelessScope():
            for k, (start, size) in enumerate(row_ranges(num_rows, number)):
                # An empty group computes one row of another, and drops it.
                piece = Piece(k, number, start, size, num_rows)
                rows = slice(piece.first_row_used, piece.first_row_used + piece.num_rows_used)
                own_mask = None if mask is None else mask[rows]
                part = super().call(inputs[rows], training=True, mask=own_mask)
                parts.append(piece.without_dummy_row(part))
        wide = keras.ops.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        _move(self, *self._moments(wide, mask))
        return keras.ops.concatenate(parts, 0)


def grouped(
    build_model: Callable[[], keras.Model], num_micro_batches: int
) -> Callable[[], keras.Model]:
    """Returns a function that builds the one-device model with the same results as "deferred"."""

    def build() -> keras.Model:
        model = build_model()
        for layer in batch_norms(model):
            extend(layer, GroupedBatchNormalization, _num_groups=num_micro_batches)
        return model

    return build


def ungrouped(build_model: Callable[[], keras.Model]) -> Callable[[], keras.Model]:
    """Undoes `grouped`, for a model that is then built in parallel."""

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
