"""Proves that a call treats each example independently, on the graph of the call.

The call is traced outside of every step, for any number of rows, and judged (`propagation.py`):
outputs must have a row for each example; losses that layers add must be means over the examples or
replicated; states must not depend on single examples; and a metric's state must grow by a sum over
them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.extend import classes_of
from tfparallel.judge.arguments import of_known_size, placeholder_of, type_of_argument
from tfparallel.judge.kept_attributes import attributes_kept, kept_tensors, plain_attributes
from tfparallel.judge.placements import Mixed, Placement, Shard
from tfparallel.judge.propagation import (
    Judge,
    Judged,
    exchanged,
    exchanges_of,
    judged_graph,
)
from tfparallel.judge.random_layers import drawing_layers, draws_in
from tfparallel.judge.rules.draws import draws
from tfparallel.judge.size import depends_on_rows, per_row
from tfparallel.judge.source_line import line_of, place_in
from tfparallel.judge.static_rows import Computation
from tfparallel.judge.variable_updates import (
    IN_FUNCTION,
    MEANS,
    Writes,
    forbidden_writes,
    raw_writes,
)
from tfparallel.seams.keras import layers_in, mask_of
from tfparallel.tracing.graphs import is_in_function
from tfparallel.tracing.trial_trace import traced_apart

_LONGEST = "makes an axis as long as the longest row of the piece"
_OF_NUMBER = (
    "differs where Python knows the number of rows, as it does on one device (read a size with "
    "`keras.ops.shape(x)`, or drop `drop_remainder=True`)"
)


class Fault(NamedTuple):
    """A result that depends on other examples.

    Attributes:
        layer: The layer or model at fault.
        what: "output 0", "a loss added with `add_loss`", "variable 'path'".
        placement: Its placement.
    """

    layer: keras.Layer
    what: str
    placement: Placement

    def __str__(self):
        if not isinstance(self.placement, Mixed):
            return f"{self.what} does not have a row for each example: it is {self.placement}"
        operation, why = self.placement.operation, self.placement.why
        return (
            f"operation {operation.type}{line_of(operation)} {why}, and {self.what} depends on it"
        )


class Proof(NamedTuple):
    """The result of judging a call.

    Attributes:
        fault: The first fault; None if there is none.
        outputs: The judgements of the outputs, flat.
        num_operations: The number of operations judged.
        drawing: The layers that draw other random values in pieces than on one device.
        stored: The layer and attribute of each tensor that a layer keeps.
        counted: The layer and attribute of each value that every call changes: it counts calls,
            and pieces make more calls.
        exchanges: Whether pieces exchange values.
        keeps_number: Whether Python knows the number of rows of the outputs if it knows that of the
            inputs. Not tried for layers of Keras's, which keep it.
    """

    fault: Fault | None
    outputs: list[Judged]
    num_operations: int
    drawing: list[keras.Layer]
    stored: list[tuple[keras.Layer, str]]
    counted: list[tuple[keras.Layer, str]]
    exchanges: bool
    keeps_number: bool = True

    def __str__(self):
        if self.fault is not None:
            return str(self.fault)
        names = [layer.name for layer in self.drawing]
        return "; ".join([
            f"{self.num_operations} operations, for any number of rows: each output has a row for "
            "each example, computed from that example alone",
            *(["pieces exchange batch statistics"] if self.exchanges else []),
            *([f"other random values are drawn by {', '.join(names)}"] if names else []),
        ])  # fmt: skip

    @property
    def rows_per_example(self) -> list[Any]:
        """The number of rows of each output for an example, an int or a `Size`; None if unknown."""
        return [per_row(each.dims[0]) if each.dims else None for each in self.outputs]


class OfLayer(NamedTuple):
    """The part of a layer in a proof.

    Attributes:
        path: The path of the layer in the model.
        layer: The layer.
        num_operations: The number of its operations.
        output: The placement of the last one's output.
        draws: Whether it draws random numbers.
        exchanges: Whether pieces exchange values in it.
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
        call: Its own `__call__`, or a replacement.
        args: The arguments; tensors, or their types, are `(batch, …)`.
        kwargs: The keyword arguments; tensors, or their types, are `(batch, …)`.
        traces: If given, the trace is appended to it.

    Raises:
        Exception: If the call raises it, as a step would.
    """
    leaves = keras.tree.flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if hasattr(leaf, "shape")]
    specs = [type_of_argument(leaves[place]) for place in places]
    trace = _traced(layer, call, (args, kwargs), places, specs)
    if traces is not None:
        traces.append(trace)
    known = [of_known_size(spec, leaves[p]) for spec, p in zip(specs, places, strict=True)]
    if known == specs or not classes_of(layer):
        return _judged(layer, trace)
    of_any, proof = Computation.of(trace.judge.graph), _judged(layer, trace)
    if proof.fault is not None:
        return proof
    whole = _traced(layer, call, (args, kwargs), places, known)
    operation = of_any.otherwise(Computation.of(whole.judge.graph))
    if operation is None:
        return proof._replace(keeps_number=all(map(_has_number, keras.tree.flatten(whole.outputs))))
    at_fault, _ = place_in(layer, operation)
    return proof._replace(fault=Fault(at_fault, "the result", Mixed(operation, _OF_NUMBER)))


def explained(
    layer: keras.Layer, call: Callable, args: tuple, kwargs: dict
) -> tuple[Proof, list[OfLayer]]:
    """Judges a call as `prove` does, and returns each layer's part of the proof."""
    traces: list[_Trace] = []
    proof = prove(layer, call, args, kwargs, traces)
    judge, operations_by_path = traces[-1].judge, {}
    exchanges = set(exchanges_of(judge.graph))
    for op in judge.graph.get_operations():
        part, path = place_in(layer, op)
        if part is not layer and op.type != "Const":
            operations_by_path.setdefault(path, (part, []))[1].append(op)
    return proof, [
        OfLayer(
            path,
            part,
            len(operations),
            judge.of(next(op for op in reversed(operations) if op.outputs).outputs[0]).placement,
            any(draws(op) for op in operations),
            any(op.name in exchanges for op in operations),
        )
        for path, (part, operations) in operations_by_path.items()
        if any(op.outputs for op in operations)
    ]


