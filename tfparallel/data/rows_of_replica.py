"""The rows of the global batch that the current replica works on."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import tensorflow as tf

from tfparallel.compute_context import context, within
from tfparallel.seams.keras import mask_of, set_mask


class Place(NamedTuple):
    """Where a worker's rows lie in the batch of all, of which it sees no others.

    Attributes:
        replica: Index of the worker's first replica.
        start: Its first row.
        num_own_rows: How many it has; may be 0.
        num_rows: Of the batch of all workers.
    """

    replica: int
    start: Any
    num_own_rows: Any
    num_rows: Any


class Shard(NamedTuple):
    """One replica's part of a replicated call.

    Attributes:
        replica: Index of the replica, or micro-batch: an int; in a trace that is of all, a tensor.
        num_replicas: N.
        start: First row of the global batch that belongs to the replica.
        num_rows: How many rows belong to it; may be 0.
        num_global_rows: B, the rows of the global batch.
        inputs: The first row and the end of the inputs that it is cut from, where those are not
            the global batch. A single row stands for none.
        stream: Which draws it has, where others work on a batch of their own at the same time.
        num_drawn_rows: Of how many rows its draws are a part, where those are more than B.
    """

    replica: int
    num_replicas: int
    start: Any
    num_rows: Any
    num_global_rows: Any
    inputs: tuple[Any, Any] | None = None
    stream: int = 0
    num_drawn_rows: Any = None

    def at(self, place: Place, num_input_rows) -> "Shard":
        """The same rows, which lie there in the batch of all workers."""
        return self._replace(
            replica=place.replica + self.replica,
            start=place.start + self.start,
            inputs=(place.start, place.start + num_input_rows),
            num_drawn_rows=place.num_rows,
        )

    @property
    def num_averaged_rows(self):
        """What means are of: B; of a worker that has none of the batch of all, 1."""
        if self.num_drawn_rows is None:
            return self.num_global_rows
        return tf.maximum(self.num_global_rows, 1)

    @property
    def may_be_idle(self) -> bool:
        """Whether the replica may have no rows, as far as is known when the step is traced."""
        return not isinstance(self.num_rows, int) or self.num_rows == 0

    @property
    def first_row_used(self):
        """The first row it computes: `start`, but never past the end of the inputs."""
        end = self.num_global_rows if self.inputs is None else self.inputs[1]
        if isinstance(end, int) and isinstance(self.start, int):
            return min(self.start, max(end - 1, 0))
        return tf.minimum(self.start, end - 1)

    @property
    def num_rows_used(self):
        """How many rows it computes: `num_rows`, or one dummy row, of weight 0, for none.

        A convolution of an empty batch has the wrong shape on CPUs.
        """
        if isinstance(self.num_rows, int):
            return max(self.num_rows, 1)
        return tf.maximum(self.num_rows, 1)

    def rows_used(self, tensor):
        """The rows of an input, shape `(B, …)`, dense, ragged or sparse, that it computes."""
        start, number = self.first_row_used, self.num_rows_used
        if self.inputs is not None:
            start -= self.inputs[0]
        return cut(tensor, start, number)

    def rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """The rows of a global tensor, shape `(B, …)`, that belong to this replica."""
        return tensor[self.start : self.start + self.num_rows]

    def without_dummy_row(self, tensor: tf.Tensor) -> tf.Tensor:
        """Drops the row that only an idle replica computes, from a tensor of this replica."""
        return tensor[: self.num_rows] if self.may_be_idle else tensor

    def if_it_has_rows(self, term: tf.Tensor) -> tf.Tensor:
        """What is of the rows that it computes; 0 where that is but a dummy row."""
        if not self.may_be_idle:
            return term
        return tf.where(tf.convert_to_tensor(self.num_rows) > 0, term, tf.zeros_like(term))

    def weight(self, dtype) -> tf.Tensor:
        """The replica's share of the global batch, n_k / B; 0 of a batch without rows."""
        rows, of = tf.cast(self.num_rows, dtype), tf.cast(self.num_averaged_rows, dtype)
        return tf.math.divide_no_nan(rows, of)


def for_replicas(all_shards: Sequence[Shard]) -> list[Shard]:
    """Shards as arguments of a function that is traced for the first, and stands for all.

    Numbers that differ between them are tensors, which nobody can take for constants.
    """
    if tf.executing_eagerly() or len(all_shards) == 1:
        return list(all_shards)
    sizes = {shard.num_rows if isinstance(shard.num_rows, int) else None for shard in all_shards}
    is_even = len(sizes) == 1 and None not in sizes
    names = ("replica", "start") if is_even else ("replica", "start", "num_rows")
    found = []
    for shard in all_shards:
        with tf.device("/device:CPU:0"):
            told = {name: tf.convert_to_tensor(getattr(shard, name), tf.int32) for name in names}
            if not found:
                told = {
                    name: tf.compat.v1.placeholder_with_default(number, [])
                    for name, number in told.items()
                }
        found.append(shard._replace(**told))
    return found


def cut(tensor, start, size):
    """The rows of an input, shape `(B, …)`, dense, ragged or sparse, from one on; may be none."""
    if isinstance(tensor, tf.SparseTensor):
        begin = tf.concat([[start], tf.zeros_like(tensor.dense_shape[1:], tf.int32)], 0)
        sizes = tf.concat([[size], tf.cast(tensor.dense_shape[1:], tf.int32)], 0)
        return tf.sparse.slice(tensor, tf.cast(begin, tf.int64), tf.cast(sizes, tf.int64))
    rows = tensor[start : start + size]
    if isinstance(rows, tf.RaggedTensor):
        splits = of_any_number(rows.row_splits)
        return tf.RaggedTensor.from_row_splits(rows.values, splits, validate=False)
    rows = of_any_number(rows)
    mask = mask_of(tensor)
    if mask is not None:
        set_mask(rows, of_any_number(mask[start : start + size]))
    return rows


def of_any_number(rows):
    """The same rows, of a number that is not known when a step is traced; None of None.

    Where it is known, what a layer makes of the number alone is a constant, like what it makes of
    nothing, and nothing tells the two apart any more (`provenance.py`).
    """
    is_known = tf.is_symbolic_tensor(rows) and rows.shape.rank and rows.shape[0] is not None
    if not is_known:
        return rows
    return tf.compat.v1.placeholder_with_default(rows, [None, *rows.shape[1:]])


def count_rows(tensor):
    """Returns the rows of an input, dense, ragged or sparse: an int, or a tensor until known."""
    if not tf.is_tensor(tensor):
        return tensor.shape[0]  # Of an array, which an eager step may be given.
    if tensor.shape.rank is not None and tensor.shape[0] is not None:
        return tensor.shape[0]
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int32)
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int32)
    with where_it_is(tensor):
        return tf.shape(tensor)[0]


def where_it_is(tensor):
    """Within it, operations are where a tensor is: the host, for what an iterator yields.

    What asks for a number of rows, or cuts out some, then moves no others.
    """
    return tf.device(getattr(tensor, "device", None) or "/device:CPU:0")


def current() -> Shard | None:
    """Returns the shard of the replicated call that this thread is in, or None outside one."""
    return context().shard


def working_on(shard: Shard | None) -> AbstractContextManager[None]:
    """Makes `shard` the current one of this thread."""
    return within(shard=shard)
