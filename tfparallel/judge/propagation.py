"""Whether what is computed of rows may be computed of pieces of them: judged on the traced graph.

Each tensor has a placement (`placements.py`); the rows come in as `Shard(0)`, weights and states as
`Replicate`, and each operation has a rule (`rules/`), through loops, branches and functions. An
operation without a rule is tried by itself, on made-up inputs (`trial_of_operation.py`). Nothing is
read from the data, and nothing of the model is computed.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfparallel.judge import flow, rules, trial_of_operation, values
from tfparallel.judge.placements import (
    OF_REPLICA,
    Entries,
    Mixed,
    Placement,
    Replicate,
    Row,
    Shard,
    Sum,
)
from tfparallel.judge.size import ROWS, depends_on_rows, power_of_rows, size_named
from tfparallel.seams.tensorflow import FuncGraph
from tfparallel.tracing.graphs import is_in_function

__all__ = [
    "Judge",
    "Judged",
    "exchanged",
    "exchanges_of",
    "is_judged",
    "is_judging",
    "judged_graph",
    "note",
    "notes_of",
]

_MOST_SIZES, _MOST_KNOWN = 8, 64
_REPLICA = "replica_id_in_sync_group"  # As TensorFlow names what its replica contexts tell.
# Of a graph: by name, tensors that were joined of what all pieces have, and how. Of a graph that is
# judged: their names, in whatever function; and what was asked.
_EXCHANGED, _EXCHANGES, _NOTES = (
    f"_tfparallel_{what}" for what in ("exchanged", "exchanges", "notes")
)

# What comes to that of the whole batch if pieces exchange it so, and what becomes of all else.
_RIGHT = {
    "sum": (
        (Sum(), Replicate(power=1)),
        "adds up over the replicas what is no sum over the rows: the result depends on how many "
        "there are",
    ),
    "mean": (
        (Replicate(),),
        "takes the mean over replicas, which may have other numbers of rows: sums, and numbers of "
        "rows, are to be added up",
    ),
    "in function": ((), "is exchanged inside a `tf.function` of the layer"),
    "max": ((Replicate(),), "takes the largest of what is not the largest of a replica's rows"),
    "min": ((Replicate(),), "takes the smallest of what is not the smallest of a replica's rows"),
}
_EXTREMES = {"max": ("Max", "Any"), "min": ("Min", "All")}
_JOINED = "joins what does not have a row for each example"


class Judged(NamedTuple):
    """What is known of a tensor.

    Attributes:
        placement: Where the rows are.
        dims: Sizes of its axes; None if not even their number is known.
        value: Its elements, if they are known sizes, numbers or booleans.
    """

    placement: Placement
    dims: tuple | None
    value: np.ndarray | None = None

    @property
    def is_zero(self) -> bool:
        """Whether all elements are known to be zero."""
        return self.value is not None and values.only(self.value) == 0


def judged_graph(name: str) -> tf.Graph:
    """A graph to trace a call in, which is judged."""
    graph = FuncGraph(name)
    setattr(graph, _NOTES, [])
    return graph


def is_judged(tensor: tf.Tensor) -> bool:
    """Whether a tensor is made in the trace of a call that is judged."""
    return tf.is_symbolic_tensor(tensor) and _judged_graph_of(tensor.graph) is not None


def _judged_graph_of(graph) -> tf.Graph | None:
    while graph is not None and not hasattr(graph, _NOTES):
        graph = getattr(graph, "outer_graph", None)
    return graph


def is_judging() -> bool:
    """Whether the trace of a call is made here that is judged."""
    if tf.executing_eagerly():
        return False
    return _judged_graph_of(tf.compat.v1.get_default_graph()) is not None


def exchanged(value: Any, how: str = "", axis: int = 0) -> Any:
    """Tells the judge that a tensor is the same on all pieces, which exchange what they know.

    Args:
        value: What a piece knows; only in a trace that is judged it is told.
        how: "sum", "mean", "max", "min" or "gather", of which the judge looks at what is given:
            whether it comes to what the whole batch has. If it is not told how, it believes that.
        axis: Along which values are joined by "gather".
    """
    if not is_judging():
        return value
    tensor = tf.identity(tf.convert_to_tensor(value))
    judged = _judged_graph_of(tensor.graph)
    if is_in_function(tensor.graph, judged):
        how = "in function"
    elif how == "gather":
        how = Shard(axis % tensor.shape.rank if tensor.shape.rank else axis)
    setattr(tensor.graph, _EXCHANGED, getattr(tensor.graph, _EXCHANGED, {}) | {tensor.name: how})
    setattr(judged, _EXCHANGES, [*getattr(judged, _EXCHANGES, ()), tensor.op.name])
    return tensor


def exchanges_of(graph: tf.Graph) -> list[str]:
    """The operations, in whatever function, behind which each piece knows what all pieces do."""
    return getattr(_judged_graph_of(graph), _EXCHANGES, [])


def note(layer: keras.Layer, tensor: tf.Tensor) -> None:
    """Asks the judge, if it traces this, which axis of a layer's tensor holds the rows."""
    if tf.is_symbolic_tensor(tensor) and hasattr(tensor.graph, _NOTES):
        getattr(tensor.graph, _NOTES).append((layer, tensor))