def _has_number(output) -> bool:
    """Returns whether Python knows the number of rows of an output, if it has rows."""
    shape = tf.TensorShape(getattr(output, "shape", ()))
    return shape.rank == 0 or (shape.rank is not None and shape[0] is not None)


class _Trace(NamedTuple):
    """A traced call.

    Attributes:
        judge: The judge of its graph.
        outputs: Its outputs.
        scope: The scope with its writes and added losses.
        sums: The values before the call of variables that add up rows, by variable id.
        stored: The layers and attributes that hold a tensor of the trace.
        counted: The layers and attributes that each call changes.
    """

    judge: Judge
    outputs: Any
    scope: Writes
    sums: dict[int, tf.Tensor]
    stored: list[tuple[keras.Layer, str]]
    counted: list[tuple[keras.Layer, str]]


class _JudgedReplica(tf.distribute.ReplicaContext):
    """The replica in which a call is judged; its exchanges are marked for the judge."""

    def all_reduce(self, reduce_op, value, options=None):
        how = "sum" if str(reduce_op).upper().endswith("SUM") else "mean"
        return tf.nest.map_structure(lambda each: exchanged(each, how), value)

    def all_gather(self, value, axis, options=None):
        return tf.nest.map_structure(lambda each: exchanged(each, "gather", axis), value)


