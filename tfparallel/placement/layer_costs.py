"""Measures what each layer costs in training: the bytes that it holds, and its seconds.

Bytes come from shapes and from a trace of the step, which runs nothing: tensors of the forward pass
that the backward pass reads are held in between. Seconds are measured (`layer_timing.py`), layer by
layer, on a temporary copy. So the model needs no storage for either.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfparallel.extend import original_class
from tfparallel.layout.model_costs import LayerCosts, Line, ModelCosts
from tfparallel.placement.graph import edges, layers_in_order, row_bytes
from tfparallel.placement.layer_timing import inputs_of, measured_seconds, specs
from tfparallel.tracing.audit import noting, recording
from tfparallel.tracing.trial_trace import traced_apart
from tfparallel.update.one_at_a_time import LARGE

_SLOTS = 2  # Per weight of an unknown optimizer: as many as Adam's.
_ARRAYS_OF_A_LOSS = 2  # The outputs and their gradient.
_ARRAYS_OF_AN_UPDATE = 3  # The gradient, and Adam's temporary arrays; measured.
# Operations that return their input's memory.
_ALIASES = {"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient"}
_READ_NO_VALUE = {"Shape", "ShapeN", "Size", "Rank"}
_NOT_HELD = {"Const", "Placeholder", "ReadVariableOp", "Shape", "StridedSlice"}


def model_costs(
    model: keras.Model,
    rows: Sequence[int],
    *,
    optimizer: keras.Optimizer | None = None,
    measures: bool = True,
    measures_forward: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> ModelCosts:
    """Returns the costs of a model's layers; those of loss, updates and step have no seconds.

    Args:
        model: A functional or Sequential model, with or without storage.
        rows: One or two numbers of rows at which to measure layers. Any other axis of unknown
            length counts as 1.
        optimizer: The optimizer, for its slots. None: two per trainable weight.
        measures: Whether to measure seconds.
        measures_forward: Whether to measure the forward pass separately, too, at the fewest rows.
        progress: Receives a description of each measurement.

    Raises:
        NoCopy: If a layer to measure cannot be copied.
    """
    progress("memory of the layers")
    layers = layer_costs(model, max(rows), optimizer=optimizer)
    if measures:
        seconds = {
            number: measured_seconds(
                model, number, progress=lambda name, n=number: progress(f"{name}, {n} rows")
            )
            for number in rows
        }
        layers = [
            dataclasses.replace(
                layer, seconds=Line.through({n: seconds[n][layer.layer] for n in rows})
            )
            for layer in layers
        ]
    if measures_forward:
        few = min(rows)
        ahead = measured_seconds(model, few, backward=False)
        layers = [
            dataclasses.replace(
                layer, forward_share=min(ahead[layer.layer] / layer.seconds(few), 1.0)
            )
            for layer in layers
        ]
    of_loss = _ARRAYS_OF_A_LOSS * row_bytes(model.outputs)
    return ModelCosts(layers, edges(model), loss_bytes=Line(0.0, of_loss))


def layer_costs(
    model: keras.Model, rows: int, *, optimizer: keras.Optimizer | None = None
) -> list[LayerCosts]:
    """Counts the bytes of each layer, in topological order.

    Args:
        model: A functional or Sequential model, with or without storage.
        rows: The rows of a batch. Any other axis of unknown length counts as 1.
        optimizer: The optimizer, for its slots. None: two per trainable weight.
    """
    activations, passed = _activation_bytes(model, rows), edges(model)
    of_outputs = row_bytes(model.outputs)
    at_once = optimizer is not None and _needs_all_gradients(optimizer)

    @functools.cache
    def slots(shape, dtype):
        proxy = keras.KerasTensor(shape, dtype)
        return _SLOTS * bytes_of(proxy) if optimizer is None else _slot_bytes(optimizer, proxy)

    costs = []
    for index, layer in enumerate(layers_in_order(model)):
        trained = [variable for variable in layer.variables if variable.trainable]
        large = [bytes_of(v) for v in trained if math.prod(v.shape) >= LARGE]
        of_gradients = sum(map(bytes_of, trained))
        costs.append(
            LayerCosts(
                layer.name,
                parameter_bytes=sum(map(bytes_of, layer.variables)),
                trained_bytes=of_gradients,
                gradient_bytes=of_gradients if at_once else of_gradients - sum(large),
                slot_bytes=sum(slots(tuple(v.shape), str(v.dtype)) for v in trained),
                activation_bytes=Line(0.0, activations.get(layer.name, 0) / rows),
                output_bytes=passed.get(index, (of_outputs, ()))[0],
                num_trained=len(trained),
                update_bytes=_ARRAYS_OF_AN_UPDATE * max(large, default=0),
            )
        )
    return costs


def bytes_of(variable: keras.Variable) -> int:
    """Returns the size of a variable in bytes."""
    return _num_bytes(variable.shape, variable.dtype)


def copy_of(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Returns an optimizer of the same config, without slots."""
    cls = original_class(optimizer)
    try:
        config = optimizer.get_config()
    except NotImplementedError:  # Some schedules raise it; other rates take the same time.
        return cls()
    return cls.from_config(config)  # Not `deserialize`, which returns the name of a LAMB.


