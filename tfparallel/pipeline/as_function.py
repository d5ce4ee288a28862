"""Whether layers compute the same in a function of their own, which is called M times.

Not if

* Python computes a part (`tf.py_function`), which keeps one call's tape;
* numbers are drawn without a seed of Keras's: each call may draw those of the first;
* a weight has several gradients, one of which is sparse. A function hands them on as one, and of
  which kind each of them is matters (`collectives/indexed_slices.py`).
"""

import itertools
from collections.abc import Collection, Iterator

import tensorflow as tf

from tfparallel.tracing.graphs import called_by, draws_anew, with_inner

__all__ = ["computes_the_same"]

# What hands a sparse gradient on as it is.
_HANDED_ON = ("Cast", "ConcatV2", "Identity", "IdentityN", "ReadVariableOp")
# Readers of a weight whose gradients are dense, each by itself.
_DENSE = {
    "Add", "AddV2", "BatchMatMulV2", "BiasAdd", "Conv2D", "Conv2DBackpropInput", "Conv3D",
    "DepthwiseConv2dNative", "Einsum", "ExpandDims", "FusedBatchNormV3", "MatMul", "Maximum", "Mul",
    "RealDiv", "Reshape", "Rsqrt", "Shape", "Square", "Squeeze", "StridedSlice", "Sub", "Sum",
    "Transpose", "VariableShape",
}  # fmt: skip


def computes_the_same(graph: tf.Graph, weights: Collection[tf.Tensor]) -> bool:
    """Whether what was traced may be called as a function.

    Args:
        graph: What was traced.
        weights: The handles of the weights that are trained, as they are in it.
    """
    for operation in with_inner(graph.get_operations()):
        if operation.type == "EagerPyFunc" or draws_anew(operation):
            return False
    return not any(_may_be_sparse_twice(weight) for weight in weights)


def _may_be_sparse_twice(weight: tf.Tensor) -> bool:
    readers = list(_readers(weight))
    for graph in itertools.chain(*map(called_by, readers)):
        if any("Gather" in operation.type for operation in with_inner(graph.get_operations())):
            return True  # How often it looks the weight up, the function alone knows.
    return len(readers) > 1 and not {reader.type for reader in readers} <= _DENSE


def _readers(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """What computes with a weight's value, as often as it does."""
    for operation in tensor.consumers():
        if operation.type in _HANDED_ON:
            for output in operation.outputs:
                yield from _readers(output)
        else:
            yield operation
