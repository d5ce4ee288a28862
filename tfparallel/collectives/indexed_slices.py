"""Sparse gradients of the parts of a batch, joined into that of the whole.

Keras squares the slices of a sparse gradient as they come, so it matters whether an index that two
parts have becomes one slice or two. A weight's gradient has the slices of each of its readings, and
of a reading the whole batch's gradient has

* "rows": a slice for each id in its rows, repeated or not, where an `Embedding` is read with what
  the batch holds. Those of the parts are laid end to end;
* "once": a slice for each index, once a batch, where it is read with indices that no row decides: a
  position embedding read with 0 … T−1. All parts have the same indices, and slices are added place
  by place;
* "distinct": a slice for each feature that the batch holds, where a sparse tensor multiplies a
  kernel (`tf.nn.embedding_lookup_sparse` looks every feature up once). Those of an index are added.

Which it is, a graph tells, by the operations that made the indices (`data/provenance.py`). Of an
eager step a trace of the same call tells (`kinds_of`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.collectives.custom_gradient import is_differentiable
from tfparallel.compute_context import within
from tfparallel.data import provenance
from tfparallel.tracing.apart import traced_apart

ROWS, ONCE, DISTINCT = "rows", "once", "distinct"

_HANDED_ON = ("Identity", "Reshape", "Cast")
_UNIQUE = ("Unique", "UniqueV2", "UniqueWithCounts")


class Reading(NamedTuple):
    """What one reading of a weight adds to its gradient.

    Attributes:
        values: Slices, shape `(n, …)`.
        indices: Their indices, shape `(n,)`.
        kind: `ROWS`, `ONCE` or `DISTINCT`.
    """

    values: tf.Tensor
    indices: tf.Tensor
    kind: str


def readings(slices: tf.IndexedSlices, kinds: Sequence[str] | None = None) -> list[Reading]:
    """Takes a sparse gradient apart.

    Args:
        slices: The gradient of a weight, in a part of the batch.
        kinds: The kind of each reading, where no graph tells: of an eager step.

    Raises:
        ValueError: If readings of several kinds cannot be told apart.
    """
    if tf.is_symbolic_tensor(slices.indices):
        return [
            Reading(values, indices, _kind(values, indices))
            for values, indices in _split(slices.values, slices.indices)
        ]
    if kinds is None or len(set(kinds)) > 1:
        raise ValueError(
            "A sparse gradient does not tell, where no graph is traced, which of its slices are "
            "to be added to those of other replicas. A traced step is required. Received: an "
            f"eager gradient of a weight of shape {tuple(slices.shape)}, read "
            f"{len(kinds) if kinds else 'once or more'} times. Put the step into a `tf.function`, "
            "or compile with run_eagerly=False."
        )
    return [Reading(slices.values, slices.indices, kinds[0])]


def joined(parts: Sequence[tf.IndexedSlices], kinds: Sequence[str] | None = None) -> list[Reading]:
    """Returns the readings of the whole batch, of the gradients of its parts, in order.

    `together` makes a gradient of them; `kinds` is as for `readings`.
    """
    by_part = [readings(part, kinds) for part in parts]
    return [_joined(same) for same in zip(*by_part, strict=True)]


def together(by_reading: Sequence[Reading], dense_shape) -> tf.IndexedSlices:
    """Makes a sparse gradient of its readings, laid end to end as a tape lays them."""
    if len(by_reading) == 1:
        (only,) = by_reading
        return tf.IndexedSlices(only.values, only.indices, dense_shape)
    indices = [each.indices for each in by_reading]
    if len({each.dtype for each in indices}) > 1:
        indices = [tf.cast(each, tf.int64) for each in indices]
    values = tf.concat([each.values for each in by_reading], 0)
    return tf.IndexedSlices(values, tf.concat(indices, 0), dense_shape)


def merged(reading: Reading) -> Reading:
    """Adds the slices of each index, where a reading has one of each; else returns it as it is."""
    if reading.kind != DISTINCT:
        return reading
    indices, place = tf.unique(reading.indices)
    values = tf.math.unsorted_segment_sum(reading.values, place, tf.size(indices))
    return Reading(values, indices, DISTINCT)


def kinds_of(
    call: Callable, arguments, weights: Sequence[tf.Variable | keras.Variable]
) -> list:
    """Traces a call, forward and backward, and looks at the gradients; none of it is run.

    Args:
        call: Takes `arguments`, returns tensors.
        arguments: A nested structure; tensors and arrays in it have the batch axis 0.
        weights: What is trained. In place of Keras's variables, of which replicas have shares, the
            trace reads zeros.

    Returns:
        For each weight the kinds of its readings; None where its gradient is dense, or none. For a
        variable of Keras's such an answer for each time that it is read.

    Raises:
        ValueError: If the call cannot be traced.
    """
    leaves = [_as_tensor(leaf) for leaf in keras.tree.flatten(arguments)]
    places = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf) and leaf.shape.rank != 0]
    found: list = []

    @tf.function(autograph=False)
    def trace(*tensors):
        own = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            own[place] = tensor
        with traced_apart(), tf.GradientTape() as tape:
            zeros = _Zeros(tape)
            with within(gathers=zeros):
                outputs = keras.tree.flatten(call(keras.tree.pack_sequence_as(arguments, own)))
            targets = [each for each in outputs if is_differentiable(each)]
        read = [zeros.given(w) if isinstance(w, keras.Variable) else w for w in weights]
        for gradient in tape.gradient(targets, read):
            is_of_shares = isinstance(gradient, list)
            found.append(list(map(_kinds, gradient)) if is_of_shares else _kinds(gradient))

    try:
        trace.get_concrete_function(*[_of_any_batch(leaves[place]) for place in places])
    except Exception as error:  # Whatever the user's layer raises where it is traced.
        raise ValueError(
            "A sparse gradient of an eager step is joined as a trace of the step says, and the "
            f"step cannot be traced. Received: run_eagerly=True, {type(error).__name__}: {error}. "
            "Make the layers traceable, or train on one device."
        ) from error
    return found


class _Zeros:
    """Stands for gathers in a trace that is not run: `tfparallel.replication.gathers.Gathers`."""

    def __init__(self, tape: tf.GradientTape):
        self._tape = tape
        self._given: dict[int, list[tf.Tensor]] = {}

    def read(self, variable: keras.Variable) -> tf.Tensor:
        zeros = tf.zeros(variable.shape, keras.backend.standardize_dtype(variable.dtype))
        self._tape.watch(zeros)
        self._given.setdefault(id(variable), []).append(zeros)
        return zeros

    def given(self, variable: keras.Variable) -> list[tf.Tensor]:
        """What stood for a variable, each time that it was read."""
        return self._given.get(id(variable), [])


def _kinds(gradient) -> tuple[str, ...] | None:
    if not isinstance(gradient, tf.IndexedSlices):
        return None
    return tuple(each.kind for each in readings(gradient))


def _joined(same: Sequence[Reading]) -> Reading:
    """One reading of the whole batch, of what its parts have of it."""
    if len(same) == 1:
        return same[0]
    first = same[0]
    if first.kind == ONCE:
        return first._replace(values=tf.add_n([each.values for each in same]))
    values = tf.concat([each.values for each in same], 0)
    indices = tf.concat([each.indices for each in same], 0)
    return merged(Reading(values, indices, first.kind))


def _split(values: tf.Tensor, indices: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """The readings that a tape has laid end to end."""
    values_maker, indices_maker = _unwrapped(values), _unwrapped(indices)
    if values_maker.type != "ConcatV2" or indices_maker.type != "ConcatV2":
        return [(values, indices)]
    *all_values, _ = values_maker.inputs
    *all_indices, _ = indices_maker.inputs
    if len(all_values) != len(all_indices):
        return [(values, indices)]
    pairs = zip(all_values, all_indices, strict=True)
    return [found for pair in pairs for found in _split(*pair)]


def _unwrapped(tensor: tf.Tensor) -> tf.Operation:
    operation = tensor.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    return operation


def _kind(values: tf.Tensor, indices: tf.Tensor) -> str:
    maker = provenance.maker_of(indices, _HANDED_ON)
    if maker.type in _UNIQUE:
        return DISTINCT
    if maker.type == provenance.maker_of(values, _HANDED_ON).type == "ConcatV2":
        # Laid end to end within a `tf.function`, out of which no part of them comes.
        *parts, _ = provenance.inputs_made_of(indices, _HANDED_ON)
        if len({bool(part) for part in parts}) > 1:
            raise ValueError(
                "A weight that a `tf.function` of a layer's own reads must be read with rows of "
                "the batch, or with indices that are the same for all rows: its sparse gradient "
                "is one, and the parts of a batch have them added in another way for each. "
                f"Received: a weight of shape (…, {values.shape[-1]}), read in both ways. Read it "
                "in one function for each, or in none."
            )
    return ROWS if provenance.made_of(indices) else ONCE


def _as_tensor(leaf):
    """An array would be a constant of the trace, and what is read with it read once a batch."""
    return tf.convert_to_tensor(leaf) if hasattr(leaf, "__array_interface__") else leaf


def _of_any_batch(tensor):
    """The tensor's type, of batches of any size."""
    spec = tf.type_spec_from_value(tensor)
    if isinstance(spec, tf.RaggedTensorSpec):
        shape = [None, *spec.shape[1:]]
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)([None, *spec.shape[1:]], spec.dtype)
