"""Whether Python computes something else where the number of rows is known than where it is not.

A data set of whole batches (`drop_remainder=True`) tells a layer how many rows a batch has, before
it has any: `x.shape[0]` is 8. In a piece it is None, since pieces may differ. Asking for the size
in either way, `x.shape[0] or tf.shape(x)[0]`, is right; `x.shape[0] or 1` is not.

Two traces are compared by the operations that compute with numbers, each with its origin: which
operations, variables and inputs its own inputs come from. So weights that change places are seen.
Sizes, and constants in their place, have no origin, nor have operations that only move numbers.
"""

import collections
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfparallel.tracing.graphs import called_by

# Operations that compute nothing with numbers: they pass on those of the first input, join several,
# or stand for a constant where a size is known.
_PASS_ON = {
    *("BroadcastTo", "Cast", "EnsureShape", "ExpandDims", "GatherNd", "GatherV2", "Identity"),
    *("Reshape", "Slice", "Squeeze", "StridedSlice", "Tile", "Transpose"),
}
_JOIN = {"ConcatV2", "Pack"}
_CONSTANT = {"Const", "Fill", "OnesLike", "ZerosLike"}
_SIZES = {"Shape", "ShapeN", "Size", "Rank"}
_MOST_VALUES = 16
_OF_GRADIENTS = re.compile(r"(?:^|/)gradient(?:s|_tape)(?:_\d+)?/")


class Computation(NamedTuple):
    """What a trace computes with numbers.

    Attributes:
        operations: The operations that compute with numbers or hold some; and which, with their
            origins.
        variables: The variables that it reads, by the `id` of their handles.
    """

    operations: list[tuple[tf.Operation, Any]]
    variables: set[int]

    @classmethod
    def of(cls, graph: tf.Graph) -> "Computation":
        """Returns that of a graph, to which a judge has not added operations yet."""
        variables = {inner.op.name: id(o) for o, inner in graph.captures if o.dtype == tf.resource}
        captured = dict.fromkeys(inner.op.name for _, inner in graph.captures)
        inputs = {op.name: op.name for op in graph.get_operations() if op.type == "Placeholder"}
        return cls(list(_numbers(graph, inputs | captured | variables)), set(variables.values()))

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


def _numbers(graph, inputs: Mapping[str, Any]) -> Iterator[tuple[tf.Operation, Any]]:
    """Yields the operations with numbers of a graph, and of the functions that it calls.

    Args:
        graph: The graph.
        inputs: The origins of its inputs, by the operation's name.
    """
    origins: dict[str, Any] = {}

    def origin_of(tensor):
        origin = origins.get(tensor.op.name)
        return (origin, tensor.value_index) if origin and tensor.value_index else origin

    for op in graph.get_operations():
        if op.type == "Placeholder":
            origins[op.name] = inputs.get(op.name)
            continue
        # Gradients follow from the rest; of unknown sizes, they are summed where it may be needed.
        if _OF_GRADIENTS.search(op.name):
            continue
        read, functions = [origin_of(each) for each in op.inputs], list(called_by(op))
        if functions:  # A known size is not an argument, nor what an unknown one is read of.
            read = [
                each
                for place, each in enumerate(read)
                if each and not _is_argument_for_sizes(op, functions, place)
            ]
        origins[op.name] = _origin(op, read)
        if any(map(_is_number, op.outputs)):
            yield from ((op, what) for what in _computed(op, read))
        for function in functions:
            # The first input of a branch chooses it.
            arguments = op.inputs[max(len(op.inputs) - len(function.inputs), 0) :]
            pairs = zip(function.inputs, arguments, strict=False)
            yield from _numbers(function, {inner.op.name: origin_of(o) for inner, o in pairs})


def _is_argument_for_sizes(op, functions: Sequence[tf.Graph], place: int) -> bool:
    """Whether functions take nothing but sizes of an argument, such as the rows that a loop counts.

    Args:
        op: The operation that calls the functions.
        functions: The functions.
        place: The index of the argument among the operation's inputs.
    """
    is_loop = op.type in ("While", "StatelessWhile")
    if is_loop and op.outputs[place].consumers():
        return False
    for function in functions:
        index = place - max(len(op.inputs) - len(function.inputs), 0)
        if index < 0 or not _gives_only_sizes(function.inputs[index]):
            return False
        returned = [i for i, each in enumerate(function.outputs) if _is_from(each, function, index)]
        if returned not in ([], [index] if is_loop else []):
            return False
    return True


def _is_from(tensor, function, index) -> bool:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor is function.inputs[index]


def _gives_only_sizes(tensor) -> bool:
    for op in tensor.consumers():
        if op.type == "Identity":
            if not _gives_only_sizes(op.outputs[0]):
                return False
        elif op.type not in _SIZES:
            functions = list(called_by(op))
            places = [place for place, each in enumerate(op.inputs) if each is tensor]
            if not functions or not all(
                _is_argument_for_sizes(op, functions, place) for place in places
            ):
                return False
    return True


def _computed(op, read: Sequence) -> Iterator[Any]:
    """Yields what an operation computes from inputs of these origins; nothing if it moves them."""
    if op.type == "Const":
        values = np.unique(tf.make_ndarray(op.get_attr("value")))
        if 0 < len(values) <= _MOST_VALUES:
            yield tuple(values)
    elif op.type == "Einsum":
        yield op.type
        yield from ((op.type, each) for each in read if not isinstance(each, _Product))
    elif op.type not in _PASS_ON | _JOIN | _CONSTANT:
        yield (op.type, *read)


def _origin(op, read: Sequence) -> Any:
    """Returns the origin of an operation's outputs; None of sizes and constants."""
    known = [each for each in read if each]
    if op.type in _PASS_ON:
        return read[0]
    if op.type in _JOIN and len(set(known)) < 2:
        return known[0] if known else None
    if op.type == "Einsum":
        return _Product(known)
    is_size = op.outputs and all(each.dtype.is_integer or each.dtype.is_bool for each in op.outputs)
    if op.type in _CONSTANT or (is_size and op.type != "ReadVariableOp"):
        return None
    return hash((op.type, *(known if op.type in _JOIN else read)))


class _Product(tuple):
    """The origins of a product's factors. A size decides in which order several are multiplied."""

    def __new__(cls, factors: Sequence):
        flat = [each if isinstance(each, _Product) else (each,) for each in factors]
        return super().__new__(cls, sorted(itertools.chain(*flat), key=hash))


def _is_number(tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex
