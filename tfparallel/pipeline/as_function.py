"""Whether layers compute the same inside a function that is called once per micro-batch.

They do not if

* Python computes a part (`tf.py_function`), which keeps the tape of one call;
* random numbers are drawn without a Keras seed: each call may repeat the draws of the first;
* a weight has several gradients, one of them sparse. A function returns them as one, but the kind
  of each matters (`collectives/indexed_slices.py`).
"""

import itertools
from collections.abc import Collection, Iterator

import tensorflow as tf

from tfparallel.tracing.graphs import called_by, draws_anew, with_inner

# Operations that pass a sparse gradient on unchanged.
_HANDED_ON = ("Cast", "ConcatV2", "Identity", "IdentityN", "ReadVariableOp")
# Readers of a weight whose gradients are dense.
_DENSE = {
    "Add", "AddV2", "BatchMatMulV2", "BiasAdd", "Conv2D", "Conv2DBackpropInput", "Conv3D",
    "DepthwiseConv2dNative", "Einsum", "ExpandDims", "FusedBatchNormV3", "MatMul", "Maximum", "Mul",
    "RealDiv", "Reshape", "Rsqrt", "Shape", "Square", "Squeeze", "StridedSlice", "Sub", "Sum",
    "Transpose", "VariableShape",
}  # fmt: skip


def computes_the_same(graph: tf.Graph, weights: Collection[tf.Tensor]) -> bool:
    """Returns whether a traced graph may be called as a function.

    Args:
        graph: The graph.
        weights: The handles of the trainable weights in the graph.
    """
    for operation in with_inner(graph.get_operations()):
        if operation.type == "EagerPyFunc" or draws_anew(operation):
            return False
    return not any(_may_be_sparse_twice(weight) for weight in weights)


def _may_be_sparse_twice(weight: tf.Tensor) -> bool:
    readers = list(_readers(weight))
    for graph in itertools.chain(*map(called_by, readers)):
        if any("Gather" in operation.type for operation in with_inner(graph.get_operations())):
            return True  # Only the function knows how often it looks the weight up.
    return len(readers) > 1 and not {reader.type for reader in readers} <= _DENSE


def _readers(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """Yields the operations that compute with a weight's value, once per use."""
    for operation in tensor.consumers():
        if operation.type in _HANDED_ON:
            for output in operation.outputs:
                yield from _readers(output)
        else:
            yield operation
