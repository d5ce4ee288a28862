"""Combines the sparse gradients of the pieces of a batch into that of the whole batch.

Keras squares the slices of a sparse gradient one by one, so it matters whether an index that occurs
in two pieces becomes one slice or two. The gradient of a weight holds the slices of each of its
lookups ("readings"). For one lookup, the gradient of the whole batch has

* "rows": one slice for each id in the rows, repeated or not. This is an `Embedding` of ids from the
  batch; the slices of the pieces are concatenated;
* "once": one slice for each index, once per batch, if the indices do not depend on the rows: a
  position embedding of 0 … T−1. All pieces have the same indices, and their slices are added
  elementwise;
* "distinct": one slice for each feature in the batch, if a sparse tensor multiplies a kernel
  (`tf.nn.embedding_lookup_sparse` looks up every feature once). Slices of equal index are added.

In a graph, the operations that produced the indices determine the kind (`tracing/provenance.py`).
For an eager step, a trace of the same call does (`kinds_of`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.compute_context import within
from tfparallel.tracing import provenance
from tfparallel.tracing.custom_gradient import is_differentiable
from tfparallel.tracing.trial_trace import traced_apart

ROWS, ONCE, DISTINCT = "rows", "once", "distinct"

_HANDED_ON = ("Identity", "Reshape", "Cast")
_OF_VALUES = (*_HANDED_ON, "MulNoNan")  # Of a replica that may have no rows.
_UNIQUE = ("Unique", "UniqueV2", "UniqueWithCounts")


class Reading(NamedTuple):
    """The contribution of one lookup of a weight to its gradient.

    Attributes:
        values: Slices, shape `(n, …)`.
        indices: Their indices, shape `(n,)`.
        kind: `ROWS`, `ONCE` or `DISTINCT`.
    """

    values: tf.Tensor
    indices: tf.Tensor
    kind: str


def readings(slices: tf.IndexedSlices, kinds: Sequence[str] | None = None) -> list[Reading]:
    """Splits a sparse gradient into its lookups.

    Args:
        slices: The gradient of a weight, for one piece of the batch.
        kinds: The kind of each lookup, for an eager step, where there is no graph to inspect.

    Raises:
        ValueError: If lookups of several kinds cannot be separated.
    """
    if tf.is_symbolic_tensor(slices.indices):
        return [
            Reading(values, indices, _kind(values, indices))
            for values, indices in _split(slices.values, slices.indices)
        ]
    if kinds is None or len(set(kinds)) > 1:
        raise ValueError(
            "In an eager step, a sparse gradient does not show which of its slices must be summed "
            "over the replicas. A traced step is required. Received: an eager gradient of a weight "
            f"of shape {tuple(slices.shape)}, read {len(kinds) if kinds else 'once or more'} "
            "times. Put the step into a `tf.function`, or compile with run_eagerly=False."
        )
    return [Reading(slices.values, slices.indices, kinds[0])]


def joined(parts: Sequence[tf.IndexedSlices], kinds: Sequence[str] | None = None) -> list[Reading]:
    """Combines the gradients of the pieces, in order, into the lookups of the whole batch.

    `together` turns the lookups into a gradient; `kinds` is as for `readings`.
    """
    by_part = [readings(part, kinds) for part in parts]
    return [_joined(pieces) for pieces in zip(*by_part, strict=True)]


def together(by_reading: Sequence[Reading], dense_shape) -> tf.IndexedSlices:
    """Concatenates lookups into a sparse gradient, as a tape does."""
    if len(by_reading) == 1:
        (only,) = by_reading
        return tf.IndexedSlices(only.values, only.indices, dense_shape)
    indices = [each.indices for each in by_reading]
    if len({each.dtype for each in indices}) > 1:
        indices = [tf.cast(each, tf.int64) for each in indices]
    values = tf.concat([each.values for each in by_reading], 0)
    return tf.IndexedSlices(values, tf.concat(indices, 0), dense_shape)


def with_values(
    slices: tf.IndexedSlices, change: Callable[[tf.Tensor], tf.Tensor]
) -> tf.IndexedSlices:
    """Applies a function to the values of each lookup, so that the lookups stay separable."""
    lookups = [(slices.values, slices.indices)]
    if tf.is_symbolic_tensor(slices.indices):
        lookups = _split(slices.values, slices.indices)
    changed = [Reading(change(values), indices, ROWS) for values, indices in lookups]
    return together(changed, slices.dense_shape)


def merged(reading: Reading) -> Reading:
    """Adds the slices of equal index of a `DISTINCT` lookup; returns other kinds unchanged."""
    if reading.kind != DISTINCT:
        return reading
    indices, place = tf.unique(reading.indices)
    values = tf.math.unsorted_segment_sum(reading.values, place, tf.size(indices))
    return Reading(values, indices, DISTINCT)


def kinds_of(
    call: Callable, arguments, weights: Sequence[tf.Variable | keras.Variable]
) -> list:
    """Traces a call forward and backward, without running it, and inspects the gradients.

    Args:
        call: Takes `arguments`, returns tensors.
        arguments: A nested structure; axis 0 of its tensors and arrays is the batch.
        weights: The trainable weights. Keras variables are sharded over the replicas; the trace
            reads zeros in their place.

    Returns:
        For each weight the kinds of its lookups; None if its gradient is dense or missing. For a
        Keras variable, a list with one such value for each read.

    Raises:
        ValueError: If the call cannot be traced.
    """
    leaves = [_as_tensor(leaf) for leaf in keras.tree.flatten(arguments)]
    places = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf) and leaf.shape.rank != 0]
    kinds: list = []

    @tf.function(autograph=False)
    def trace(*tensors):
        inputs = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            inputs[place] = tensor
        with traced_apart(), tf.GradientTape() as tape:
            zeros = _Zeros(tape)
            with within(gathers=zeros):
                outputs = keras.tree.flatten(call(keras.tree.pack_sequence_as(arguments, inputs)))
            targets = [each for each in outputs if is_differentiable(each)]
        reads = [zeros.reads_of(w) if isinstance(w, keras.Variable) else w for w in weights]
        for gradient in tape.gradient(targets, reads):
            is_of_shares = isinstance(gradient, list)
            kinds.append(list(map(_kinds, gradient)) if is_of_shares else _kinds(gradient))

    try:
        trace.get_concrete_function(*[_spec_of_any_batch(leaves[place]) for place in places])
    except Exception as error:  # Tracing runs the user's layers, which may raise anything.
        raise ValueError(
            "Joining the sparse gradients of an eager step requires a trace of the step, which "
            f"failed. Received: run_eagerly=True, {type(error).__name__}: {error}. Make the layers "
            "traceable, or train on one device."
        ) from error
    return kinds


class _Zeros:
    """Replaces `tfparallel.replication.gathers.Gathers` in a trace that is not run."""

    def __init__(self, tape: tf.GradientTape):
        self._tape = tape
        self._reads: dict[int, list[tf.Tensor]] = {}

    def read(self, variable: keras.Variable) -> tf.Tensor:
        zeros = tf.zeros(variable.shape, keras.backend.standardize_dtype(variable.dtype))
        self._tape.watch(zeros)
        self._reads.setdefault(id(variable), []).append(zeros)
        return zeros

    def reads_of(self, variable: keras.Variable) -> list[tf.Tensor]:
        """Returns the zeros that replaced a variable, one for each read."""
        return self._reads.get(id(variable), [])


def _kinds(gradient) -> tuple[str, ...] | None:
    if not isinstance(gradient, tf.IndexedSlices):
        return None
    return tuple(each.kind for each in readings(gradient))


def _joined(pieces: Sequence[Reading]) -> Reading:
    """Combines the same lookup of all pieces into that of the whole batch."""
    if len(pieces) == 1:
        return pieces[0]
    first = pieces[0]
    if first.kind == ONCE:
        return first._replace(values=tf.add_n([each.values for each in pieces]))
    values = tf.concat([each.values for each in pieces], 0)
    indices = tf.concat([each.indices for each in pieces], 0)
    return merged(Reading(values, indices, first.kind))


def _split(values: tf.Tensor, indices: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Splits slices that a tape has concatenated into one pair for each lookup."""
    values_maker, indices_maker = _unwrapped(values), _unwrapped(indices)
    if values_maker.type != "ConcatV2" or indices_maker.type != "ConcatV2":
        return [(values, indices)]
    *all_values, _ = values_maker.inputs
    *all_indices, _ = indices_maker.inputs
    if len(all_values) != len(all_indices):
        return [(values, indices)]
    pairs = zip(all_values, all_indices, strict=True)
    return [lookup for pair in pairs for lookup in _split(*pair)]


