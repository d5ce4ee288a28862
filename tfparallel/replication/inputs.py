"""The arguments of a replicated call: which have a batch axis, and the rows of each replica."""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfparallel.data import partition
from tfparallel.piece import Piece, count_rows, where_it_is
from tfparallel.seams.keras import mask_of, set_mask
from tfparallel.tracing.custom_gradient import is_differentiable


class BatchInputs:
    """Arguments of a layer's call, a nested structure whose tensors share the batch axis 0.

    Floating-point tensors (`floats`) are differentiable; integer, string, ragged and sparse ones
    are also split, but have no gradient. Scalars and other objects go to each replica unchanged.

    Args:
        args: Positional arguments of the call.
        kwargs: Keyword arguments.
        may_be_empty: Whether dense tensors may have no rows at all; they are then replaced by one
            row of ones, or of empty strings.

    Raises:
        ValueError: If no tensor has a batch axis, or two disagree on its size.
    """

    def __init__(self, args: tuple, kwargs: dict, *, may_be_empty: bool = False):
        self._structure = (args, kwargs)
        self._original_leaves = keras.tree.flatten(self._structure)
        self._leaves = list(map(as_tensor, self._original_leaves))
        if may_be_empty:
            self._leaves = [
                _of_a_row_at_least(leaf) if has_batch_axis(leaf) else leaf
                for leaf in self._leaves
            ]
        self._batched = [index for index, leaf in enumerate(self._leaves) if has_batch_axis(leaf)]
        if not self._batched:
            raise ValueError(
                "Cannot split a call across the replicas: none of its arguments has a batch axis. "
                "At least one tensor of shape (batch, …) is required. Received: "
                f"args={args}, kwargs={kwargs}."
            )
        dense = [i for i in self._batched if isinstance(self._leaves[i], tf.Tensor)]
        self._float_indices = [i for i in dense if is_differentiable(self._leaves[i])]
        self.num_rows = count_common_rows(self._leaves)

    @property
    def floats(self) -> list[tf.Tensor]:
        """The differentiable tensors, for the whole batch."""
        return [self._leaves[index] for index in self._float_indices]

    @property
    def whole_floats(self) -> list[tf.Tensor]:
        """The scalars, which each replica gets unchanged."""
        leaves = [each for each in self._leaves if isinstance(each, tf.Tensor)]
        return [each for each in leaves if each.shape.rank == 0 and is_differentiable(each)]

    @property
    def structure(self) -> tuple[tuple, dict]:
        """The arguments, for the whole batch."""
        return keras.tree.pack_sequence_as(self._structure, self._leaves)

    def split(self, all_pieces: list[Piece]) -> list[list[Any]]:
        """Returns each replica's rows of the tensors with a batch axis.

        Each tensor is sliced where it lies (on the host, for a batch from an iterator), so a device
        receives only its own rows.
        """
        parts = [[] for _ in all_pieces]
        for index in self._batched:
            leaf = self._leaves[index]
            with where_it_is(leaf):
                for part, piece in zip(parts, all_pieces, strict=True):
                    part.append(piece.rows_used(leaf))
        return parts

    def floats_of(self, part: list[Any]) -> list[tf.Tensor]:
        """The differentiable tensors among one replica's rows."""
        return [part[self._batched.index(index)] for index in self._float_indices]

    def pack(self, part: list[Any]) -> tuple[tuple, dict]:
        """Returns the arguments with one replica's rows instead of the batch's."""
        leaves = list(self._leaves)
        for index, rows in zip(self._batched, part, strict=True):
            leaves[index] = rows
        return keras.tree.pack_sequence_as(self._structure, leaves)

    def take_off_masks(self, part: list[Any]) -> None:
        """Removes the masks of the batch's tensors that a call removed from a replica's rows.

        Keras's attention removes them, so later layers find none.
        """
        for index, rows in zip(self._batched, part, strict=True):
            if mask_of(self._leaves[index]) is None:
                continue
            if mask_of(rows) is None:
                set_mask(self._original_leaves[index], None)


def count_common_rows(leaves: Iterable[Any]) -> int | tf.Tensor:
    """Returns the number of rows of the leaves that have a batch axis, which they share.

    Raises:
        ValueError: If two disagree, as far as their sizes are known while tracing.
    """
    sizes = [count_rows(leaf) for leaf in leaves if has_batch_axis(leaf)]
    static = {size for size in sizes if isinstance(size, int)}
    if len(static) > 1:
        raise ValueError(
            "Cannot split a call across the replicas: its tensors disagree on the batch size (the "
            f"size of axis 0). All must have the same size. Received sizes: {sorted(static)}. "
            "Store tensors that are not a batch in the layer, or pass scalars."
        )
    return static.pop() if static else sizes[0]


def own_pieces(strategy, num_rows, worker_rows=None) -> list[Piece]:
    """Returns the rows of each of this worker's replicas.

    Args:
        strategy: The strategy of the replicas.
        num_rows: How many rows the arguments of a call have.
        worker_rows: How many rows each worker has, if the arguments hold only this worker's.
    """
    num_replicas, weights = strategy.num_replicas, strategy.replica_weights
    local = slice(strategy.first_replica, strategy.first_replica + len(strategy.devices))
    if worker_rows is None:
        place = strategy.place
        total = num_rows if place is None else place.num_own_rows
        ranges = partition.row_ranges(total, num_replicas, weights)[local]
        result = [
            Piece(
                local.start + k, num_replicas, start, size, total, stream=strategy.stream
            )
            for k, (start, size) in enumerate(ranges)
        ]
        return result if place is None else [piece.at(place, num_rows) for piece in result]
    index = strategy.workers.worker_index
    own_rows = worker_rows[index]
    before = tf.add_n([tf.zeros_like(own_rows), *worker_rows[:index]])
    ranges = partition.row_ranges(own_rows, len(strategy.devices), weights and weights[local])
    return [
        Piece(
            local.start + k,
            num_replicas,
            before + start,
            size,
            tf.add_n(worker_rows),
            (before, before + num_rows),
        )
        for k, (start, size) in enumerate(ranges)
    ]


def as_tensor(leaf: Any) -> Any:
    """Converts a variable or an array to a tensor; returns other leaves unchanged."""
    if isinstance(leaf, keras.Variable | tf.Variable) or hasattr(leaf, "__array_interface__"):
        return tf.convert_to_tensor(leaf)
    return leaf


def has_batch_axis(leaf: Any) -> bool:
    """Whether a leaf of a call's arguments is split by rows; scalars and objects are not."""
    return isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor) and leaf.shape.rank != 0


def _of_a_row_at_least(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the rows, or one row of ones (of empty strings) if there are none.

    A row of zeros might be all padding: with everything masked, a mean would be NaN. The results of
    the row are dropped, but the gradients of the weights would contain 0 · NaN.
    """
    shape = tf.shape(tensor)
    missing = tf.concat([[tf.cast(shape[0] == 0, shape.dtype)], shape[1:]], 0)
    filled = tf.zeros if tensor.dtype == tf.string else tf.ones
    rows = tf.concat([tensor, filled(missing, tensor.dtype)], 0)
    rows = tf.ensure_shape(rows, [None, *tensor.shape[1:]])
    mask = mask_of(tensor)
    if mask is not None:
        set_mask(rows, _of_a_row_at_least(mask))
    return rows
