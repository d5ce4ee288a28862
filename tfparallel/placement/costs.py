"""What each layer costs while it trains: bytes that it holds, and seconds.

Bytes come from shapes, and from a trace of the step, which runs nothing: what the forward pass
makes and the backward pass reads is held in between. Seconds are measured, layer by layer, on a
copy that is gone afterwards. So the model needs no storage for either.
"""

import contextlib
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.placement.audit import noting, recording
from tfparallel.placement.graph import layers_in_order

__all__ = ["LayerCost", "bytes_of", "layer_costs", "measured_seconds"]

_SLOTS = 2  # Of an optimizer that is not known yet: as many as Adam's.
# They hand on what they are given: no memory of their own.
_ALIASES = {"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient"}
_READ_NO_VALUE = {"Shape", "ShapeN", "Size", "Rank"}
_NOT_HELD = {"Const", "Placeholder", "ReadVariableOp", "Shape", "StridedSlice"}
_LEAST_RUNS, _LEAST_SECONDS, _MOST_RUNS = 5, 0.05, 50


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """A layer's share of a step.

    Attributes:
        layer: Its name.
        parameter_bytes: Of all its variables.
        gradient_bytes: Of those that are trained.
        slot_bytes: Of the optimizer's variables for them.
        activation_bytes: What is made forward and read backward, for one batch.
        seconds: Forward and backward, for one batch; 0 where it was not measured.
    """

    layer: str
    parameter_bytes: int
    gradient_bytes: int
    slot_bytes: int
    activation_bytes: int
    seconds: float = 0.0

    @property
    def held_bytes(self) -> int:
        """All that the layer holds on its device."""
        return (
            self.parameter_bytes + self.gradient_bytes + self.slot_bytes + self.activation_bytes
        )


def layer_costs(
    model: keras.Model,
    batch_size: int,
    *,
    optimizer: keras.Optimizer | None = None,
    measure: bool = False,
) -> list[LayerCost]:
    """Tells what each layer costs, in topological order.

    Args:
        model: A functional or Sequential model, with or without storage.
        batch_size: The examples of a batch. Another axis of unknown length counts as 1.
        optimizer: Tells the slots, and its update is measured too. None: two slots are assumed
            for each trained weight, and the update is left out.
        measure: Whether to measure the seconds too.
    """
    kept = _kept_bytes(model, batch_size)
    seconds = measured_seconds(model, batch_size, optimizer) if measure else {}

    @functools.cache
    def slots(shape, dtype):
        proxy = keras.KerasTensor(shape, dtype)
        return _SLOTS * bytes_of(proxy) if optimizer is None else _slot_bytes(optimizer, proxy)

    costs = []
    for layer in layers_in_order(model):
        trained = sum(map(bytes_of, layer.trainable_variables))
        costs.append(
            LayerCost(
                layer.name,
                sum(map(bytes_of, layer.variables)),
                trained,
                sum(slots(tuple(v.shape), str(v.dtype)) for v in layer.trainable_variables),
                kept.get(layer.name, 0),
                seconds.get(layer.name, 0.0),
            )
        )
    return costs


def measured_seconds(
    model: keras.Model,
    batch_size: int,
    optimizer: keras.Optimizer | None = None,
    *,
    backward: bool = True,
) -> dict[str, float]:
    """Measures each layer's forward and backward pass, and its update by an optimizer like this.

    With `backward=False` it is the forward pass alone.

    Each layer runs alone, on a copy with weights and inputs of its own; layers of one configuration
    and one input shape are measured once. One that is called twice in the model counts twice.

    Returns:
        The median seconds for a batch, by the layer's name.
    """
    overhead = _median_seconds(tf.function(lambda: tf.zeros(())))
    known: dict[str, float] = {}
    found = {}
    for layer in layers_in_order(model):
        nodes = _nodes_of(layer, model)
        key = _kind(layer, nodes[0])
        if key not in known:
            alone = keras.Model(*nodes[0])
            known[key] = max(0.0, _seconds_alone(alone, batch_size, optimizer, backward) - overhead)
        found[layer.name] = known[key] * len(nodes)
    return found


def bytes_of(variable: keras.Variable) -> int:
    """Returns how many bytes a variable holds."""
    return _num_bytes(variable.shape, variable.dtype)


def _slot_bytes(optimizer, variable) -> int:
    """Makes an optimizer's slots for a weight of this shape, and counts them."""
    own = _copy_of(optimizer)
    before = {id(v) for v in own.variables}
    own.build([keras.Variable(tf.zeros(variable.shape, variable.dtype), dtype=variable.dtype)])
    return sum(bytes_of(v) for v in own.variables if id(v) not in before)


def _copy_of(optimizer):
    return keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))


def _kept_bytes(model, batch_size) -> dict[str, int]:
    """Traces the step, and adds up what waits for the backward pass, by layer."""
    kept: dict[str, int] = {}
    variables = model.variables

    @tf.function(autograph=False)
    def step(inputs, values):
        with (
            keras.StatelessScope(list(zip(variables, values, strict=True))),
            recording() as trace,
            _noted(layers_in_order(model)),
        ):
            outputs = model(inputs, training=True)
            trained = {id(v) for v in model.trainable_variables}
            total = tf.add_n(
                [tf.reduce_sum(tf.cast(o, "float32")) for o in keras.tree.flatten(outputs)]
            )
            graph = tf.compat.v1.get_default_graph()
            forward = {op.name for op in graph.get_operations()}
            weights = [w for v, w in zip(variables, values, strict=True) if id(v) in trained]
            if weights:
                tf.compat.v1.gradients(total, weights)
        for tensor in _read_backward(graph, forward):
            owner = trace.owner(tensor.op)
            # A loop's lists tell no size: what a recurrent layer keeps of each turn is not seen.
            is_list = tensor.dtype in (tf.variant, tf.resource)
            if owner is not None and not is_list and tensor.shape.is_fully_defined():
                kept[owner] = kept.get(owner, 0) + _num_bytes(tensor.shape, tensor.dtype.name)

    step.get_concrete_function(
        _specs(_inputs_of(model), batch_size),
        [tf.TensorSpec(v.shape, v.dtype) for v in variables],
    )
    return kept


def _read_backward(graph, forward) -> Iterable[tf.Tensor]:
    found = {}
    for op in graph.get_operations():
        if op.name in forward or op.type in _READ_NO_VALUE:
            continue
        for tensor in op.inputs:
            while tensor.op.type in _ALIASES:
                tensor = tensor.op.inputs[0]
            if tensor.op.name in forward and tensor.op.type not in _NOT_HELD:
                found[tensor.ref()] = tensor
    return found.values()


class _NotedLayer:
    """Extends a layer for a trace: its operations are noted as its own."""

    def __call__(self, *args, **kwargs):
        with noting("forward", self.name, ""):
            return super().__call__(*args, **kwargs)


@contextlib.contextmanager
def _noted(layers) -> Iterator[None]:
    classes = [type(layer) for layer in layers]
    try:
        for layer in layers:
            layer.__class__ = type(type(layer).__name__, (_NotedLayer, type(layer)), {})
        yield
    finally:
        for layer, original in zip(layers, classes, strict=True):
            layer.__class__ = original


def _nodes_of(layer, model) -> list[tuple[Any, Any]]:
    """What each call of a layer was given and returned, as Keras's symbolic tensors."""
    if isinstance(layer, keras.Model):
        return [(layer.inputs, layer.outputs)]
    own = set(map(id, _tensors_of(model)))
    nodes = [
        # One that is read twice, as query and as value, is one input.
        (list({id(t): t for t in node.input_tensors}.values()), node.output_tensors)
        for node in layer._inbound_nodes
        if all(id(tensor) in own for tensor in node.output_tensors)
    ]
    return nodes or [(layer.input, layer.output)]


def _inputs_of(model):
    return model.inputs[0] if isinstance(model, keras.Sequential) else model.input


def _tensors_of(model) -> Iterable[Any]:
    functional = model._functional if isinstance(model, keras.Sequential) else model
    for nodes in functional._nodes_by_depth.values():
        for node in nodes:
            yield from node.output_tensors


def _kind(layer, node) -> str:
    config = {**layer.get_config(), "name": None}
    shapes = [(str(tensor.shape), str(tensor.dtype)) for tensor in keras.tree.flatten(node)]
    return json.dumps([type(layer).__name__, config, shapes], default=str, sort_keys=True)


def _seconds_alone(model, batch_size, optimizer, backward) -> float:
    copy = keras.models.clone_model(model)
    if optimizer is not None and copy.trainable_variables:
        optimizer = _copy_of(optimizer)
        optimizer.build(copy.trainable_variables)
    inputs = keras.tree.map_structure(_example, _specs(_inputs_of(model), batch_size))

    @tf.function(autograph=False)
    def step(inputs):
        floating = [x for x in keras.tree.flatten(inputs) if x.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floating)
            outputs = copy(inputs, training=True)
            total = tf.add_n(
                [tf.reduce_sum(tf.cast(o, "float32")) for o in keras.tree.flatten(outputs)]
            )
        variables = copy.trainable_variables
        gradients = tape.gradient(total, [*floating, *(v.value for v in variables)])
        own = gradients[len(floating) :]
        if optimizer is not None and any(gradient is not None for gradient in own):
            optimizer.apply(own, variables)
        return outputs, [gradient for gradient in gradients if gradient is not None]

    if not backward:
        return _median_seconds(tf.function(lambda given: copy(given, training=True)), inputs)
    return _median_seconds(step, inputs)


def _median_seconds(function: Callable, *arguments) -> float:
    function(*arguments)  # The first call traces.
    seconds: list[float] = []
    while len(seconds) < _LEAST_RUNS or (
        sum(seconds) < _LEAST_SECONDS and len(seconds) < _MOST_RUNS
    ):
        started = time.perf_counter()
        keras.tree.map_structure(lambda t: tf.convert_to_tensor(t).numpy, function(*arguments))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _specs(tensors, batch_size):
    return keras.tree.map_structure(
        lambda t: tf.TensorSpec([batch_size, *(n or 1 for n in t.shape[1:])], t.dtype), tensors
    )


def _example(spec: tf.TensorSpec) -> tf.Tensor:
    if spec.dtype.is_floating:
        return tf.random.stateless_normal(spec.shape, [1, 2], dtype=spec.dtype)
    return tf.zeros(spec.shape, spec.dtype)


def _num_bytes(shape, dtype) -> int:
    itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    return int(np.prod(shape, dtype=np.int64)) * itemsize
