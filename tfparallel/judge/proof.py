"""The proof that a call treats each example by itself, on the graph of the call.

The call is traced with rows of any number, outside of every step, and judged (`propagation.py`):
outputs must hold a row for each example, losses that layers add must be means over the examples or
the same of all, states must not depend on single examples, and a metric's must grow by a sum over
them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.judge.arguments import placeholder_of, type_of_argument
from tfparallel.judge.growth import SUMS, growth_of
from tfparallel.judge.kept_attributes import attributes_kept, kept_tensors, plain_attributes
from tfparallel.judge.placements import Mixed, Placement, Replicate, Shard, Sum
from tfparallel.judge.propagation import (
    Judge,
    Judged,
    exchanged,
    exchanges_of,
    judged_graph,
    notes_of,
)
from tfparallel.judge.rules.draws import draws
from tfparallel.judge.size import ROWS, depends_on_rows
from tfparallel.judge.where import line_of, place_in
from tfparallel.seams.keras import layers_in, mask_of, seed_generators_of
from tfparallel.tracing.apart import traced_apart
from tfparallel.tracing.graphs import (
    called_by,
    is_in_function,
    is_within,
    with_inner,
    writes_state,
)

__all__ = ["Fault", "OfLayer", "Proof", "explained", "prove"]

_IN_FUNCTION = (
    "inside a `tf.function` of the layer, whose trace TensorFlow reuses for the other pieces "
    "(remove the decorator: Keras compiles the whole step)"
)
_LONGEST = "makes an axis that is as long as the longest row of the piece"
_MEANS = (Replicate(), Sum(-1))


class Fault(NamedTuple):
    """What depends on other examples.

    Attributes:
        layer: In which layer, or model.
        what: "output 0", "a loss that it adds", "variable 'path'".
        placement: Where the rows are in it.
    """

    layer: keras.Layer
    what: str
    placement: Placement

    def __str__(self):
        if not isinstance(self.placement, Mixed):
            return f"{self.what} does not have a row for each example, but is {self.placement}"
        operation, why = self.placement.operation, self.placement.why
        return (
            f"operation {operation.type}{line_of(operation)} {why}, and {self.what} depends on it"
        )


class Proof(NamedTuple):
    """What was found out about a call.

    Attributes:
        fault: What is at fault first; None where nothing is.
        outputs: What is known of the outputs, flat.
        rows: Of layers that asked, which axis of their input holds the rows; None for none.
        num_operations: How many operations were looked at.
        drawing: The layers that draw random numbers; without `Dropout`, which draws for a row what
            it would draw for it in the whole batch.
        kept: Of each tensor that a layer keeps in an attribute: the layer, and the attribute.
        counted: Of each attribute that every call changes, likewise: a number of calls, which
            are more in pieces.
        exchanges: Whether pieces exchange what they know.
    """

    fault: Fault | None
    outputs: list[Judged]
    rows: list[tuple[keras.Layer, int | None]]
    num_operations: int
    drawing: list[keras.Layer]
    kept: list[tuple[keras.Layer, str]]
    counted: list[tuple[keras.Layer, str]]
    exchanges: bool

    def __str__(self):
        if self.fault is not None:
            return str(self.fault)
        names = [layer.name for layer in self.drawing]
        return "; ".join([
            f"{self.num_operations} operations, of any number of rows: each output has a row for "
            "each example, made of that example alone",
            *(["pieces exchange batch statistics"] if self.exchanges else []),
            *([f"random values are drawn by {', '.join(names)}"] if names else []),
        ])  # fmt: skip

    @property
    def has_rows(self) -> bool:
        """Whether every output has one row for each example."""
        return all(
            each.placement == Shard(0) and each.dims is not None and each.dims[0] == ROWS
            for each in self.outputs
        )


class OfLayer(NamedTuple):
    """What a proof says of a layer.

    Attributes:
        path: Of the layer, in the model.
        layer: The layer.
        num_operations: How many operations it made.
        output: The placement of what the last of them made.
        draws: Whether it draws random numbers.
        exchanges: Whether pieces exchange what they know in it.
    """

    path: str
    layer: keras.Layer
    num_operations: int
    output: Placement
    draws: bool
    exchanges: bool


def prove(
    layer: keras.Layer, call: Callable, args: tuple, kwargs: dict, traces: list | None = None
) -> Proof:
    """Judges a call of a layer.

    Args:
        layer: The built layer, or model.
        call: Its own `__call__`, or what is called in its place.
        args: What it is called with, tensors of shape `(batch, …)` or their types among it.
        kwargs: Likewise.
        traces: If given, the trace is added to it.

    Raises:
        Exception: What the call raises, as a step would.
    """
    leaves = keras.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if hasattr(leaf, "shape")]
    specs = [type_of_argument(leaves[place]) for place in places]
    trace = _traced(layer, call, (args, kwargs), places, specs)
    if traces is not None:
        traces.append(trace)
    return _judged(layer, trace)


def explained(
    layer: keras.Layer, call: Callable, args: tuple, kwargs: dict
) -> tuple[Proof, list[OfLayer]]:
    """Judges a call as `prove` does, and says what each layer's part of it is."""
    traces: list[_Trace] = []
    proof = prove(layer, call, args, kwargs, traces)
    judge, found = traces[-1].judge, {}
    exchanges = set(exchanges_of(judge.graph))
    for op in judge.graph.get_operations():
        own, path = place_in(layer, op)
        if own is not layer and op.type != "Const":
            found.setdefault(path, (own, []))[1].append(op)
    return proof, [
        OfLayer(
            path,
            own,
            len(operations),
            judge.of(next(op for op in reversed(operations) if op.outputs).outputs[0]).placement,
            any(draws(op) for op in operations),
            any(op.name in exchanges for op in operations),
        )
        for path, (own, operations) in found.items()
        if any(op.outputs for op in operations)
    ]


