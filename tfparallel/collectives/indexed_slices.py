"""Sparse gradients of the parts of a batch, joined into that of the whole.

Keras squares the slices of a sparse gradient as they come, so it matters whether an index that two
parts have becomes one slice or two:

* of an `Embedding` the whole batch's gradient has a slice for each id that was read, repeated or
  not; so those of the parts are laid end to end;
* of a kernel that a sparse tensor multiplies it has one for each feature that the batch holds
  (`tf.nn.embedding_lookup_sparse` looks every feature up once); so those of an index are added.

Which it is, a graph tells: the indices come from TensorFlow's `Unique`. Eagerly nothing does.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

__all__ = ["are_distinct", "check_told_apart", "joined"]

_HANDED_ON = ("Identity", "Reshape", "Cast")
_DISTINCT = ("Unique", "UniqueV2", "UniqueWithCounts")


def joined(parts: Sequence[tf.IndexedSlices], distinct: bool | None = None) -> tf.IndexedSlices:
    """Returns the gradient of the whole batch.

    Args:
        parts: Those of its parts, in order.
        distinct: Whether each index is to have one slice; if None, as the parts' graph says.
    """
    if len(parts) == 1 and distinct is None:
        return parts[0]
    values = tf.concat([part.values for part in parts], 0)
    indices = tf.concat([part.indices for part in parts], 0)
    if distinct or (distinct is None and all(map(are_distinct, parts))):
        indices, place = tf.unique(indices)
        values = tf.math.unsorted_segment_sum(values, place, tf.size(indices))
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def are_distinct(slices: tf.IndexedSlices) -> bool:
    """Whether the graph has no index come twice, whatever the batch holds.

    Raises:
        ValueError: If a weight was read twice, and of one reading at least that is so: an index has
            as many slices then as there are readings that have it.
    """
    if not tf.is_symbolic_tensor(slices.indices):
        return False
    operation = _maker(slices.indices)
    if operation.type == "ConcatV2" and any(_is_distinct(own) for own in operation.inputs[:-1]):
        raise ValueError(
            "A weight that multiplies a sparse tensor and is read a second time in a step cannot be "
            "trained in parts: its gradient does not tell which slices are to be added. A layer of "
            "its own for each sparse tensor is required. Received: a weight of shape "
            f"{slices.shape}. Or make the tensors dense."
        )
    return _is_distinct(slices.indices)


def _is_distinct(indices: tf.Tensor) -> bool:
    return _maker(indices).type in _DISTINCT


def _maker(tensor: tf.Tensor) -> tf.Operation:
    operation = tensor.op
    while operation.type in _HANDED_ON:
        operation = operation.inputs[0].op
    return operation


def check_told_apart(model: keras.Layer, inputs: Iterable[Any]) -> None:
    """Raises if sparse gradients of this model, run eagerly, could be of either kind.

    Raises:
        ValueError: If it reads or makes sparse tensors and no graph is traced.
    """
    if not tf.executing_eagerly():
        return
    given = [leaf for leaf in inputs if isinstance(leaf, tf.SparseTensor)]
    makers = [own.name for own in model._flatten_layers() if getattr(own, "sparse", False)]
    if given or makers:
        raise ValueError(
            f"Sparse tensors cannot be trained on eagerly in parts: of '{model.name}' nothing then "
            "tells which slices of its gradients are to be added. A traced step is required. "
            f"Received: run_eagerly=True, sparse tensors {[tuple(t.shape) for t in given]}, sparse "
            f"layers {makers}. Compile with run_eagerly=False, or make the tensors dense."
        )
