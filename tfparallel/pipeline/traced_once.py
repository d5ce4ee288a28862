"""A function of a micro-batch that is traced with the first and called for all.

M micro-batches pass through the same layers. If each were traced, a step would have M times the
operations: with 10.8 M parameters and M = 8, that took half a minute and a gigabyte before training
began. Instead, it is one function, forward and, by TensorFlow, backward; the step calls it M times.

A micro-batch's rows and index are arguments, like its tensors. Values that are the same for all in
a step (Keras's seeds, divisors) are computed outside, and captured.

Layers do not compute the same inside such a function if

* Python computes a part (`tf.py_function`), which keeps the tape of one call;
* random numbers are drawn without a Keras seed: each call may repeat the draws of the first;
* a weight has several gradients, one of them sparse. A function returns them as one, but the kind
  of each matters (`collectives/indexed_slices.py`).
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfparallel.piece import Piece
from tfparallel.problems import PlacementError
from tfparallel.seams.keras import mask_of, set_mask
from tfparallel.seams.tensorflow import InaccessibleTensorError
from tfparallel.tracing import provenance
from tfparallel.tracing.custom_gradient import is_differentiable
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


class MustTraceEach(Exception):
    """A step was traced once for all micro-batches, but each must be traced."""


class _NoFunction(Exception):
    """The trace computes something else inside a function."""


class TracedOnce:
    """Traces a function once per step; an eager step calls it directly.

    TensorFlow's gradient of a function uses zeros for each output without a gradient, where a tape
    would skip it: weights that nothing else depends on would get zeros, too, and 0 · ∞ is NaN. So
    gradients stop at every output that is not a target, and each target must have a gradient.

    Args:
        function: Takes tensors, some of which may be None, and the micro-batch's rows. Returns
            tensors, and the indices of the targets among them: those that get a gradient. Keras
            masks go in and out with their tensors.
        pieces: The rows of all micro-batches.
        weights: Trainable variables; not read if each micro-batch is traced.
        each: Whether to trace each micro-batch anyway.

    Attributes:
        targets: The indices of the floating-point tensors that must get a gradient; empty if each
            micro-batch is traced.
    """

    def __init__(
        self,
        function: Callable[[list[Any], Piece], tuple[list[Any], Collection[int]]],
        pieces: Sequence[Piece],
        weights: Iterable[tf.Variable] = (),
        *,
        each: bool = False,
    ):
        self.targets: frozenset[int] = frozenset()
        self._function = function
        # If known and the same for all, a layer sees that no micro-batch is empty.
        sizes = {s.num_rows if isinstance(s.num_rows, int) else None for s in pieces}
        self._num_rows = sizes.pop() if len(sizes) == 1 else None
        self._is_direct = each or tf.executing_eagerly()
        self._handles = set() if self._is_direct else {id(each.handle) for each in weights}
        self._traced: tf.types.experimental.ConcreteFunction | None = None
        self._types: list[tf.TypeSpec] = []
        self._masked: list[int] = []  # The indices of the results with masks.

    def __call__(self, tensors: Sequence[Any], piece: Piece) -> list[Any]:
        """Returns the function's results for a micro-batch's tensors.

        Args:
            tensors: The micro-batch's tensors.
            piece: Its rows.

        Raises:
            MustTraceEach: If their types differ from those of the first micro-batch.
            ValueError: If it reads a tensor of another function.
        """
        if self._traced is None and not self._is_direct:
            try:
                self._trace(tensors, piece)
            except _NoFunction:
                self._is_direct = True
        if self._is_direct:
            results, _ = self._function(list(tensors), piece)
            return results
        arguments = [*_piece_numbers(piece), *_with_masks(tensors)]
        pairs = zip(self._types, arguments, strict=True)
        if not all(spec.is_compatible_with(each) for spec, each in pairs):
            raise MustTraceEach
        try:
            results = list(self._traced(*arguments))
        except InaccessibleTensorError as error:
            raise PlacementError(
                "A layer stores a tensor, and another stage or the loss reads it. A tensor must "
                "reach its reader through the model's graph, which is cut into stages: as an "
                "output of one layer and an input of the other. Received: "
                f"{str(error).partition(' is out of scope')[0]}."
            ) from error
        masks = results[len(results) - len(self._masked) :]
        results = results[: len(results) - len(self._masked)]
        for place, mask in zip(self._masked, masks, strict=True):
            set_mask(results[place], mask)
        return results

    def _trace(self, tensors, piece):
        outside = [*_piece_numbers(piece), *_with_masks(tensors)]

        def body(*arguments):
            _stand_for(arguments, outside)
            local_tensors = _without_masks(arguments[3:], tensors)
            results, targets = self._function(local_tensors, self._own_piece(piece, arguments[:3]))
            graph = tf.compat.v1.get_default_graph()
            weights = [inner for outer, inner in graph.captures if id(outer) in self._handles]
            if not _computes_the_same(graph, weights):
                raise _NoFunction
            masks = [mask_of(each) for each in results]
            self._masked = [place for place, mask in enumerate(masks) if mask is not None]
            results = [_as_tensor(each) for each in results]
            self.targets = frozenset(p for p in targets if is_differentiable(results[p]))
            results = [
                each if place in self.targets or each is None else _without_gradient(each)
                for place, each in enumerate(results)
            ]
            return [*results, *(_as_tensor(mask) for mask in masks if mask is not None)]

        # Not inlined: otherwise each device's part of the step has all operations M times.
        attributes = {"_noinline": True}
        function = tf.function(body, autograph=False, experimental_attributes=attributes)
        self._types = [*map(_type_of, outside)]
        self._traced = function.get_concrete_function(*self._types)

    def _own_piece(self, piece, numbers) -> Piece:
        index, start, num_rows = numbers
        num_rows = num_rows if self._num_rows is None else self._num_rows
        return piece._replace(replica=index, start=start, num_rows=num_rows)


def _piece_numbers(piece: Piece) -> list[tf.Tensor]:
    numbers = (piece.replica, piece.start, piece.num_rows)
    tensors = [tf.convert_to_tensor(number, tf.int32) for number in numbers]
    if tf.executing_eagerly():
        return tensors
    # TensorFlow would specialize a function for each call with constants.
    return [tf.compat.v1.placeholder_with_default(each, each.shape) for each in tensors]


def _with_masks(tensors) -> list:
    """Returns the tensors that are not None, and then their masks."""
    present = [tensor for tensor in tensors if tensor is not None]
    masks = [mask_of(tensor) for tensor in present]
    return [*present, *(mask for mask in masks if mask is not None)]


def _without_masks(arguments, like) -> list:
    """Undoes `_with_masks`, and restores None."""
    number = sum(tensor is not None for tensor in like)
    present, masks = iter(arguments[:number]), iter(arguments[number:])
    tensors = []
    for original in like:
        tensors.append(None if original is None else next(present))
        if mask_of(original) is not None:
            set_mask(tensors[-1], next(masks))
    return tensors


def _stand_for(arguments, originals) -> None:
    """Lets a search for a tensor's origin continue outside of the function."""
    inside = tf.nest.flatten(arguments, expand_composites=True)
    outside = tf.nest.flatten(originals, expand_composites=True)
    for placeholder, tensor in zip(inside, outside, strict=True):
        provenance.stand_for(placeholder, tensor)


def _as_tensor(value):
    """Converts a weight or an array that a layer returns."""
    if value is None or isinstance(value, tf.__internal__.CompositeTensor):
        return value
    return value if tf.is_symbolic_tensor(value) else tf.identity(tf.convert_to_tensor(value))


def _without_gradient(value):
    return tf.nest.map_structure(
        lambda part: tf.stop_gradient(part) if is_differentiable(part) else part,
        value,
        expand_composites=True,
    )


def _type_of(tensor) -> tf.TypeSpec:
    """Returns a tensor's type; for sparse and ragged tensors, with any number of rows."""
    spec = tf.type_spec_from_value(tensor)
    if isinstance(spec, tf.RaggedTensorSpec):
        shape = [None, *spec.shape[1:]]
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *spec.shape[1:]], spec.dtype)
    return spec


def _computes_the_same(graph: tf.Graph, weights: Collection[tf.Tensor]) -> bool:
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