class _Trace(NamedTuple):
    """A call, traced.

    Attributes:
        judge: Of its graph.
        outputs: What it returned.
        scope: What it wrote, and added to the loss.
        sums: By the ids of variables to which rows are added, what they were before.
        kept: The attributes that hold a tensor of the trace, with their layers.
        counted: Those that each call changes, likewise.
    """

    judge: Judge
    outputs: Any
    scope: keras.StatelessScope
    sums: dict[int, tf.Tensor]
    kept: list[tuple[keras.Layer, str]]
    counted: list[tuple[keras.Layer, str]]


class _JudgedReplica(tf.distribute.ReplicaContext):
    """A replica in which a call is judged; what it exchanges with others, all of them know."""

    def all_reduce(self, reduce_op, value, options=None):
        how = "sum" if str(reduce_op).upper().endswith("SUM") else "mean"
        return tf.nest.map_structure(lambda each: exchanged(each, how), value)

    def all_gather(self, value, axis, options=None):
        return tf.nest.map_structure(lambda each: exchanged(each, "gather", axis), value)


def _traced(layer, call, given_args, places, specs) -> _Trace:
    graph = judged_graph(layer.name)
    strategy, in_replica = getattr(layer, "_strategy", None), contextlib.nullcontext()
    if strategy is not None and strategy.workers is None:
        # A layer that asks which replica it is in is found out by the name of what it is told.
        in_replica = _JudgedReplica(strategy, 0)
    with attributes_kept(layer) as kept, in_replica:
        before = plain_attributes(layer)
        with graph.as_default(), traced_apart():
            given, (args, kwargs) = _placeholders(given_args, places, specs)
            sums = [(v, tf.compat.v1.placeholder(v.dtype, v.shape)) for v in _sums(layer)]
            with (scope := keras.StatelessScope(sums, collect_losses=True)):
                outputs = call(*args, **kwargs)
        kept.extend(kept_tensors(layer))
        counted = []
        if (after := plain_attributes(layer)) != before:
            # What is set, is set once; what counts calls is something else after the next.
            with (
                judged_graph(layer.name).as_default(),
                traced_apart(),
                keras.StatelessScope(collect_losses=True),
            ):
                _, (args, kwargs) = _placeholders(given_args, places, specs)
                call(*args, **kwargs)
            again = plain_attributes(layer)
            counted = [key for key, value in again.items() if after.get(key) != value]
    known = {name: each for _, own in given for name, each in own.items()}
    roots = [own for own, _ in given if not isinstance(own, tf.Tensor)]
    return _Trace(
        Judge(graph, known, roots=roots),
        outputs,
        scope,
        {id(v): own for v, own in sums},
        kept,
        [(part, name) for part in layers_in(layer) for own, name in counted if own == id(part)],
    )


def _placeholders(given_args, places, specs) -> tuple[list, tuple]:
    """What stands for the tensors of a call, and its arguments with them."""
    leaves, given = keras.tree.flatten(given_args), [placeholder_of(spec) for spec in specs]
    for place, (tensor, _) in zip(places, given, strict=True):
        leaves[place] = tensor
    return given, keras.tree.pack_sequence_as(given_args, leaves)