def _unwrapped(tensor: tf.Tensor) -> tf.Operation:
    operation = tensor.op
    while operation.type == "Identity":
        operation = operation.inputs[0].op
    return operation


def _kind(values: tf.Tensor, indices: tf.Tensor) -> str:
    maker = provenance.maker_of(indices, _HANDED_ON)
    if maker.type in _UNIQUE:
        return DISTINCT
    if maker.type == provenance.maker_of(values, _OF_VALUES).type == "ConcatV2":
        # Concatenated inside a `tf.function`, which returns only the result.
        *parts, _ = provenance.inputs_made_of(indices, _HANDED_ON)
        if len({bool(part) for part in parts}) > 1:
            raise ValueError(
                "A weight that a layer reads in its own `tf.function` must be indexed either by "
                "rows of the batch, or by indices that are the same for all rows: the two are "
                "summed differently, but the function returns one sparse gradient. Received: a "
                f"weight of shape (…, {values.shape[-1]}), indexed in both ways. Use a separate "
                "function for each, or none."
            )
    return ROWS if provenance.made_of(indices) else ONCE


def _as_tensor(leaf):
    """Converts arrays: as constants of the trace, they would look like indices of kind `ONCE`."""
    return tf.convert_to_tensor(leaf) if hasattr(leaf, "__array_interface__") else leaf


def _spec_of_any_batch(tensor):
    """Returns the type spec of the tensor, for any batch size."""
    spec = tf.type_spec_from_value(tensor)
    if isinstance(spec, tf.RaggedTensorSpec):
        shape = [None, *spec.shape[1:]]
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)([None, *spec.shape[1:]], spec.dtype)
