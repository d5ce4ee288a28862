"""Judges, on the traced graph, whether a computation on rows may be split into pieces.

Each tensor has a placement (`placements.py`); the rows come in as `Shard(0)`, weights and states as
`Replicate`, and each operation has a rule (`rules/`), through loops, branches and functions. An
operation without a rule is tried on synthetic inputs (`trial_of_operation.py`). The judge reads no
data and runs no part of the model.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

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

_MOST_SIZES, _MOST_KNOWN = 8, 64
_REPLICA = "replica_id_in_sync_group"  # TensorFlow's name for the index in a replica context.
# Attributes of a graph: exchanged tensors, by name, and how. Attributes of a judged graph: the
# names of exchanges, also in inner functions.
_EXCHANGED, _EXCHANGES = (f"_tfparallel_{what}" for what in ("exchanged", "exchanges"))

# Placements for which an exchange gives the result of the whole batch, and why others do not.
_RIGHT = {
    "sum": (
        (Sum(), Replicate(power=1)),
        "sums a value over the replicas that is not a sum over the rows, so the result depends on "
        "the number of replicas",
    ),
    "mean": (
        (Replicate(),),
        "averages over replicas, which may have different numbers of rows; sum the values and the "
        "numbers of rows instead",
    ),
    "by rank": ((), "exchanges values by rank, so the result depends on the number of replicas"),
    "in function": ((), "is exchanged inside a `tf.function` of the layer"),
    "max": ((Replicate(),), "takes the maximum of values that are not maxima of a replica's rows"),
    "min": ((Replicate(),), "takes the minimum of values that are not minima of a replica's rows"),
}
_EXTREMES = {"max": ("Max", "Any"), "min": ("Min", "All")}
_JOINED = "gathers a tensor that does not have a row for each example"


class Judged(NamedTuple):
    """The judgement of a tensor.

    Attributes:
        placement: Where the rows are.
        dims: The sizes of its axes; None if not even their number is known.
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
    """Returns a graph for the trace of a judged call."""
    graph = FuncGraph(name)
    setattr(graph, _EXCHANGES, [])
    return graph


