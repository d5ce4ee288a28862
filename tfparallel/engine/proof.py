"""The proof that a call treats each example by itself, on the graph of the call.

The call is traced with rows of any number, outside of every step, and judged (`judge.py`): outputs
must hold a row for each example, losses that layers add must be means over the examples or the same
of all, states must not depend on single examples, and a metric's must grow by a sum over them.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfparallel.engine.judge import Judge, Judged, exchanges_of, is_judged, judged_graph, notes_of
from tfparallel.engine.placements import Entries, Mixed, Placement, Replicate, Shard, Sum
from tfparallel.engine.rules.draws import draws
from tfparallel.engine.size import ROWS
from tfparallel.engine.where import line_of, place_in
from tfparallel.seams.tensorflow import graph_of

__all__ = ["Fault", "OfLayer", "Proof", "explained", "prove"]

# c·B is a sum over the rows, and c a mean.
_MEANS, _SUMS = (Replicate(), Sum(-1)), (Replicate(1), Sum())
_HOLD_FUNCTIONS: dict[str, bool] = {}  # By an operation's type.
_DEPTH = 3  # Of lists in lists, in which a tensor may be kept.
_WRITES = (
    *("AssignVariable", "AssignAdd", "AssignSub", "ResourceScatter", "ResourceApply"),
    *("ResourceSparse", "ResourceStridedSliceAssign", "LookupTableInsert", "LookupTableImport"),
)


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
        kept: Of each tensor that a layer keeps in an attribute: the layer, the attribute, and
            whether it is read behind an exchange between the pieces.
    """

    fault: Fault | None
    outputs: list[Judged]
    rows: list[tuple[keras.Layer, int | None]]
    num_operations: int
    kept: list[tuple[keras.Layer, str, bool]]

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
    specs = [_spec(leaves[place]) for place in places]
    trace = _traced(layer, call, (args, kwargs), places, specs)
    if trace.kept and exchanges_of(trace.judge.graph):
        with _reads_noted(trace.kept) as late:
            trace = _traced(layer, call, (args, kwargs), places, specs)
        trace = trace._replace(late=late)
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
        sums: By the ids of variables to which rows are added, the zeros that they began with.
        kept: The attributes that hold a tensor of the trace, with their layers.
        late: Those that were read behind an exchange which came after they were set.
    """

    judge: Judge
    outputs: Any
    scope: keras.StatelessScope
    sums: dict[int, tf.Tensor]
    kept: list[tuple[keras.Layer, str]]
    late: list[tuple[keras.Layer, str]]


def _traced(layer, call, given_args, places, specs) -> _Trace:
    graph = judged_graph(layer.name)
    leaves = keras.tree.flatten(given_args)
    strategy, in_replica = getattr(layer, "_strategy", None), contextlib.nullcontext()
    if strategy is not None and strategy.workers is None:
        # A layer that asks which replica it is in is found out by the name of what it is told.
        in_replica = tf.distribute.ReplicaContext(strategy, 0)
    with graph.as_default():
        given = [_placeholders(spec) for spec in specs]
        for place, (tensor, _) in zip(places, given, strict=True):
            leaves[place] = tensor
        args, kwargs = keras.tree.pack_sequence_as(given_args, leaves)
        zeros = [(v, tf.zeros(v.shape, v.dtype)) for v in _sums(layer)]
        scope = keras.StatelessScope(zeros, collect_losses=True)
        with _attributes_kept(layer) as kept, in_replica, scope:
            outputs = call(*args, **kwargs)
            kept.extend(_kept_tensors(layer))
    known = {name: each for _, own in given for name, each in own.items()}
    roots = [own for own, _ in given if not isinstance(own, tf.Tensor)]
    return _Trace(
        Judge(graph, known, roots=roots),
        outputs,
        scope,
        {id(v): zero for v, zero in zeros},
        kept,
        [],
    )


@contextlib.contextmanager
def _reads_noted(kept) -> Iterator[list]:
    """Notes which of the attributes are read behind an exchange that came after they were set."""
    late, classes = [], [(part, type(part)) for part, _ in kept]
    for part, name in kept:
        part.__class__ = type(type(part).__name__, (_noting(type(part), part, name, late),), {})
    try:
        yield late
    finally:
        for part, cls in reversed(classes):
            part.__class__ = cls


def _noting(cls, part, name, late):
    """A class of which the attribute notes when it is set and read."""
    at = {}

    def number() -> int:
        return len(exchanges_of(tf.compat.v1.get_default_graph()))

    def get(self):
        if name in at and number() > at[name]:
            late.append((part, name))
        return vars(self)[name]

    def put(self, value):
        at[name] = number()
        vars(self)[name] = value

    return type(cls.__name__, (cls,), {name: property(get, put)})


@contextlib.contextmanager
def _attributes_kept(layer) -> Iterator[list]:
    """Gives the layers back the attributes that they had: a judge changes nothing."""
    before = [(vars(part), dict(vars(part))) for part in layer._flatten_layers()]
    lists = [
        (own, list(own))
        for _, attributes in before
        for own in attributes.values()
        if isinstance(own, list)
    ]
    try:
        yield []
    finally:
        for own, elements in lists:
            if len(own) != len(elements) or any(map(operator.is_not, own, elements)):
                list.__setitem__(own, slice(None), elements)
        for attributes, old in before:
            for name in set(attributes) - set(old):
                del attributes[name]
            for name, value in old.items():
                if attributes.get(name) is not value:
                    attributes[name] = value


def _kept_tensors(layer) -> Iterator[tuple[keras.Layer, str]]:
    """The tensors of the trace that layers keep in attributes, and others may read."""
    for part in layer._flatten_layers():
        for name, value in vars(part).items():
            for leaf in _leaves(value, _DEPTH):
                if isinstance(leaf, tf.Tensor) and is_judged(leaf):
                    yield part, name
                    break


def _leaves(value, depth) -> Iterator:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        yield value
    elif depth:
        for each in value:
            yield from _leaves(each, depth - 1)


def _judged(layer, trace: _Trace) -> Proof:
    judge, outputs, scope, sums, kept, late = trace
    flat = [tf.convert_to_tensor(each) if each is not None else None
            for each in keras.tree.flatten(outputs)]  # fmt: skip
    judged = [None if each is None else judge.of(each) for each in flat]
    faults = [
        _fault(layer, f"output {i}", each.placement, flat[i])
        for i, each in enumerate(judged)
        if each is not None and each.placement != Shard(0)
    ]
    for i, each in enumerate(flat):
        mask = getattr(each, "_keras_mask", None)
        if mask is not None and judge.of(mask).placement != Shard(0):
            faults.append(_fault(layer, f"the mask of output {i}", judge.of(mask).placement, mask))
    added = [tf.convert_to_tensor(loss) for loss in scope.losses]
    faults += [
        _fault(layer, "a loss that it adds", judge.of(loss).placement, loss)
        for loss in added
        if judge.of(loss).placement not in _MEANS
    ]
    faults += [_fault(layer, *each) for each in _written(judge, scope, layer, sums)]
    for operation, placement in _raw_writes(judge):
        faults.append(
            _fault(layer, f"variable '{operation.inputs[0].name}'", placement, operation.inputs[1])
        )
    rows = []
    for own, tensor in notes_of(judge.graph):
        placement = judge.of(tensor).placement
        rows.append((own, placement.axis if isinstance(placement, Shard) else None))
    outputs = [each for each in judged if each is not None]
    held = [(own, name, (own, name) in late) for own, name in kept]
    fault = faults[0] if faults else None
    return Proof(fault, outputs, rows, len(judge.graph.get_operations()), held)


def _written(judge, scope, layer, sums) -> Iterator[tuple[str, Placement, tf.Tensor]]:
    """What the call leaves in variables, of what it must not."""
    for part in layer._flatten_layers():
        own = [*part.variables, *(v for metric in part.metrics for v in metric.variables)]
        for variable in {id(v): v for v in own}.values():
            value = scope.get_current_value(variable)
            if value is None or not tf.is_symbolic_tensor(value) or value.graph is not judge.graph:
                continue
            if value is sums.get(id(variable)):
                continue
            placement = judge.of(value).placement
            if id(variable) in sums:
                allowed = (*_SUMS, *([Replicate()] if judge.of(value).is_zero else []))
            elif variable.dtype.startswith(("float", "bfloat")):
                allowed = _MEANS
            else:
                allowed = (Replicate(),)
            if placement not in allowed:
                yield f"variable '{variable.path}'", placement, value


def _raw_writes(judge) -> Iterator[tuple[tf.Operation, Placement]]:
    """Writes of variables that Keras does not know, of what is not the same for all pieces."""
    for op in judge.graph.get_operations():
        if op.type.startswith(_WRITES):
            for each in op.inputs[1:]:
                if judge.of(each).placement != Replicate():
                    yield op, judge.of(each).placement
        for inner in _called_by(op):
            if inner.type.startswith(_WRITES):
                yield op, Mixed(inner, "writes a variable in a function, a branch or a loop")


def _called_by(operation) -> Iterator[tf.Operation]:
    """The operations of all functions that an operation calls."""
    if operation.type not in _HOLD_FUNCTIONS:
        kinds = {attribute.type for attribute in operation.op_def.attr}
        _HOLD_FUNCTIONS[operation.type] = not kinds.isdisjoint(("func", "list(func)"))
    if not _HOLD_FUNCTIONS[operation.type]:
        return
    for attribute in operation.op_def.attr:
        if attribute.type not in ("func", "list(func)"):
            continue
        value = operation.get_attr(attribute.name)
        for called in value if attribute.type == "list(func)" else [value]:
            graph = graph_of(operation.graph, called.name)
            for inner in () if graph is None else graph.get_operations():
                yield inner
                yield from _called_by(inner)


def _sums(layer) -> list[keras.Variable]:
    """The variables of metrics, to which rows are added."""
    parts = layer._flatten_layers()
    found = [v for part in parts for metric in part.metrics for v in metric.variables]
    return list({id(v): v for v in found}.values())


def _fault(layer, what, placement, tensor) -> Fault:
    operation = placement.operation if isinstance(placement, Mixed) else tensor.op
    return Fault(place_in(layer, operation)[0], what, placement)


def _spec(leaf) -> tf.TypeSpec:
    """The type of a leaf, for batches of any size."""
    shape = tf.TensorShape(leaf.shape)
    if isinstance(leaf, tf.SparseTensor | tf.SparseTensorSpec):
        return tf.SparseTensorSpec([None, *shape[1:]], leaf.dtype)
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensorSpec(
            [None, *shape[1:]], leaf.dtype, leaf.ragged_rank, leaf.row_splits.dtype
        )
    if isinstance(leaf, tf.RaggedTensorSpec):
        return leaf
    return tf.TensorSpec([None, *shape[1:]] if shape.rank else shape, leaf.dtype)


def _placeholders(spec) -> tuple[Any, dict[str, Judged]]:
    """A value of a type, and what is known of its tensors, by name."""
    value = (
        tf.nest.map_structure(
            lambda own: tf.compat.v1.placeholder(own.dtype, own.shape), spec._component_specs
        )
        if not isinstance(spec, tf.TensorSpec)
        else None
    )
    if value is None:
        tensor = tf.compat.v1.placeholder(spec.dtype, spec.shape)
        if tensor.shape.rank == 0:
            return tensor, {tensor.name: Judged(Replicate(), ())}
        return tensor, Judge.of_rows(tensor.graph, [tensor]).known
    composed = spec._from_components(value)
    if isinstance(composed, tf.SparseTensor):
        return composed, _of_sparse(composed)
    return composed, _of_ragged(composed)


def _of_sparse(tensor) -> dict[str, Judged]:
    sizes = np.empty(tensor.shape.rank, object)
    sizes[:] = [ROWS, *tensor.shape[1:]]
    known = {
        tensor.indices.name: Judged(Entries("indices"), None),
        tensor.values.name: Judged(Entries("values"), None),
    }
    if None not in tensor.shape[1:].as_list():
        known[tensor.dense_shape.name] = Judged(Entries("sizes"), None, sizes)
    else:
        known[tensor.dense_shape.name] = Judged(Entries("sizes"), None)
    return known


def _of_ragged(tensor) -> dict[str, Judged]:
    known = {tensor.flat_values.name: Judged(Entries("values"), None)}
    known |= {splits.name: Judged(Entries("splits"), None) for splits in tensor.nested_row_splits}
    return known
