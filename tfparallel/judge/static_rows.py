"""Whether Python computes something else where the number of rows is known than where it is not.

A data set of whole batches (`drop_remainder=True`) tells a layer how many rows a batch has, before
it has any: `x.shape[0]` is 8. In a piece it is None, since pieces may differ. Asking for the size
in either way, `x.shape[0] or tf.shape(x)[0]`, is right; `x.shape[0] or 1` is not.
"""

import collections
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfparallel.tracing.graphs import with_inner

# Operations that compute nothing with numbers, or stand for a constant where a size is known.
_MOVES = {
    *("BroadcastTo", "Cast", "ConcatV2", "Const", "EnsureShape", "ExpandDims", "Fill", "GatherNd"),
    *("GatherV2", "Identity", "OnesLike", "Pack", "Placeholder", "Reshape", "Slice", "Squeeze"),
    *("StridedSlice", "Tile", "Transpose", "ZerosLike"),
}
_MOST_VALUES = 16
_OF_GRADIENTS = re.compile(r"(?:^|/)gradient(?:s|_tape)(?:_\d+)?/")


class Computation(NamedTuple):
    """What a trace computes with numbers.

    Attributes:
        operations: The operations that compute with numbers or hold some, and which.
        variables: The variables that it reads, by the `id` of their handles.
    """

    operations: list[tuple[tf.Operation, Any]]
    variables: set[int]

    @classmethod
    def of(cls, graph: tf.Graph) -> "Computation":
        """Returns that of a graph, to which a judge has not added operations yet."""
        handles = {id(outer) for outer, _ in graph.captures if outer.dtype == tf.resource}
        return cls(list(_numbers(graph)), handles)

    def otherwise(self, whole: "Computation") -> tf.Operation | None:
        """Returns an operation that only this trace or one of known size has; None if none.

        If they read different variables, that is any operation.
        """
        operation = self._first_not_in(whole) or whole._first_not_in(self, constants=False)
        if operation is None and self.variables != whole.variables:
            return self.operations[-1][0]
        return operation

    def _first_not_in(self, other: "Computation", constants: bool = True) -> tf.Operation | None:
        missing = collections.Counter(what for _, what in other.operations)
        for operation, what in self.operations:
            # Where a size is known, `ones_like` is a constant.
            if not constants and operation.type == "Const":
                continue
            if not missing[what]:
                return operation
            missing[what] -= 1
        return None


def _numbers(graph) -> Iterator[tuple[tf.Operation, Any]]:
    for op in with_inner(graph.get_operations()):
        # Gradients follow from the rest; of unknown sizes, they are summed where it may be needed.
        if _OF_GRADIENTS.search(op.name) or not any(map(_is_number, op.outputs)):
            continue
        if op.type not in _MOVES:
            yield op, op.type
        elif op.type == "Const":
            values = np.unique(tf.make_ndarray(op.get_attr("value")))
            if 0 < len(values) <= _MOST_VALUES:
                yield op, tuple(values)


def _is_number(tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex
