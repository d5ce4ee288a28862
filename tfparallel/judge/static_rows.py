"""Whether Python computes something else where the number of rows is known than where it is not.

A data set of whole batches (`drop_remainder=True`) tells a layer how many rows a batch has, before
it has any: `x.shape[0]` is 8. In a piece it is None, since pieces may differ. Asking for the size
in either way, `x.shape[0] or tf.shape(x)[0]`, is right; `x.shape[0] or 1` is not.
"""

import collections

import numpy as np
import tensorflow as tf

from tfparallel.tracing.graphs import with_inner

# Operations that compute nothing with numbers, or stand for a constant where a size is known.
_MOVES = {
    *("BroadcastTo", "Cast", "ConcatV2", "Const", "EnsureShape", "ExpandDims", "Fill", "Identity"),
    *("OnesLike", "Pack", "Placeholder", "Reshape", "Slice", "Squeeze", "StridedSlice", "Tile"),
    *("Transpose", "ZerosLike"),
}
_MOST_VALUES = 16


def computed_otherwise(piece: tf.Graph, whole: tf.Graph) -> tf.Operation | None:
    """Returns an operation of a trace for any number of rows that the trace for one lacks.

    Args:
        piece: The graph of a call, traced for any number of rows.
        whole: The graph of the same call, traced for the number of the batch.

    Returns:
        The operation, a number or a computation with numbers; None if there is none, and both read
        the same variables.
    """
    missing = _computed(whole)
    for operation, what in _numbers(piece):
        if not missing[what]:
            return operation
        missing[what] -= 1
    read = [
        {id(outer) for outer, _ in graph.captures if outer.dtype == tf.resource}
        for graph in (piece, whole)
    ]
    if read[0] != read[1]:
        return next(op for op in piece.get_operations() if op.type != "Const")
    return None


def _computed(graph) -> collections.Counter:
    return collections.Counter(what for _, what in _numbers(graph))


def _numbers(graph):
    """Yields the operations of a graph that compute with numbers, or hold some, and which."""
    for op in with_inner(graph.get_operations()):
        if not any(each.dtype.is_floating or each.dtype.is_complex for each in op.outputs):
            continue
        if op.type not in _MOVES:
            yield op, op.type
        elif op.type == "Const":
            values = np.unique(tf.make_ndarray(op.get_attr("value")))
            if len(values) <= _MOST_VALUES:
                yield op, tuple(values)
