"""A Keras variable of which each replica keeps a share instead of a copy.

    kernel (5, 2)    θ₀ θ₁ │ θ₂ θ₃ │ θ₄ ·        in N equal shares, padded with zeros
                     CPU:0   CPU:1   CPU:2

For the layer, the model, files and users it remains one `keras.Variable` of the whole shape,
without memory of its own. Reading joins the shares of all workers; assigning cuts the value into
shares. A replica's call gathers it (`replication/gathers.py`).

A matrix is sharded by rows; other weights are flattened.
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.compute_context import context
from tfparallel.extend import extend
from tfparallel.problems import PlacementError
from tfparallel.seams.keras import (
    autocast,
    in_stateless_scope,
    key_of_storage,
    set_storage,
    value_in_scope,
)
from tfparallel.seams.tensorflow import not_recording, record_operation
from tfparallel.tracing.static_shapes import concatenated, reshaped
from tfparallel.variables.composed import ComposedVariable
from tfparallel.variables.mesh_replica import is_in_replica


@dataclasses.dataclass(frozen=True)
class ShardedGradient:
    """The gradient of a sharded variable, for an optimizer that updates shares.

    Attributes:
        terms: The gradient of each local place's share.
    """

    terms: Sequence[tf.Tensor | tf.IndexedSlices]


class ShardedVariable(ComposedVariable):
    """Extends a Keras variable of which each replica keeps a share.

    Attributes:
        share: A variable, each copy of which is a share.
        places: The places of the copies: `tfparallel.update.places.Places`.
        checksum: The checksum of the last assigned whole value, by which workers can compare their
            values; None if it was assigned in a graph.
    """

    checksum: int | None = None

    @property
    def pieces(self) -> Sequence[tf.Variable]:
        """The shares of this process."""
        return self.places.copies(self.share)

    def gradient_of(self, gradients):
        """Joins gradients of the shares.

        Returns a `ShardedGradient` for Keras's own step, which passes it straight to the optimizer.
        """
        terms = list(gradients)
        for k, share in enumerate(self.pieces):
            if not isinstance(terms[k], tf.IndexedSlices):
                with tf.device(share.device):
                    none = tf.zeros(share.shape, share.dtype) if terms[k] is None else terms[k]
                    terms[k] = tf.convert_to_tensor(none)
        if context().takes_shares:
            return ShardedGradient(terms)
        if isinstance(terms[0], tf.IndexedSlices):
            return self._joined_slices(terms)
        return joined_rows([terms], [self], self.places)[0]

    @property
    def value(self):
        """The whole value. Outside of a replica, all workers must read it together."""
        scoped_value = value_in_scope(self)
        if scoped_value is not None:
            return autocast(self, scoped_value)
        gathers = context().gathers
        if gathers is not None:
            return gathers.read(self)
        in_trace = context().replica is not None and not tf.executing_eagerly()
        if (is_in_replica() or in_trace) and not in_stateless_scope():
            raise PlacementError(
                "Under shard='parameters', weights can be read only in the forward pass of Keras's "
                f"`fit`. Received: a read of '{self.path}' in `strategy.run`, or in a backward "
                "pass (`keras.remat`). Train with `fit`, or use shard='optimizer'."
            )
        with tf.device(self.pieces[0].device):
            if self.places.workers is not None and in_stateless_scope():
                value = self._like_the_whole()
            else:
                value = self._joined()
        return self._as_variable(autocast(self, value))

    def _joined_slices(self, terms: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
        """The concatenated slices of all shares; rows of other shares are zeros."""
        places, size = self.places, self.share.shape[0]
        with places.beside(self):
            values = tf.concat([each.values for each in terms], 0)
            pairs = zip(terms, places.bounds(size), strict=True)
            indices = [t.indices + tf.cast(start, t.indices.dtype) for t, (start, _) in pairs]
            # A share may begin after the last row.
            last = tf.cast(self.shape[0] - 1, indices[0].dtype)
            indices = tf.minimum(tf.concat(indices, 0), last)
            if places.workers is not None:
                values, indices = places.workers.all_gather_uneven([values, indices])
        return tf.IndexedSlices(values, indices, tf.constant(list(self.shape), indices.dtype))

    def _joined(self) -> tf.Tensor:
        shares = [tf.convert_to_tensor(copy) for copy in self.pieces]
        with not_recording():
            (whole,) = joined_rows([shares], [self], self.places)
        # All workers read it and compute the same gradient; each keeps its rows.
        record_operation(
            f"shares of {self.path}", [whole], shares, lambda upstream: self._cut(upstream)
        )
        return whole

    def _cut(self, whole) -> list[tf.Tensor]:
        """Cuts a whole tensor into the shares of the local places."""
        shares, shape = [], shape_shared_out(self.shape)
        bounds = self.places.bounds(self.share.shape[0])
        for copy, bounds_of_share in zip(self.pieces, bounds, strict=True):
            with tf.device(copy.device):
                shares.append(cut_out(tf.convert_to_tensor(whole), shape, *bounds_of_share))
        return shares

    def _like_the_whole(self) -> tf.Tensor:
        """A tensor of the whole shape, without communication, for a trace that never runs."""
        rows = tf.concat([tf.convert_to_tensor(copy) for copy in self.pieces], 0)
        rows = tf.concat([rows] * self.places.workers.num_workers, 0)
        return of_shape(rows, self.shape)

    def _direct_assign(self, value):
        value = tf.cast(value, self.share.dtype)
        self.checksum = None
        if tf.executing_eagerly():
            self.checksum = zlib.crc32(np.asarray(value).reshape(-1).view("uint8"))
        for copy, share in zip(self.pieces, self._cut(value), strict=True):
            with tf.device(copy.device):
                copy.assign(apart(share))


def shard_variable(variable: keras.Variable, share: keras.Variable, places: Any) -> None:
    """Makes each place keep a share of a variable; changes it in place.

    Args:
        variable: The whole variable; its memory is freed.
        share: The variable of its shares, which hold its value.
        places: The places.
    """
    key = key_of_storage(variable)  # An optimizer may have noted it already.
    set_storage(variable, None)
    extend(variable, ShardedVariable, share=share, places=places, storage_key=key)


def joined(shares: Sequence[keras.Variable], places: Any) -> list[tf.Tensor]:
    """Joins shares or slots of all replicas to the shapes of their weights."""
    copies = [[tf.convert_to_tensor(copy) for copy in places.copies(each)] for each in shares]
    return joined_rows(copies, [each._sharded for each in shares], places)


def joined_rows(
    by_weight: Sequence[Sequence[tf.Tensor]], weights: Sequence[keras.Variable], places: Any
) -> list[tf.Tensor]:
    """Joins rows of the local places with those of other workers to the shapes of the weights."""
    if not weights:
        return []
    rows = []
    for rows_of_weight, weight in zip(by_weight, weights, strict=True):
        with places.beside(weight):
            local_rows = concatenated(rows_of_weight, 0)
            rows.append(tf.reshape(local_rows, [1, *local_rows.shape]))
    workers = places.workers
    if workers is not None:
        rows = workers.all_gather(rows, [1] * workers.num_workers)
    wholes = []
    for row, weight in zip(rows, weights, strict=True):
        with places.beside(weight):
            wholes.append(of_shape(row, weight.shape))
    return wholes


def of_shape(rows: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """Reshapes the rows of all shares to the weight's shape, without the padding."""
    if rows.shape.num_elements() != math.prod(shape):
        size, *rest = shape_shared_out(shape)
        rows = tf.reshape(rows, [-1, *rest])[:size]
    return reshaped(rows, shape)


