"""What a tensor of a graph was made of: of rows of the batch, of their number, or of neither.

A position embedding is read with the indices 0 … T−1, whatever the batch holds, and so once a
batch; a token embedding with indices that are rows of it. A dropout mask of a weight belongs to no
row. Neither a layer's name nor a shape tells which: the operations behind the tensor do.

    Const, weights, Shape(x)[1]          neither
    Shape(x)[0], ones_like(x)            the number of rows
    x, tokens[:, 1:], StringLookup(x)    rows
"""

import weakref
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfparallel.seams.tensorflow import graph_of

__all__ = ["NUMBER", "ROWS", "inputs_made_of", "made_of", "maker_of", "stand_for"]

ROWS, NUMBER = "rows", "number of rows"

# These look at the shape of their input and at none of its values.
_OF_SHAPE = ("Shape", "ShapeN", "Size", "ZerosLike", "OnesLike")
# Operations whose only inputs are resources read data (an iterator), except for these, which read
# state.
_STATE = ("Const", "VarHandleOp", "ReadVariableOp", "VariableShape", "Rank")
# What earlier searches found in a graph, so that one over many layers stays linear.
_MADE_OF_ROWS: weakref.WeakKeyDictionary[tf.Graph, set[str]] = weakref.WeakKeyDictionary()
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
# Of a function's graph: in what graph its arguments are, by their names here, which tensors.
_STANDS_FOR: weakref.WeakKeyDictionary[tf.Graph, dict[str, tuple[weakref.ref, str]]] = (
    weakref.WeakKeyDictionary()
)


def made_of(tensor: tf.Tensor) -> frozenset[str]:
    """Returns what a tensor of a graph depends on: a subset of `{ROWS, NUMBER}`.

    What is drawn at random counts as rows: each replica and each micro-batch draws for itself.

    Args:
        tensor: A tensor of a graph that is being traced.

    Raises:
        ValueError: If the tensor is eager: no operation stands behind it.
    """
    if not tf.is_symbolic_tensor(tensor):
        raise ValueError(
            "Only a tensor of a graph tells what it was made of. Received: an eager tensor of "
            f"shape {tensor.shape}."
        )
    found = _Walk().of(tensor)
    if ROWS in found:
        _MADE_OF_ROWS.setdefault(tensor.graph, set()).add(tensor.name)
    return found


def stand_for(placeholder: tf.Tensor, tensor: tf.Tensor) -> None:
    """Has a search go on behind a placeholder, a traced function's argument, at a tensor."""
    if tf.is_symbolic_tensor(tensor):
        outer = (weakref.ref(tensor.graph), tensor.name)
        _STANDS_FOR.setdefault(placeholder.graph, {})[placeholder.name] = outer


def maker_of(tensor: tf.Tensor, handed_on: Sequence[str]) -> tf.Operation:
    """Returns the operation that made a tensor, in whatever function it stands.

    The search goes on behind operations of the types `handed_on`.
    """
    operation, _ = _made_by(tensor, handed_on)
    return operation


def inputs_made_of(tensor: tf.Tensor, handed_on: Sequence[str]) -> list[frozenset[str]]:
    """Returns for each input of `maker_of` a tensor what it depends on, as `made_of` does."""
    operation, call = _made_by(tensor, handed_on)
    return [_Walk().of(each, call) for each in operation.inputs]


def _made_by(tensor, handed_on) -> tuple[tf.Operation, tuple]:
    """The maker, and the calls in whose functions it stands."""
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
    """One search; what was found out about a tensor is kept, and calls are looked into."""

    def __init__(self):
        self._known: dict[tuple, frozenset[str]] = {}

    def of(self, tensor: tf.Tensor, call: tuple = ()) -> frozenset[str]:
        """What a tensor is made of; `call` is the operations whose functions it stands in."""
        waiting, seen, found = [(tensor, call)], set(), frozenset()
        while waiting:
            tensor, call = waiting.pop()
            key = (id(tensor.graph), tensor.name, tuple(id(op) for op in call))
            if key in seen:
                continue
            seen.add(key)
            if tensor.name in _MADE_OF_ROWS.get(tensor.graph, ()) and not call:
                found |= {ROWS}
            elif tensor.op.type in _OF_SHAPE:
                found |= self._of_shape(tensor, call)
            elif (axis := _axis_read(tensor)) is not None:
                found |= frozenset() if axis else self._of_shape(tensor.op.inputs[0], call)
            elif tensor.op.type == "Placeholder":
                outer = self.outside(tensor, call)
                if outer is None:
                    found |= frozenset({ROWS} if tensor.dtype != tf.resource else ())
                elif tf.is_symbolic_tensor(outer[0]):
                    waiting.append(outer)
            elif _draws(tensor.op) or _reads_data(tensor.op):
                found |= {ROWS}
            elif tensor.op.type in _CALLS:
                waiting.extend(self.inside(tensor, call))
            else:
                waiting.extend((each, call) for each in tensor.op.inputs)
            if ROWS in found:
                break
        return found

    def _of_shape(self, tensor, call) -> frozenset[str]:
        """A fully known shape does not depend on the batch; another may hold its number of rows."""
        (of,) = tensor.op.inputs[:1]
        key = (id(of.graph), of.name, tuple(id(op) for op in call))
        if key not in self._known:
            is_known = of.shape.is_fully_defined()
            self._known[key] = frozenset() if is_known else self.of(of, call)
        return frozenset({NUMBER} if self._known[key] else ())

    def outside(self, placeholder, call):
        """The tensor that a placeholder stands for; None where it is the trace's own argument."""
        if call:
            given = zip(_function_of(call[-1]).inputs, call[-1].inputs, strict=False)
            for argument, tensor in given:
                if argument is placeholder:
                    return tensor, call[:-1]
        for external, internal in getattr(placeholder.graph, "captures", ()):
            if internal is placeholder:
                return external, call
        graph, name = _STANDS_FOR.get(placeholder.graph, {}).get(placeholder.name, (None, ""))
        return None if graph is None else (graph().get_tensor_by_name(name), call)

    def inside(self, tensor, call) -> Iterator[tuple]:
        """The output of the function that a call operation calls, or all that the call reads."""
        function = _function_of(tensor.op)
        if function is None:
            yield from ((each, call) for each in tensor.op.inputs)
        else:
            yield function.outputs[tensor.value_index], (*call, tensor.op)


def _function_of(operation):
    """The graph of the function that an operation calls; None where TensorFlow kept none."""
    try:
        return graph_of(operation.graph, operation.get_attr("f").name)
    except ValueError:
        return None


def _axis_read(tensor) -> int | None:
    """For `shape(x)[axis]` the axis, counted from 0."""
    operation = tensor.op
    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return None
    begin = tf.get_static_value(operation.inputs[1])
    if begin is None or len(begin) != 1 or operation.get_attr("shrink_axis_mask") != 1:
        return None
    ndim = operation.inputs[0].op.inputs[0].shape.rank
    return None if begin[0] < 0 and ndim is None else int(begin[0]) % (ndim or 1 << 30)


def _draws(operation) -> bool:
    return "Random" in operation.type or "Multinomial" in operation.type


def _reads_data(operation) -> bool:
    """Whether it takes its values from outside the graph: an iterator, a queue, Python."""
    is_held = (tensor.dtype in (tf.resource, tf.variant) for tensor in operation.inputs)
    hands_on = any(tensor.dtype in (tf.resource, tf.variant) for tensor in operation.outputs)
    return all(is_held) and not hands_on and operation.type not in _STATE
