"""A Keras variable of which each replica keeps a share, in place of a copy.

    kernel (5, 2)    θ₀ θ₁ │ θ₂ θ₃ │ θ₄ ·        in N equal shares, zeros behind the last element
                     CPU:0   CPU:1   CPU:2

The variable stays what the layer, the model, the file and the user know: one `keras.Variable` of
the whole shape, without memory of its own. What is read is joined from the shares of all workers,
what is assigned is cut into them. In a replica's call it is gathered (`replication/gathers.py`).

A matrix is shared out by rows, everything else flat.
"""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.compute_context import context
from tfparallel.extend import extend
from tfparallel.problems import PlacementError
from tfparallel.seams.keras import autocast, in_stateless_scope, set_storage, value_in_scope
from tfparallel.seams.tensorflow import not_recording, record_operation
from tfparallel.variables.composed import ComposedVariable
from tfparallel.variables.replica import is_in_replica

__all__ = [
    "ShardedGradient",
    "ShardedVariable",
    "apart",
    "cut_out",
    "joined",
    "joined_rows",
    "rows_of_share",
    "shape_shared_out",
    "shard_variable",
]


@dataclasses.dataclass(frozen=True)
class ShardedGradient:
    """The gradient of a sharded variable, for an optimizer that updates shares.

    Attributes:
        terms: At each place here the gradient of the place's share.
    """

    terms: Sequence[tf.Tensor | tf.IndexedSlices]


class ShardedVariable(ComposedVariable):
    """Extends a variable of Keras of which each replica keeps a share.

    Attributes:
        share: A variable, each copy of which is a share.
        places: Where the copies are: `tfparallel.update.places.Places`.
        checksum: Of the whole value that was assigned last, so that workers can tell whether all
            were given the same; None if that was in a graph.
    """

    checksum: int | None = None

    @property
    def pieces(self) -> Sequence[tf.Variable]:
        """The shares of this process."""
        return self.places.copies(self.share)

    def gradient_of(self, gradients):
        """Joins gradients of the shares.

        Keras's own step, which hands them straight to the optimizer, takes a `ShardedGradient`.
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
        """The whole value. Outside of a replica all workers must read it together."""
        held = value_in_scope(self)
        if held is not None:
            return autocast(self, held)
        gathers = context().gathers
        if gathers is not None:
            return gathers.read(self)
        if is_in_replica() and not in_stateless_scope():
            raise PlacementError(
                "Under shard='parameters' Keras's `fit` joins the weights that a replica reads in "
                f"its forward pass. Received: a read of '{self.path}' in `strategy.run`, or in a "
                "backward pass (`keras.remat`). Train by `fit`, or take shard='optimizer'."
            )
        with tf.device(self.pieces[0].device):
            if self.places.workers is not None and in_stateless_scope():
                value = self._like_the_whole()
            else:
                value = self._joined()
        return self._as_variable(autocast(self, value))

    def _joined_slices(self, terms: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
        """The slices of all shares, end to end; those of other shares' rows are zeros."""
        places, size = self.places, self.share.shape[0]
        with places.beside(self):
            values = tf.concat([each.values for each in terms], 0)
            pairs = zip(terms, places.bounds(size), strict=True)
            indices = [t.indices + tf.cast(start, t.indices.dtype) for t, (start, _) in pairs]
            # A share may begin behind the last row.
            last = tf.cast(self.shape[0] - 1, indices[0].dtype)
            indices = tf.minimum(tf.concat(indices, 0), last)
            if places.workers is not None:
                values, indices = places.workers.all_gather_uneven([values, indices])
        return tf.IndexedSlices(values, indices, tf.constant(list(self.shape), indices.dtype))

    def _joined(self) -> tf.Tensor:
        shares = [tf.convert_to_tensor(copy) for copy in self.pieces]
        with not_recording():
            (whole,) = joined_rows([shares], [self], self.places)
        # All workers read it, and come to the same gradient, of which each has its rows.
        record_operation(
            f"shares of {self.path}", [whole], shares, lambda upstream: self._cut(upstream)
        )
        return whole

    def _cut(self, whole) -> list[tf.Tensor]:
        """What each place here has of a whole tensor."""
        found, shape = [], shape_shared_out(self.shape)
        bounds = self.places.bounds(self.share.shape[0])
        for copy, own in zip(self.pieces, bounds, strict=True):
            with tf.device(copy.device):
                found.append(cut_out(tf.convert_to_tensor(whole), shape, *own))
        return found

    def _like_the_whole(self) -> tf.Tensor:
        """What has the whole's shape, for a trace that is only looked at: nobody is asked."""
        rows = tf.concat([tf.convert_to_tensor(copy) for copy in self.pieces], 0)
        rows = tf.concat([rows] * self.places.workers.num_workers, 0)
        return _of_shape(rows, self.shape)

    def _direct_assign(self, value):
        value = tf.cast(value, self.share.dtype)
        self.checksum = None
        if tf.executing_eagerly():
            self.checksum = zlib.crc32(np.asarray(value).reshape(-1).view("uint8"))
        for copy, own in zip(self.pieces, self._cut(value), strict=True):
            with tf.device(copy.device):
                copy.assign(apart(own))