def _needs_all_gradients(optimizer) -> bool:
    return bool(optimizer.global_clipnorm or optimizer.gradient_accumulation_steps)


def _slot_bytes(optimizer, variable) -> int:
    """Returns the size of an optimizer's slots for a weight of this shape; builds them."""
    copy = copy_of(optimizer)
    before = {id(v) for v in copy.variables}
    copy.build([keras.Variable(tf.zeros(variable.shape, variable.dtype), dtype=variable.dtype)])
    return sum(bytes_of(v) for v in copy.variables if id(v) not in before)


def _activation_bytes(model, batch_size) -> dict[str, int]:
    """Traces the step, and sums by layer the tensors that wait for the backward pass."""
    sizes: dict[str, int] = {}
    variables = model.variables

    @tf.function(autograph=False)
    def step(inputs, values):
        with (
            keras.StatelessScope(list(zip(variables, values, strict=True))),
            recording() as trace,
            traced_apart(),
            _recording_layers(layers_in_order(model)),
        ):
            outputs = model(inputs, training=True)
            trained = {id(v) for v in model.trainable_variables}
            total = tf.add_n(
                [tf.reduce_sum(tf.cast(o, "float32")) for o in keras.tree.flatten(outputs)]
            )
            graph = tf.compat.v1.get_default_graph()
            forward = {op.name for op in graph.get_operations()}
            weights = [w for v, w in zip(variables, values, strict=True) if id(v) in trained]
            found_gradients = tf.compat.v1.gradients(total, weights) if weights else []
        for tensor in _read_backward(_needed(found_gradients), forward):
            owner = trace.owner(tensor.op)
            # Lists of loops have no sizes, so the estimate omits the per-time-step values of RNNs.
            is_list = tensor.dtype in (tf.variant, tf.resource)
            if owner is not None and not is_list and tensor.shape.is_fully_defined():
                sizes[owner] = sizes.get(owner, 0) + _num_bytes(tensor.shape, tensor.dtype.name)

    step.get_concrete_function(
        specs(inputs_of(model), batch_size),
        [tf.TensorSpec(v.shape, v.dtype) for v in variables],
    )
    return sizes


def _needed(gradients) -> list[tf.Operation]:
    """Returns the operations that compute gradients; TensorFlow runs no others.

    It also differentiates by constants, but nothing reads the results.
    """
    waiting = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            waiting += [gradient.values.op, gradient.indices.op]
        elif gradient is not None:
            waiting.append(gradient.op)
    operations = {}
    while waiting:
        op = waiting.pop()
        if op.name not in operations:
            operations[op.name] = op
            waiting += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return list(operations.values())


def _read_backward(operations, forward) -> Iterable[tf.Tensor]:
    tensors = {}
    for op in operations:
        if op.name in forward or op.type in _READ_NO_VALUE:
            continue
        for tensor in op.inputs:
            while tensor.op.type in _ALIASES:
                tensor = tensor.op.inputs[0]
            if tensor.op.name in forward and tensor.op.type not in _NOT_HELD:
                tensors[tensor.ref()] = tensor
    return tensors.values()


class _RecordedLayer:
    """Extends a layer for a trace: records its operations under its name."""

    def __call__(self, *args, **kwargs):
        with noting("forward", self.name, ""):
            return super().__call__(*args, **kwargs)


@contextlib.contextmanager
def _recording_layers(layers) -> Iterator[None]:
    classes = [type(layer) for layer in layers]
    try:
        for layer in layers:
            layer.__class__ = type(type(layer).__name__, (_RecordedLayer, type(layer)), {})
        yield
    finally:
        for layer, original in zip(layers, classes, strict=True):
            layer.__class__ = original


def _num_bytes(shape, dtype) -> int:
    itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    return math.prod(shape) * itemsize