def is_judged(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor belongs to the trace of a judged call."""
    return tf.is_symbolic_tensor(tensor) and _judged_graph_of(tensor.graph) is not None


def _judged_graph_of(graph) -> tf.Graph | None:
    while graph is not None and not hasattr(graph, _EXCHANGES):
        graph = getattr(graph, "outer_graph", None)
    return graph


def is_judging() -> bool:
    """Returns whether the trace of a judged call is being made."""
    if tf.executing_eagerly():
        return False
    return _judged_graph_of(tf.compat.v1.get_default_graph()) is not None


def exchanged(value: Any, how: str = "", axis: int = 0) -> Any:
    """Marks a tensor as equal in all pieces, since they exchange it, for the judge.

    Args:
        value: The value of a piece; unchanged outside of judged traces.
        how: "sum", "mean", "max", "min" or "gather": the judge checks that the exchange gives the
            result of the whole batch. "by rank": it never does. "": the judge assumes it.
        axis: The axis of "gather".
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
    setattr(judged, _EXCHANGES, [*getattr(judged, _EXCHANGES), tensor.op.name])
    return tensor


def exchanges_of(graph: tf.Graph) -> list[str]:
    """Returns the names of the operations, also in inner functions, that exchange values."""
    return getattr(_judged_graph_of(graph), _EXCHANGES, [])


class Judge:
    """Judges the tensors of a graph.

    Args:
        graph: The traced graph of a function.
        judged: The judgements of its tensors, by name: of its inputs at first. Other inputs are
            `Replicate`.
        path: The operations that contain this inner graph, the outermost first.
        asks_gradients: Whether to judge the program's own gradients, too.
        roots: Arguments of sparse or ragged rows.
        inside: Where to add the judges of inner graphs, by call; one dictionary for all.
    """

    def __init__(
        self,
        graph: tf.Graph,
        judged: dict[str, Judged],
        path: Sequence = (),
        asks_gradients: bool = True,
        roots: Sequence = (),
        inside: "dict[tuple, Judge] | None" = None,
    ):
        self.roots = tuple(roots)
        self.graph = graph
        self.asks_gradients = asks_gradients
        self.path = tuple(path)
        # A function that is called twice has separate sizes for each call.
        self.names = tuple(op.name for op in self.path)
        self.judged = dict(judged)
        self._inside = {} if inside is None else inside

    def inner(self, op: tf.Operation, graph: tf.Graph, inputs: Sequence[Judged]) -> "Judge":
        """Returns a judge of a graph that an operation calls with these arguments."""
        arguments = {tensor.name: each for tensor, each in zip(graph.inputs, inputs, strict=True)}
        path = (*self.path, op)
        judge = Judge(graph, arguments, path, self.asks_gradients, inside=self._inside)
        # Of a loop, the judge for any iteration comes last.
        self._inside[judge.names, graph.name] = judge
        return judge

    def in_all_calls(self, tensor: tf.Tensor) -> list[Judged]:
        """Returns the judgement of a tensor of an inner graph in each call of that graph."""
        return [each.of(tensor) for each in self._inside.values() if each.graph is tensor.graph]

    @classmethod
    def of_rows(cls, graph: tf.Graph, rows: Iterable[tf.Tensor], along: int = 0) -> "Judge":
        """Judges a graph whose inputs `rows` hold the rows on an axis."""
        judgements = {}
        for tensor in rows:
            dims = None
            if tensor.shape.rank is not None:
                dims = tuple(
                    ROWS if axis == along else _dim(tensor, axis)
                    for axis in range(tensor.shape.rank)
                )
            judgements[tensor.name] = Judged(Shard(along), dims)
        return cls(graph, judgements)

    def of(self, tensor: tf.Tensor) -> Judged:
        """Returns the judgement of a tensor of the graph."""
        waiting = [tensor.op]
        while waiting:
            op = waiting[-1]
            if all(out.name in self.judged for out in op.outputs):
                waiting.pop()
                continue
            missing = [each.op for each in op.inputs if each.name not in self.judged]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            inputs = [self.judged[each.name] for each in op.inputs]
            try:
                results = self._judged(op, inputs)
            except Exception as error:  # An operation that is not proved right is a fault.
                mixed = Mixed(op, f"cannot be judged ({type(error).__name__}: {error})"[:200])
                results = [self._completed(out, mixed, None) for out in op.outputs]
            for out, judged in zip(op.outputs, results, strict=True):
                self.judged.setdefault(out.name, judged)
        return self.judged[tensor.name]

    def _judged(self, op: tf.Operation, inputs: list[Judged]) -> list[Judged]:
        marked = getattr(op.graph, _EXCHANGED, {})
        if op.outputs and op.outputs[0].name in marked:
            (out,) = op.outputs
            placement = self._exchanged(op, marked[out.name], inputs[0].placement)
            return [Judged(placement, self._static(out))]
        if op.type == "Const" and _REPLICA in op.name:
            return [Judged(Mixed(op, OF_REPLICA), ())]
        known = values.values_of(op, inputs)
        if known is not None and not any(isinstance(p, Entries) for p, *_ in inputs):
            return [Judged(_of_value(op, value), value.shape, value) for value in known]
        if op.type in flow.FLOWS:
            return [
                self._completed(out, *judged)
                for out, judged in zip(
                    op.outputs, flow.FLOWS[op.type](self, op, inputs), strict=True
                )
            ]
        placements, dims = rules.apply(op, inputs, self.judged)
        if any(isinstance(p, Entries) for p, *_ in inputs) and op.type in trial_of_operation.ENDS:
            if any(isinstance(p, Entries | Mixed) for p in placements):
                placements = trial_of_operation.tried_with_rows(op, self)
                dims = [None] * len(placements)
        return [
            self._completed(out, placement, size)
            for out, placement, size in zip(op.outputs, placements, dims, strict=True)
        ]

    def _completed(self, out, placement, dims, value=None) -> Judged:
        """Completes a judgement with the graph's static shape, and names unknown sizes."""
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
        """Returns the placement of an exchanged tensor."""
        right, why = ((how,), _JOINED) if isinstance(how, Shard) else _RIGHT.get(how, ((), ""))
        if not why or placement in right or self._is_extreme_of_rows(op.inputs[0], how):
            return Replicate()
        return placement if isinstance(placement, Mixed) else Mixed(op, why)

    def _is_extreme_of_rows(self, tensor, how) -> bool:
        """Returns whether a tensor is the maximum or minimum of a piece's rows."""
        source = tensor.op
        while source.type == "Identity":
            source = source.inputs[0].op
        if source.type not in _EXTREMES.get(how, ()):
            return False
        rows = self.judged[source.inputs[0].name].placement
        mixed = self.judged[tensor.name].placement
        is_rows = isinstance(rows, Shard) and not rows.power and not rows.numbers
        return is_rows and isinstance(mixed, Mixed) and mixed.operation is source

    def _static(self, tensor) -> tuple | None:
        if tensor.shape.rank is None:
            return None
        return tuple(_dim(tensor, axis, *self.names) for axis in range(tensor.shape.rank))


def _of_value(op, value) -> Placement:
    """Returns the placement of known elements."""
    flat = value.ravel().tolist() if value.size <= _MOST_KNOWN else [value.flat[0]]
    if not any(map(depends_on_rows, flat)):
        return Replicate()
    power = power_of_rows(flat[0]) if len(flat) == 1 else None
    if power is None:
        return Mixed(op, "is computed from the number of rows")
    return Replicate(power)


def _may_be_size(out) -> bool:
    """Returns whether a tensor may be a size, or several, which then get names."""
    is_static = out.dtype in (tf.int32, tf.int64) and out.shape.is_fully_defined()
    return is_static and out.shape.num_elements() <= _MOST_SIZES


def _dim(tensor, axis, *decided):
    """Returns the size of an axis, or a name that includes what determines it."""
    size = tensor.shape[axis]
    return size_named((tensor.name, axis, *decided)) if size is None else size