def shard_variable(variable: keras.Variable, share: keras.Variable, places: Any) -> None:
    """Has each place keep a share of a variable; in place.

    Args:
        variable: The whole; its own memory is given free.
        share: Its shares, which hold its value.
        places: The places.
    """
    set_storage(variable, None)
    extend(variable, ShardedVariable, share=share, places=places)


def joined(found: Sequence[keras.Variable], places: Any) -> list[tf.Tensor]:
    """Joins what all replicas hold of shares, or of slots, to the shapes of the weights."""
    copies = [[tf.convert_to_tensor(copy) for copy in places.copies(each)] for each in found]
    return joined_rows(copies, [each._sharded for each in found], places)


def joined_rows(
    by_weight: Sequence[Sequence[tf.Tensor]], weights: Sequence[keras.Variable], places: Any
) -> list[tf.Tensor]:
    """Joins rows, of each place here, with those of the other workers, to the shapes of weights."""
    if not weights:
        return []
    rows = []
    for own, weight in zip(by_weight, weights, strict=True):
        with places.beside(weight):
            rows.append(tf.concat(own, 0)[None])
    workers = places.workers
    if workers is not None:
        rows = workers.all_gather(rows, [1] * workers.num_workers)
    wholes = []
    for row, weight in zip(rows, weights, strict=True):
        with places.beside(weight):
            flat = tf.reshape(row, [-1, *row.shape[2:]])
            wholes.append(_of_shape(flat, weight.shape))
    return wholes


def _of_shape(rows: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    """The rows of all shares as the weight is; without what stands behind its end."""
    size = shape_shared_out(shape)[0]
    return tf.reshape(rows if rows.shape[0] == size else rows[:size], shape)


def shape_shared_out(shape: Sequence[int]) -> list[int]:
    """In which shape a weight is cut along axis 0: a matrix as it is, all else flat."""
    shape = [int(size) for size in shape]
    return shape if len(shape) == 2 else [int(np.prod(shape))]


def apart(rows: tf.Tensor) -> tf.Tensor:
    """The same, in memory of their own: a variable that is assigned rows would keep the whole."""
    return tf.raw_ops.DeepCopy(x=rows)


def cut_out(tensor: tf.Tensor, shape: list[int], start: int, end: int) -> tf.Tensor:
    """A share of a tensor that is brought into a shape before; zeros behind its end."""
    number = shape[0]
    found = tf.reshape(tensor, shape)[min(start, number) : min(end, number)]
    missing = (end - start) - max(min(end, number) - start, 0)
    return tf.pad(found, [[0, missing]] + [[0, 0]] * len(shape[1:])) if missing else found


def rows_of_share(
    gradient: tf.IndexedSlices, shape: list[int], start: int, end: int
) -> tf.IndexedSlices:
    """The rows of a sparse gradient that a share has; others stand in its first row, as zeros."""
    if len(shape) < 2:  # Flat.
        raise ValueError(
            "Under `shard` what a batch reads single rows of is shared out by rows. A matrix is "
            f"required. Received: shape {gradient.shape}. Leave `shard` out."
        )
    indices = gradient.indices
    inside = (indices >= start) & (indices < end)
    values = tf.where(inside[:, None], gradient.values, tf.zeros_like(gradient.values))
    own = tf.where(inside, indices - start, tf.zeros_like(indices))
    return tf.IndexedSlices(values, own, tf.constant([end - start, shape[1]], indices.dtype))
