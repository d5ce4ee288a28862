"""The arguments of a judged call: dense, sparse or ragged rows, of any number."""

from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.judge.placements import Entries, Replicate
from tfparallel.judge.propagation import Judge, Judged
from tfparallel.judge.size import ROWS
from tfparallel.seams.tensorflow import composite_of


def type_of_argument(leaf) -> tf.TypeSpec:
    """Returns the type of a leaf, for batches of any size."""
    shape = tf.TensorShape(leaf.shape)
    if isinstance(leaf, tf.SparseTensor | tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *shape[1:]], leaf.dtype)
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(
            [None, *shape[1:]], leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype
        )
    if isinstance(leaf, tf.RaggedTensorSpec):
        return leaf
    return tf.TensorSpec([None, *shape[1:]] if shape.rank else shape, leaf.dtype)


def of_known_size(spec: tf.TypeSpec, leaf) -> tf.TypeSpec:
    """Returns the type of an argument, with the number of rows if that is known."""
    is_dense = type(spec) is tf.TensorSpec
    return tf.TensorSpec(leaf.shape, spec.dtype) if is_dense else spec


def placeholder_of(spec) -> tuple[Any, dict[str, Judged]]:
    """Returns a placeholder of a type, and the judgements of its tensors, by name."""
    if isinstance(spec, tf.TensorSpec):
        tensor = tf.compat.v1.placeholder(spec.dtype, spec.shape)
        if tensor.shape.rank == 0:
            return tensor, {tensor.name: Judged(Replicate(), ())}
        return tensor, Judge.of_rows(tensor.graph, [tensor]).judged
    composed = composite_of(spec, lambda part: tf.compat.v1.placeholder(part.dtype, part.shape))
    if isinstance(composed, tf.SparseTensor):
        return composed, _of_sparse(composed)
    return composed, _of_ragged(composed)


def _of_sparse(tensor) -> dict[str, Judged]:
    sizes = np.empty(tensor.shape.rank, object)
    sizes[:] = [ROWS, *tensor.shape[1:]]
    judged = {
        tensor.indices.name: Judged(Entries("indices"), None),
        tensor.values.name: Judged(Entries("values"), None),
    }
    if None not in tensor.shape[1:].as_list():
        judged[tensor.dense_shape.name] = Judged(Entries("sizes"), None, sizes)
    else:
        judged[tensor.dense_shape.name] = Judged(Entries("sizes"), None)
    return judged


def _of_ragged(tensor) -> dict[str, Judged]:
    judged = {tensor.flat_values.name: Judged(Entries("values"), None)}
    judged |= {splits.name: Judged(Entries("splits"), None) for splits in tensor.nested_row_splits}
    return judged