def _judged(layer, trace: _Trace) -> Proof:
    judge, outputs, scope, sums, kept, counted = trace
    flat = [tf.convert_to_tensor(each) if each is not None else None
            for each in keras.tree.flatten(outputs)]  # fmt: skip
    judged = [None if each is None else judge.of(each) for each in flat]
    faults = [
        _fault(layer, f"output {i}", each.placement, flat[i])
        for i, each in enumerate(judged)
        if each is not None and each.placement != Shard(0)
    ]
    faults += [
        Fault(place_in(layer, flat[i].op)[0], f"output {i}", Mixed(flat[i].op, _LONGEST))
        for i, each in enumerate(judged)
        if each is not None and any(map(depends_on_rows, (each.dims or ())[1:]))
    ]
    for i, each in enumerate(flat):
        mask = mask_of(each)
        if mask is not None and judge.of(mask).placement != Shard(0):
            faults.append(_fault(layer, f"the mask of output {i}", judge.of(mask).placement, mask))
    added = [tf.convert_to_tensor(loss) for loss in scope.losses]
    faults += [
        _fault(layer, "a loss that it adds", judge.of(loss).placement, loss)
        for loss in added
        if judge.of(loss).placement not in _MEANS
    ]
    faults += [_fault(layer, *each) for each in _written(judge, scope, layer, sums)]
    faults += _dropped_in_functions(layer, judge.graph)
    for operation, placement in _raw_writes(judge):
        faults.append(
            _fault(layer, f"variable '{operation.inputs[0].name}'", placement, operation.inputs[1])
        )
    rows = []
    for own, tensor in notes_of(judge.graph):
        placement = judge.of(tensor).placement
        rows.append((own, placement.axis if isinstance(placement, Shard) else None))
    outputs = [each for each in judged if each is not None]
    fault, exchanges = faults[0] if faults else None, bool(exchanges_of(judge.graph))
    number, drawing = len(judge.graph.get_operations()), _drawing(layer, judge.graph)
    return Proof(fault, outputs, rows, number, drawing, kept, counted, exchanges)


def _drawing(layer, graph) -> list[keras.Layer]:
    found = {}
    for op, _, innermost in _draws(layer, graph):
        if not isinstance(innermost, keras.layers.Dropout):
            own, _ = place_in(layer, op, of_models=True)
            found[id(own)] = own
    return list(found.values())


def _dropped_in_functions(layer, graph) -> Iterator[Fault]:
    """Draws in a function of a layer that holds a `Dropout`.

    The function may have been traced before the call that is judged, when its layers had other
    names, so which of them draws is not known.
    """
    for op, drawn, _ in _draws(layer, graph):
        if is_in_function(drawn.graph, graph):
            for part in layers_in(place_in(layer, op)[0]):
                if isinstance(part, keras.layers.Dropout) and part.rate:
                    yield Fault(part, "its mask", Mixed(drawn, f"draws {_IN_FUNCTION}"))


def _draws(layer, graph) -> Iterator[tuple[tf.Operation, tf.Operation, keras.Layer]]:
    """Operations of the graph, those that draw in them, and the layers whose these are."""
    for op in graph.get_operations():
        for drawn in filter(draws, with_inner([op])):
            # In a function the scopes begin anew.
            innermost, _ = place_in(place_in(layer, op)[0], drawn)
            yield op, drawn, innermost


def _written(judge, scope, layer, sums) -> Iterator[tuple[str, Placement, tf.Tensor]]:
    """What the call leaves in variables, of what it must not."""
    parts = layers_in(layer)
    seeds = {id(own.state) for part in parts for own in seed_generators_of(part)}
    for part in parts:
        own = [*part.variables, *(v for metric in part.metrics for v in metric.variables)]
        for variable in {id(v): v for v in own}.values():
            value = scope.get_current_value(variable)
            if value is None or not tf.is_symbolic_tensor(value):
                continue
            if value.graph is not judge.graph:
                if not is_within(value.graph, judge.graph):
                    continue
                if id(variable) not in seeds:
                    why = "writes a variable in a function, a branch or a loop"
                elif is_in_function(value.graph, judge.graph):
                    why = f"draws {_IN_FUNCTION}"
                else:
                    continue
                yield f"variable '{variable.path}'", Mixed(value.op, why), value
                continue
            if value is sums.get(id(variable)):
                continue
            if id(variable) in sums:
                placement = growth_of(judge, value, sums[id(variable)], sums.values())
                allowed = SUMS
            else:
                is_float = variable.dtype.startswith(("float", "bfloat"))
                placement = judge.of(value).placement
                allowed = _MEANS if is_float else (Replicate(),)
            if placement not in allowed:
                yield f"variable '{variable.path}'", placement, value


def _raw_writes(judge) -> Iterator[tuple[tf.Operation, Placement]]:
    """Writes of variables that Keras does not know, of what is not the same for all pieces."""
    for op in judge.graph.get_operations():
        if writes_state(op):
            for each in op.inputs[1:]:
                if judge.of(each).placement != Replicate():
                    yield op, judge.of(each).placement
        for graph in called_by(op):
            inner = next(filter(writes_state, with_inner(graph.get_operations())), None)
            if inner is not None:
                yield op, Mixed(inner, "writes a variable in a function, a branch or a loop")


def _sums(layer) -> list[keras.Variable]:
    """The variables of metrics, to which rows are added."""
    parts = layers_in(layer)
    found = [v for part in parts for metric in part.metrics for v in metric.variables]
    return list({id(v): v for v in found}.values())


def _fault(layer, what, placement, tensor) -> Fault:
    operation = placement.operation if isinstance(placement, Mixed) else tensor.op
    return Fault(place_in(layer, operation)[0], what, placement)
