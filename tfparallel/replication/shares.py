"""What a share of a weight is, who holds it, and how all shares are joined.

A matrix is shared out by rows, so that a sparse gradient, of an embedding's rows, stays sparse:
Keras's optimizers treat a row that a batch reads twice as two. Everything else is flat. Shares are
of one size, and zeros stand behind the last element.
"""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import keras
import numpy as np
import tensorflow as tf

from tfparallel.extend import extend
from tfparallel.seams.tensorflow import PerReplica
from tfparallel.strategies import variables

__all__ = [
    "Holders",
    "Shares",
    "cut_out",
    "cut_share",
    "joined",
    "mark",
    "shape_shared_out",
]


class Shares(PerReplica):
    """What each replica here has of a gradient."""


class Holders:
    """The replicas that hold shares: those of a strategy.

    Args:
        strategy: What holds their variables.
    """

    def __init__(self, strategy):
        self._strategy = strategy
        self.number = strategy.num_replicas
        self.workers = strategy.workers

    def scope(self) -> AbstractContextManager:
        """Where shares are made."""
        return self._strategy.scope()

    def program(self) -> AbstractContextManager:
        """Where variables are read and written outside of a step."""
        return self._strategy.program()

    def bounds(self, size: int) -> Iterator[tuple[int, int]]:
        """Of each replica here, the first element, or row, of its share, and the end.

        Args:
            size: Of a share.
        """
        first = self._strategy.first_replica
        for k in range(first, first + len(self._strategy.devices)):
            yield k * size, (k + 1) * size

    def copies(self, variable: keras.Variable) -> Sequence[tf.Variable]:
        """What each replica here has of a variable."""
        return variables.copies(variable)

    def alone(self, index: int) -> AbstractContextManager:
        """Where writing the copy of a replica, by its index here, writes no other."""
        return contextlib.nullcontext()

    def beside(self, weight: keras.Variable) -> AbstractContextManager:
        """Where the shares of a weight are joined."""
        return contextlib.nullcontext()


class Shared:
    """Extends a variable that has a share of a weight, or of a slot, in each replica."""

    def _serialize_to_tensors(self):
        raise ValueError(
            "`tf.train.Checkpoint` would write one replica's share. Whole slots are required. "
            f"Received: '{self.path}', under shard_optimizer=True. Take `tfparallel.callbacks."
            "Checkpoint`, or `model.save`, which write all of it."
        )


def mark(variable: keras.Variable, weight: keras.Variable) -> None:
    """Has a share, or a slot of it, know the weight, and what the weight may be a part of."""
    extend(variable, Shared, _sharded=weight, _shown=getattr(weight, "_whole", weight))


def joined(found, holders: Holders) -> list[tf.Tensor]:
    """Joins what all replicas hold of shares, or of slots, to the shapes of the weights."""
    if not found:
        return []
    rows = []
    for variable in found:
        own = [tf.convert_to_tensor(copy) for copy in holders.copies(variable)]
        with holders.beside(variable._sharded):
            rows.append(tf.concat(own, 0)[None])
    workers = holders.workers
    if workers is not None:
        rows = workers.all_gather(rows, [1] * workers.num_workers)
    wholes = []
    for row, variable in zip(rows, found, strict=True):
        shape = shape_shared_out(variable._sharded.shape, holders.number)
        with holders.beside(variable._sharded):
            flat = tf.reshape(row, [-1, *shape[1:]])[: shape[0]]
            wholes.append(tf.reshape(flat, variable._sharded.shape))
    return wholes


def shape_shared_out(shape: Sequence[int], num_shares: int) -> list[int]:
    """In which shape a weight is cut along axis 0: a matrix as it is, all else flat."""
    shape = [int(size) for size in shape]
    return shape if len(shape) == 2 and shape[0] >= num_shares else [int(np.prod(shape))]


def cut_share(gradient, shape: list[int], bounds: tuple[int, int]):
    """What a replica's share has of a gradient, dense or sparse."""
    if isinstance(gradient, tf.IndexedSlices):
        return _rows_read(gradient, shape, *bounds)
    return cut_out(gradient, shape, *bounds)


def cut_out(tensor: tf.Tensor, shape: list[int], start: int, end: int) -> tf.Tensor:
    """A share of a tensor that is brought into a shape before; zeros behind its end."""
    number = shape[0]
    found = tf.reshape(tensor, shape)[min(start, number) : min(end, number)]
    missing = (end - start) - max(min(end, number) - start, 0)
    return tf.pad(found, [[0, missing]] + [[0, 0]] * len(shape[1:])) if missing else found


def _rows_read(gradient: tf.IndexedSlices, shape: list[int], start: int, end: int):
    """The rows of a sparse gradient that a share has; others stand in its first row, as zeros."""
    if len(shape) < 2:  # Flat.
        raise ValueError(
            "Under shard_optimizer=True an embedding is shared out by rows. A matrix of at least "
            f"as many rows as there are replicas is required. Received: shape {gradient.shape}. "
            "Leave shard_optimizer out."
        )
    indices = gradient.indices
    inside = (indices >= start) & (indices < end)
    values = tf.where(inside[:, None], gradient.values, tf.zeros_like(gradient.values))
    own = tf.where(inside, indices - start, tf.zeros_like(indices))
    return tf.IndexedSlices(values, own, tf.constant([end - start, shape[1]], indices.dtype))
