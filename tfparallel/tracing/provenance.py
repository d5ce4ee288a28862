"""Determines what a graph tensor depends on: rows of the batch, their number, or neither.

A position embedding looks up the indices 0 … T−1 once per batch, whatever the batch holds; a token
embedding looks up indices from the rows. A dropout mask on a weight belongs to no row. Neither the
layer's name nor the shapes reveal the difference, but the operations behind the tensor do.

    Const, weights, Shape(x)[1]          neither
    Shape(x)[0], ones_like(x)            the number of rows
    x, tokens[:, 1:], StringLookup(x)    rows
"""

import weakref
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfparallel.seams.tensorflow import graph_of

ROWS, NUMBER = "rows", "number of rows"
# Marks a draw, by its name scope; `…_all` one without rows, which is the same in all pieces.
DRAW_OF_BATCH = "draw_of_batch"

# These depend on the shape of their input, but not on its values.
_OF_SHAPE = ("Shape", "ShapeN", "Size", "ZerosLike", "OnesLike")
# Operations with only resource inputs read data (from an iterator), except for these, which read
# state.
_STATE = ("Const", "VarHandleOp", "ReadVariableOp", "VariableShape", "Rank")
# Results of earlier searches in a graph, so that searches for many layers stay linear.
_MADE_OF_ROWS: weakref.WeakKeyDictionary[tf.Graph, set[str]] = weakref.WeakKeyDictionary()
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# For a function's graph: argument name -> (outer graph, name of the outer tensor).
_STANDS_FOR: weakref.WeakKeyDictionary[tf.Graph, dict[str, tuple[weakref.ref, str]]] = (
    weakref.WeakKeyDictionary()
)


def made_of(tensor: tf.Tensor) -> frozenset[str]:
    """Returns what a graph tensor depends on: a subset of `{ROWS, NUMBER}`.

    A random draw counts as rows, unless it is marked as the same in all pieces of the batch.

    Args:
        tensor: A tensor of a graph that is being traced.

    Raises:
        ValueError: If the tensor is eager, and so has no operation.
    """
    if not tf.is_symbolic_tensor(tensor):
        raise ValueError(
            "Only a symbolic tensor records what it was computed from. Received: an eager tensor "
            f"of shape {tensor.shape}."
        )
    dependencies = _Walk().of(tensor)
    if ROWS in dependencies:
        _MADE_OF_ROWS.setdefault(tensor.graph, set()).add(tensor.name)
    return dependencies


def counts_rows(size: tf.Tensor) -> bool:
    """Returns whether a graph tensor, one size of a shape, is the number of rows, or a multiple.

    Of a tensor whose shape is read, the rows are on axis 0, or on the only axis of unknown size.
    """
    axis = _axis_read(size)
    if axis is None:
        return bool(made_of(size))
    of = size.op.inputs[0].op.inputs[0]
    if of.shape.rank is None or not made_of(of):
        return False
    unknown = [place for place, known in enumerate(of.shape) if known is None]
    return axis == 0 if 0 in unknown else unknown == [axis]


def stand_for(placeholder: tf.Tensor, tensor: tf.Tensor) -> None:
    """Makes searches continue from a placeholder, an argument of a traced function, at a tensor."""
    if tf.is_symbolic_tensor(tensor):
        outer = (weakref.ref(tensor.graph), tensor.name)
        _STANDS_FOR.setdefault(placeholder.graph, {})[placeholder.name] = outer


def maker_of(tensor: tf.Tensor, handed_on: Sequence[str]) -> tf.Operation:
    """Returns the operation that produced a tensor, even inside called functions.

    The search passes through operations of the types `handed_on`.
    """
    operation, _ = _producer_of(tensor, handed_on)
    return operation


def inputs_made_of(tensor: tf.Tensor, handed_on: Sequence[str]) -> list[frozenset[str]]:
    """Returns what each input of a tensor's `maker_of` depends on, like `made_of`."""
    operation, call = _producer_of(tensor, handed_on)
    return [_Walk().of(each, call) for each in operation.inputs]


def _producer_of(tensor, handed_on) -> tuple[tf.Operation, tuple]:
    """Returns the producing operation, and the stack of calls that contains it."""
    walk, call = _Walk(), ()
    while True:
        if tensor.op.type in handed_on:
            tensor = tensor.op.inputs[0]
        elif tensor.op.type in _CALLS and _function_of(tensor.op) is not None:
            ((tensor, call),) = walk.inside(tensor, call)
        elif tensor.op.type == "Placeholder":
            outer = walk.outside(tensor, call)
            if outer is None or not tf.is_symbolic_tensor(outer[0]):
                return tensor.op, call
            tensor, call = outer
        else:
            return tensor.op, call