def _traced(layer, call, given_args, places, specs) -> _Trace:
    graph = judged_graph(layer.name)
    strategy, in_replica = getattr(layer, "_strategy", None), contextlib.nullcontext()
    if strategy is not None and strategy.workers is None:
        # A layer that asks for its replica is detected by the name of the answer.
        in_replica = _JudgedReplica(strategy, 0)
    with attributes_kept(layer) as stored, in_replica:
        before = plain_attributes(layer)
        with graph.as_default(), traced_apart():
            placeholders, (args, kwargs) = _placeholders(given_args, places, specs)
            sums = [(v, tf.compat.v1.placeholder(v.dtype, v.shape)) for v in _sums(layer)]
            with (scope := Writes(sums)):
                outputs = call(*args, **kwargs)
        stored.extend(kept_tensors(layers_in(layer)))
        counted = []
        if (after := plain_attributes(layer)) != before:
            # An attribute that is set once stays equal; a counter changes in the next call.
            with (
                judged_graph(layer.name).as_default(),
                traced_apart(),
                keras.StatelessScope(collect_losses=True),
            ):
                _, (args, kwargs) = _placeholders(given_args, places, specs)
                call(*args, **kwargs)
            again = plain_attributes(layer)
            counted = [key for key, value in again.items() if after.get(key) != value]
    judged = {name: each for _, by_name in placeholders for name, each in by_name.items()}
    judged |= {old.name: Judged(_of_metric(v, old.op), None) for v, old in sums}
    roots = [value for value, _ in placeholders if not isinstance(value, tf.Tensor)]
    return _Trace(
        Judge(graph, judged, roots=roots),
        outputs,
        scope,
        {id(v): placeholder for v, placeholder in sums},
        stored,
        [(part, name) for part in layers_in(layer) for key, name in counted if key == id(part)],
    )


def _placeholders(given_args, places, specs) -> tuple[list, tuple]:
    """Returns placeholders for the tensors of a call, and its arguments with them."""
    leaves, placeholders = keras.tree.flatten(given_args), [placeholder_of(spec) for spec in specs]
    for place, (tensor, _) in zip(places, placeholders, strict=True):
        leaves[place] = tensor
    return placeholders, keras.tree.pack_sequence_as(given_args, leaves)


def _judged(layer, trace: _Trace) -> Proof:
    judge, outputs, scope, sums, stored, counted = trace
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
        _fault(layer, "a loss added with `add_loss`", judge.of(loss).placement, loss)
        for loss in added
        if judge.of(loss).placement not in MEANS
    ]
    faults += [_fault(layer, *each) for each in forbidden_writes(judge, scope, layer, sums)]
    faults += _dropped_in_functions(layer, judge.graph)
    for operation, placement in raw_writes(judge):
        faults.append(
            _fault(layer, f"variable '{operation.inputs[0].name}'", placement, operation.inputs[1])
        )
    outputs = [each for each in judged if each is not None]
    fault, exchanges = faults[0] if faults else None, bool(exchanges_of(judge.graph))
    number, drawing = len(judge.graph.get_operations()), drawing_layers(layer, judge)
    return Proof(fault, outputs, number, drawing, stored, counted, exchanges)


def _dropped_in_functions(layer, graph) -> Iterator[Fault]:
    """Yields faults for draws in a function of a layer that holds a `Dropout`.

    The function may have been traced before the judged call, when its layers had other names, so
    the layer that draws is unknown.
    """
    for op, drawn, _ in draws_in(layer, graph):
        if is_in_function(drawn.graph, graph):
            for part in layers_in(place_in(layer, op)[0]):
                if isinstance(part, keras.layers.Dropout) and part.rate:
                    yield Fault(part, "its mask", Mixed(drawn, f"draws {IN_FUNCTION}"))


def _sums(layer) -> list[keras.Variable]:
    """Returns the variables of metrics, which add up rows."""
    parts = layers_in(layer)
    variables = [v for part in parts for metric in part.metrics for v in metric.variables]
    return list({id(v): v for v in variables}.values())


def _of_metric(variable, operation) -> Mixed:
    """Returns the placement of a metric's state before the call."""
    why = f"is the state '{variable.path}' of a metric, which is not summed over the replicas yet"
    return Mixed(operation, why)


def _fault(layer, what, placement, tensor) -> Fault:
    operation = placement.operation if isinstance(placement, Mixed) else tensor.op
    return Fault(place_in(layer, operation)[0], what, placement)
