"""What a share of a weight is, and how all shares are joined.

    gradient of a weight, of all rows     g₀ g₁ │ g₂ g₃ │ g₄ ·        in N equal shares
                                            │       │       │
    slots (momentum, …), 1/N a place       m₀ m₁   m₂ m₃   m₄ ·
                                            ▼       ▼       ▼
    updated share of the weight           θ₀ θ₁ │ θ₂ θ₃ │ θ₄ ·        joined, at each place

To the optimizer the shares are its variables: of each weight one, a copy of which at a place holds
the place's own share. It is filled from the weight before an update, and the weight from all shares
behind it; so whoever else writes the weight need not know. Files hold whole slots.

A matrix is shared out by rows, so that a sparse gradient, of an embedding's rows, stays sparse:
Keras's optimizers treat a row that a batch reads twice as two. Everything else is flat. Shares are
of one size, and zeros stand behind the last element.

It is stage 1 of ZeRO: Samyam Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", SC 2020, arXiv:1910.02054.
"""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfparallel.extend import extend
from tfparallel.update.places import Places

__all__ = [
    "cut_out",
    "cut_share",
    "joined",
    "mark",
    "shape_shared_out",
]


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


def joined(found, places: Places) -> list[tf.Tensor]:
    """Joins what all replicas hold of shares, or of slots, to the shapes of the weights."""
    if not found:
        return []
    rows = []
    for variable in found:
        own = [tf.convert_to_tensor(copy) for copy in places.copies(variable)]
        with places.beside(variable._sharded):
            rows.append(tf.concat(own, 0)[None])
    workers = places.workers
    if workers is not None:
        rows = workers.all_gather(rows, [1] * workers.num_workers)
    wholes = []
    for row, variable in zip(rows, found, strict=True):
        shape = shape_shared_out(variable._sharded.shape, places.number)
        with places.beside(variable._sharded):
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