class _Walk:
    """One search, which caches its results and follows calls into functions."""

    def __init__(self):
        self._cache: dict[tuple, frozenset[str]] = {}

    def of(self, tensor: tf.Tensor, call: tuple = ()) -> frozenset[str]:
        """Returns what a tensor depends on; `call` is the stack of calls that contains it."""
        waiting, seen, dependencies = [(tensor, call)], set(), frozenset()
        while waiting:
            tensor, call = waiting.pop()
            key = (id(tensor.graph), tensor.name, tuple(id(op) for op in call))
            if key in seen:
                continue
            seen.add(key)
            if tensor.name in _MADE_OF_ROWS.get(tensor.graph, ()) and not call:
                dependencies |= {ROWS}
            elif tensor.op.type in _OF_SHAPE:
                dependencies |= self._of_shape(tensor, call)
            elif (axis := _axis_read(tensor)) is not None:
                dependencies |= frozenset() if axis else self._of_shape(tensor.op.inputs[0], call)
            elif tensor.op.type == "Placeholder":
                outer = self.outside(tensor, call)
                if outer is None:
                    dependencies |= frozenset({ROWS} if tensor.dtype != tf.resource else ())
                elif tf.is_symbolic_tensor(outer[0]):
                    waiting.append(outer)
            elif _draws(tensor.op) or _reads_data(tensor.op):
                dependencies |= {ROWS}
            elif tensor.op.type in _CALLS:
                waiting.extend(self.inside(tensor, call))
            else:
                waiting.extend((each, call) for each in tensor.op.inputs)
            if ROWS in dependencies:
                break
        return dependencies

    def _of_shape(self, tensor, call) -> frozenset[str]:
        """A static shape does not depend on the batch; a dynamic one may contain its size."""
        (of,) = tensor.op.inputs[:1]
        key = (id(of.graph), of.name, tuple(id(op) for op in call))
        if key not in self._cache:
            is_known = of.shape.is_fully_defined()
            self._cache[key] = frozenset() if is_known else self.of(of, call)
        return frozenset({NUMBER} if self._cache[key] else ())

    def outside(self, placeholder, call):
        """Returns the tensor behind a placeholder; None for an argument of the trace itself."""
        if call:
            arguments = zip(_function_of(call[-1]).inputs, call[-1].inputs, strict=False)
            for argument, tensor in arguments:
                if argument is placeholder:
                    return tensor, call[:-1]
        for external, internal in getattr(placeholder.graph, "captures", ()):
            if internal is placeholder:
                return external, call
        graph, name = _STANDS_FOR.get(placeholder.graph, {}).get(placeholder.name, (None, ""))
        return None if graph is None else (graph().get_tensor_by_name(name), call)

    def inside(self, tensor, call) -> Iterator[tuple]:
        """Yields the called function's output, or all inputs of the call if it is unknown."""
        function = _function_of(tensor.op)
        if function is None:
            yield from ((each, call) for each in tensor.op.inputs)
        else:
            yield function.outputs[tensor.value_index], (*call, tensor.op)


def _function_of(operation):
    """Returns the graph of the function that an operation calls; None if TensorFlow has none."""
    try:
        return graph_of(operation.graph, operation.get_attr("f").name)
    except ValueError:
        return None


def _axis_read(tensor) -> int | None:
    """Returns the axis of `shape(x)[axis]`, counted from 0; None for other tensors."""
    operation = tensor.op
    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return None
    begin = tf.get_static_value(operation.inputs[1])
    if begin is None or len(begin) != 1 or operation.get_attr("shrink_axis_mask") != 1:
        return None
    ndim = operation.inputs[0].op.inputs[0].shape.rank
    return None if begin[0] < 0 and ndim is None else int(begin[0]) % (ndim or 1 << 30)


def _draws(operation) -> bool:
    if f"{DRAW_OF_BATCH}_all_" in operation.name:
        return False
    return "Random" in operation.type or "Multinomial" in operation.type


def _reads_data(operation) -> bool:
    """Whether an operation reads values from outside the graph: an iterator, a queue, Python."""
    is_held = (tensor.dtype in (tf.resource, tf.variant) for tensor in operation.inputs)
    hands_on = any(tensor.dtype in (tf.resource, tf.variant) for tensor in operation.outputs)
    return all(is_held) and not hands_on and operation.type not in _STATE
