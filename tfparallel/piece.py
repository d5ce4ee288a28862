"""The rows of the global batch that the current replica works on."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import tensorflow as tf

from tfparallel.compute_context import context, within
from tfparallel.seams.keras import mask_of, set_mask

# The dtypes of `multiply_no_nan` on GPUs.
_WITH_NO_NAN = (tf.float16, tf.float32, tf.float64, tf.complex64, tf.complex128)


class RowsOfWorker(NamedTuple):
    """The position of a worker's rows in the global batch, if the worker reads only those.

    Attributes:
        replica: Index of the worker's first replica.
        start: Its first row.
        num_own_rows: Its number of rows; may be 0.
        num_rows: Number of rows in the batch of all workers.
    """

    replica: int
    start: Any
    num_own_rows: Any
    num_rows: Any


class Piece(NamedTuple):
    """One replica's part of a replicated call.

    Attributes:
        replica: Index of the replica or micro-batch: an int, or a tensor in a trace shared by all.
        num_replicas: N.
        start: First row of the global batch that belongs to the replica.
        num_rows: Number of rows that belong to it; may be 0.
        num_global_rows: B, the number of rows in the global batch.
        inputs: First row and end of the inputs that the rows are sliced from, if these are not the
            global batch. An input without rows is replaced by a single row.
        stream: Selects the random draws, if several batches are computed at the same time.
        num_drawn_rows: Number of rows that random draws cover, if more than B.
    """

    replica: int
    num_replicas: int
    start: Any
    num_rows: Any
    num_global_rows: Any
    inputs: tuple[Any, Any] | None = None
    stream: int = 0
    num_drawn_rows: Any = None

    def at(self, place: RowsOfWorker, num_input_rows) -> "Piece":
        """Returns the same rows, relative to the batch of all workers."""
        return self._replace(
            replica=place.replica + self.replica,
            start=place.start + self.start,
            inputs=(place.start, place.start + num_input_rows),
            num_drawn_rows=place.num_rows,
        )

    @property
    def num_averaged_rows(self):
        """The divisor of means: B, or 1 on a worker without rows."""
        if self.num_drawn_rows is None:
            return self.num_global_rows
        return tf.maximum(self.num_global_rows, 1)

    @property
    def may_be_idle(self) -> bool:
        """Whether the replica may have no rows, judging from what is known at trace time."""
        return not isinstance(self.num_rows, int) or self.num_rows == 0

    @property
    def first_row_used(self):
        """The first row to compute: `start`, but never past the end of the inputs."""
        end = self.num_global_rows if self.inputs is None else self.inputs[1]
        if isinstance(end, int) and isinstance(self.start, int):
            return min(self.start, max(end - 1, 0))
        return tf.minimum(self.start, end - 1)

    @property
    def num_rows_used(self):
        """The number of rows to compute: `num_rows`, or one dummy row of weight 0 if that is 0.

        A convolution of an empty batch has the wrong shape on CPUs.
        """
        if isinstance(self.num_rows, int):
            return max(self.num_rows, 1)
        return tf.maximum(self.num_rows, 1)

    @property
    def is_whole(self) -> bool:
        """Whether it is the only piece, of a number of rows that Python knows."""
        is_known = isinstance(self.num_rows, int) and self.num_rows > 0
        return self.num_replicas == 1 and self.inputs is None and is_known

    def rows_used(self, tensor):
        """Returns the rows to compute of an input, shape `(B, …)`, dense, ragged or sparse."""
        if self.is_whole:
            return tensor  # A layer may ask for the number of rows; `cut` would hide it.
        start, number = self.first_row_used, self.num_rows_used
        if self.inputs is not None:
            start -= self.inputs[0]
        return cut(tensor, start, number)

    def rows(self, tensor: tf.Tensor, per_example: int | tf.Tensor | None = 1) -> tf.Tensor:
        """Returns this replica's rows of a global tensor.

        Args:
            tensor: Shape `(B · per_example, …)`.
            per_example: How many rows an example has; None returns the whole tensor.
        """
        if per_example is None:
            return tensor
        end = self.start + self.num_rows
        return tensor[times(self.start, per_example) : times(end, per_example)]

    def without_dummy_row(
        self, tensor: tf.Tensor, per_example: int | tf.Tensor | None = None
    ) -> tf.Tensor:
        """Drops what an idle replica computed from its dummy row.

        Args:
            tensor: A tensor of this replica.
            per_example: How many rows an example has; None if unknown.
        """
        if not self.may_be_idle and not tf.is_tensor(per_example):
            return tensor
        if per_example is None:
            return tensor[: count_rows(tensor) * tf.minimum(self.num_rows, 1)]
        return tensor[: times(self.num_rows, per_example)]

    def if_it_has_rows(self, term: tf.Tensor) -> tf.Tensor:
        """Returns the term, or 0 if the replica computes only a dummy row."""
        (term,) = self.terms_if_it_has_rows([term])
        return term

    def terms_if_it_has_rows(self, terms: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the terms, or zeros if the replica computes only a dummy row.

        A product with a number of rows would not do, since 0 · NaN is NaN.
        """
        if not self.may_be_idle:
            return list(terms)
        has_rows = tf.convert_to_tensor(self.num_rows) > 0
        of_dtype: dict[tf.DType, tf.Tensor] = {}
        selected = []
        for term in map(tf.convert_to_tensor, terms):
            with tf.device(term.device):
                if term.dtype not in _WITH_NO_NAN:
                    selected.append(tf.where(has_rows, term, tf.zeros_like(term)))
                    continue
                # One pass over a large gradient; `where` would also fill and read the zeros.
                if term.dtype not in of_dtype:
                    of_dtype[term.dtype] = tf.cast(has_rows, term.dtype)
                selected.append(tf.math.multiply_no_nan(term, of_dtype[term.dtype]))
        return selected

    def weight(self, dtype) -> tf.Tensor:
        """Returns the replica's fraction of the global batch, n_k / B; 0 for an empty batch."""
        rows, of = tf.cast(self.num_rows, dtype), tf.cast(self.num_averaged_rows, dtype)
        return tf.math.divide_no_nan(rows, of)


def times(num_examples, per_example: int | tf.Tensor | None):
    """Returns how many rows some examples have, without an operation for one row or None each."""
    is_one = per_example is None or (isinstance(per_example, int) and per_example == 1)
    return num_examples if is_one else num_examples * per_example


def for_replicas(all_pieces: Sequence[Piece]) -> list[Piece]:
    """Converts pieces to arguments of a function that is traced once, for the first of them.

    Numbers that differ between pieces become tensors, so that the trace has no constants in their
    place.
    """
    if tf.executing_eagerly() or len(all_pieces) == 1:
        return list(all_pieces)
    sizes = {piece.num_rows if isinstance(piece.num_rows, int) else None for piece in all_pieces}
    is_even = len(sizes) == 1 and None not in sizes
    names = ("replica", "start") if is_even else ("replica", "start", "num_rows")
    pieces = []
    for piece in all_pieces:
        with tf.device("/device:CPU:0"):
            numbers = {name: tf.convert_to_tensor(getattr(piece, name), tf.int32) for name in names}
            if not pieces:
                numbers = {
                    name: tf.compat.v1.placeholder_with_default(number, [])
                    for name, number in numbers.items()
                }
        pieces.append(piece._replace(**numbers))
    return pieces


def cut(tensor, start, size):
    """Returns `size` rows from `start` of an input, shape `(B, …)`, dense, ragged or sparse."""
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
    """Hides the static number of rows of a tensor in a trace; returns other values unchanged.

    With a static number of rows, a value that depends on the number alone is a constant in the
    graph, and cannot be distinguished from one that depends on nothing (`tracing/provenance.py`).
    """
    is_known = tf.is_symbolic_tensor(rows) and rows.shape.rank and rows.shape[0] is not None
    if not is_known:
        return rows
    return tf.compat.v1.placeholder_with_default(rows, [None, *rows.shape[1:]])


def of_known_number(rows, num_rows, per_example):
    """Restores the static number of joined rows, which pieces lost, if it is known.

    Args:
        rows: The joined rows.
        num_rows: How many examples they are of: an int, or a tensor if unknown.
        per_example: How many rows an example has: an int, or something else if unknown.
    """
    if not isinstance(num_rows, int) or not isinstance(per_example, int):
        return rows
    return tf.ensure_shape(rows, [num_rows * per_example, *rows.shape[1:]])


def count_rows(tensor):
    """Returns the number of rows of an input, dense, ragged or sparse: an int, else a tensor."""
    if not tf.is_tensor(tensor):
        return tensor.shape[0]  # An eager step may receive an array.
    if tensor.shape.rank is not None and tensor.shape[0] is not None:
        return tensor.shape[0]
    if isinstance(tensor, tf.RaggedTensor):
        return tf.cast(tensor.nrows(), tf.int32)
    if isinstance(tensor, tf.SparseTensor):
        return tf.cast(tensor.dense_shape[0], tf.int32)
    with where_it_is(tensor):
        return tf.shape(tensor)[0]


def where_it_is(tensor):
    """Places operations on a tensor's own device, which is the host for outputs of an iterator.

    Counting or slicing rows then does not move the other rows.
    """
    return tf.device(getattr(tensor, "device", None) or "/device:CPU:0")


def current() -> Piece | None:
    """Returns the piece of this thread's current replicated call, or None outside of one."""
    return context().piece


def working_on(piece: Piece | None) -> AbstractContextManager[None]:
    """Makes `piece` the current piece of this thread."""
    return within(piece=piece)