def notes_of(graph: tf.Graph) -> list[tuple[keras.Layer, tf.Tensor]]:
    """What was noted in a trace."""
    return getattr(graph, _NOTES)


class Judge:
    """Judges the tensors of a graph.

    Args:
        graph: The graph of a function, traced.
        known: What is known of its tensors, by name: of its inputs at first. Other inputs are
            `Replicate`.
        path: The operations of which this is an inner graph, the outermost first.
        asks_gradients: Whether gradients of the program's own are judged, too.
        roots: Arguments of sparse or ragged rows.
    """

    def __init__(
        self,
        graph: tf.Graph,
        known: dict[str, Judged],
        path: Sequence = (),
        asks_gradients: bool = True,
        roots: Sequence = (),
    ):
        self.roots = tuple(roots)
        self.graph = graph
        self.asks_gradients = asks_gradients
        self.path = tuple(path)
        # A function that is called twice has sizes of each call.
        self.names = tuple(op.name for op in self.path)
        self.known = dict(known)

    @classmethod
    def of_rows(cls, graph: tf.Graph, rows: Iterable[tf.Tensor], along: int = 0) -> "Judge":
        """Judges a graph of which these inputs hold the rows on an axis."""
        known = {}
        for tensor in rows:
            dims = None
            if tensor.shape.rank is not None:
                dims = tuple(
                    ROWS if axis == along else _dim(tensor, axis)
                    for axis in range(tensor.shape.rank)
                )
            known[tensor.name] = Judged(Shard(along), dims)
        return cls(graph, known)

    def of(self, tensor: tf.Tensor) -> Judged:
        """What is known of a tensor of the graph."""
        waiting = [tensor.op]
        while waiting:
            op = waiting[-1]
            if all(out.name in self.known for out in op.outputs):
                waiting.pop()
                continue
            missing = [each.op for each in op.inputs if each.name not in self.known]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            given = [self.known[each.name] for each in op.inputs]
            try:
                found = self._judged(op, given)
            except Exception as error:  # What is not shown to be right is refused, by name.
                mixed = Mixed(op, f"cannot be judged ({type(error).__name__}: {error})"[:200])
                found = [self._completed(out, mixed, None) for out in op.outputs]
            for out, judged in zip(op.outputs, found, strict=True):
                self.known.setdefault(out.name, judged)
        return self.known[tensor.name]

    def _judged(self, op: tf.Operation, given: list[Judged]) -> list[Judged]:
        marked = getattr(op.graph, _EXCHANGED, {})
        if op.outputs and op.outputs[0].name in marked:
            (out,) = op.outputs
            placement = self._exchanged(op, marked[out.name], given[0].placement)
            return [Judged(placement, self._static(out))]
        if op.type == "Const" and _REPLICA in op.name:
            return [Judged(Mixed(op, OF_REPLICA), ())]
        value = values.value_of(op, given)
        if value is not None and not any(isinstance(p, Entries) for p, *_ in given):
            return [Judged(_of_value(op, value), value.shape, value)]
        if op.type in flow.FLOWS:
            return [
                self._completed(out, *judged)
                for out, judged in zip(
                    op.outputs, flow.FLOWS[op.type](self, op, given), strict=True
                )
            ]
        placements, dims = rules.apply(op, given, self.known)
        if any(isinstance(p, Entries) for p, *_ in given) and op.type in trial_of_operation.ENDS:
            if any(isinstance(p, Entries | Mixed) for p in placements):
                placements = trial_of_operation.tried_with_rows(op, self)
                dims = [None] * len(placements)
        return [
            self._completed(out, placement, size)
            for out, placement, size in zip(op.outputs, placements, dims, strict=True)
        ]

    def _completed(self, out, placement, dims, value=None) -> Judged:
        """Fills in what the graph itself knows of a tensor's shape, and names what nobody knows."""
        if value is None and placement == Replicate() and _may_be_size(out):
            value = np.empty(out.shape, object)
            for place in np.ndindex(value.shape):
                value[place] = size_named((*self.names, out.name, *place))
        if out.shape.rank is None:
            return Judged(placement, dims, value)
        sizes = list(dims or [None] * out.shape.rank)
        if len(sizes) != out.shape.rank:
            sizes = [None] * out.shape.rank
        for axis, size in enumerate(out.shape):
            if size is not None and not depends_on_rows(sizes[axis]):
                sizes[axis] = size
            elif sizes[axis] is None:
                decided = () if isinstance(placement, Replicate | Shard | Row) else (ROWS,)
                sizes[axis] = _dim(out, axis, *self.names, *decided)
                if isinstance(placement, Shard) and placement.axis == axis:
                    sizes[axis] = ROWS * sizes[axis]
        return Judged(placement, tuple(sizes), value)

    def _exchanged(self, op, how: str | Shard, placement: Placement) -> Placement:
        """The placement of what pieces have exchanged."""
        right, why = ((how,), _JOINED) if isinstance(how, Shard) else _RIGHT.get(how, ((), ""))
        if not why or placement in right or self._is_extreme_of_rows(op.inputs[0], how):
            return Replicate()
        return placement if isinstance(placement, Mixed) else Mixed(op, why)

    def _is_extreme_of_rows(self, tensor, how) -> bool:
        """Whether it is the largest, or the smallest, of a piece's rows."""
        source = tensor.op
        while source.type == "Identity":
            source = source.inputs[0].op
        if source.type not in _EXTREMES.get(how, ()):
            return False
        rows = self.known[source.inputs[0].name].placement
        mixed = self.known[tensor.name].placement
        is_rows = isinstance(rows, Shard) and not rows.power and not rows.numbers
        return is_rows and isinstance(mixed, Mixed) and mixed.operation is source

    def _static(self, tensor) -> tuple | None:
        if tensor.shape.rank is None:
            return None
        return tuple(_dim(tensor, axis, *self.names) for axis in range(tensor.shape.rank))


def _of_value(op, value) -> Placement:
    """The placement of known elements."""
    flat = value.ravel().tolist() if value.size <= _MOST_KNOWN else [value.flat[0]]
    if not any(map(depends_on_rows, flat)):
        return Replicate()
    power = power_of_rows(flat[0]) if len(flat) == 1 else None
    if power is None:
        return Mixed(op, "is made of the number of rows")
    return Replicate(power)


def _may_be_size(out) -> bool:
    """Whether a tensor may be a size, or several, which get names."""
    known = out.dtype in (tf.int32, tf.int64) and out.shape.is_fully_defined()
    return known and out.shape.num_elements() <= _MOST_SIZES


def _dim(tensor, axis, *decided):
    """The size of an axis, or its name, with what decides it."""
    size = tensor.shape[axis]
    return size_named((tensor.name, axis, *decided)) if size is None else size