def shape_shared_out(shape: Sequence[int]) -> list[int]:
    """The shape in which a weight is cut along axis 0: a matrix unchanged, others flattened."""
    shape = [int(size) for size in shape]
    return shape if len(shape) == 2 else [int(np.prod(shape))]


def apart(rows: tf.Tensor) -> tf.Tensor:
    """Copies rows to separate memory; assigning a slice would keep the whole tensor alive."""
    return tf.raw_ops.DeepCopy(x=rows)


def cut_out(tensor: tf.Tensor, shape: list[int], start: int, end: int) -> tf.Tensor:
    """Reshapes a tensor and cuts out a share, padded with zeros."""
    number = shape[0]
    rows = reshaped(tensor, shape)
    if start > 0 or end < number:
        rows = rows[min(start, number) : min(end, number)]
    missing = (end - start) - max(min(end, number) - start, 0)
    return tf.pad(rows, [[0, missing]] + [[0, 0]] * len(shape[1:])) if missing else rows


def rows_of_share(
    gradient: tf.IndexedSlices, shape: list[int], start: int, end: int
) -> tf.IndexedSlices:
    """The rows of a sparse gradient in a share; other rows become zeros at its first row."""
    if len(shape) < 2:  # Flat.
        raise ValueError(
            "Under `shard`, a weight with sparse gradients is sharded by rows, so it must be a "
            f"matrix. Received: shape {gradient.shape}. Remove `shard`."
        )
    indices = gradient.indices
    inside = (indices >= start) & (indices < end)
    values = tf.where(inside[:, None], gradient.values, tf.zeros_like(gradient.values))
    shifted = tf.where(inside, indices - start, tf.zeros_like(indices))
    return tf.IndexedSlices(values, shifted, tf.constant([end - start, shape[1]], indices.dtype))
