"""What each layer costs while it trains: bytes that it holds, and seconds.

Bytes come from shapes, and from a trace of the step, which runs nothing: what the forward pass
makes and the backward pass reads is held in between. Seconds are measured (`layer_timing.py`),
layer by layer, on a copy that is gone afterwards. So the model needs no storage for either.
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
from tfparallel.tracing.apart import traced_apart
from tfparallel.tracing.audit import noting, recording
from tfparallel.update.one_at_a_time import LARGE

__all__ = ["bytes_of", "copy_of", "layer_costs", "model_costs"]

_SLOTS = 2  # Of an optimizer that is not known yet: as many as Adam's.
_ARRAYS_OF_A_LOSS = 2  # The outputs themselves, and their gradient.
_ARRAYS_OF_AN_UPDATE = 3  # The gradient, and what Adam makes on its way; measured.
# They hand on what they are given: no memory of their own.
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
    """Tells what a model's layers cost; of loss, updates and the step no seconds are said.

    Args:
        model: A functional or Sequential model, with or without storage.
        rows: One or two numbers of rows, at which layers are measured. Another axis of unknown
            length counts as 1.
        optimizer: Tells the slots. None: two are assumed for each trained weight.
        measures: Whether to measure seconds.
        measures_forward: Whether to measure the forward pass by itself too, at the fewest rows.
        progress: Is told what is measured, while it is.

    Raises:
        NoCopy: If a layer that is to be measured cannot be copied.
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
        rows: Of a batch. Another axis of unknown length counts as 1.
        optimizer: Tells the slots. None: two are assumed for each trained weight.
    """
    kept, passed = _kept_bytes(model, rows), edges(model)
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
                activation_bytes=Line(0.0, kept.get(layer.name, 0) / rows),
                output_bytes=passed.get(index, (of_outputs, ()))[0],
                num_trained=len(trained),
                update_bytes=_ARRAYS_OF_AN_UPDATE * max(large, default=0),
            )
        )
    return costs


def bytes_of(variable: keras.Variable) -> int:
    """Returns how many bytes a variable holds."""
    return _num_bytes(variable.shape, variable.dtype)


def copy_of(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Returns an optimizer of the same configuration, without slots."""
    cls = original_class(optimizer)
    try:
        config = optimizer.get_config()
    except NotImplementedError:  # As a schedule may; an update takes as long at another rate.
        return cls()
    return cls.from_config(config)  # Not by `deserialize`, which returns its name for a LAMB.


def _needs_all_gradients(optimizer) -> bool:
    return bool(optimizer.global_clipnorm or optimizer.gradient_accumulation_steps)


def _slot_bytes(optimizer, variable) -> int:
    """Makes an optimizer's slots for a weight of this shape, and counts them."""
    own = copy_of(optimizer)
    before = {id(v) for v in own.variables}
    own.build([keras.Variable(tf.zeros(variable.shape, variable.dtype), dtype=variable.dtype)])
    return sum(bytes_of(v) for v in own.variables if id(v) not in before)


def _kept_bytes(model, batch_size) -> dict[str, int]:
    """Traces the step, and adds up what waits for the backward pass, by layer."""
    kept: dict[str, int] = {}
    variables = model.variables

    @tf.function(autograph=False)
    def step(inputs, values):
        with (
            keras.StatelessScope(list(zip(variables, values, strict=True))),
            recording() as trace,
            traced_apart(),
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
            found = tf.compat.v1.gradients(total, weights) if weights else []
        for tensor in _read_backward(_needed(found), forward):
            owner = trace.owner(tensor.op)
            # A loop's lists tell no size: what a recurrent layer keeps of each turn is not seen.
            is_list = tensor.dtype in (tf.variant, tf.resource)
            if owner is not None and not is_list and tensor.shape.is_fully_defined():
                kept[owner] = kept.get(owner, 0) + _num_bytes(tensor.shape, tensor.dtype.name)

    step.get_concrete_function(
        specs(inputs_of(model), batch_size),
        [tf.TensorSpec(v.shape, v.dtype) for v in variables],
    )
    return kept


def _needed(gradients) -> list[tf.Operation]:
    """The operations that gradients are computed by; TensorFlow runs no others.

    It differentiates by constants, too, and nobody reads what comes of that.
    """
    waiting = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            waiting += [gradient.values.op, gradient.indices.op]
        elif gradient is not None:
            waiting.append(gradient.op)
    found = {}
    while waiting:
        op = waiting.pop()
        if op.name not in found:
            found[op.name] = op
            waiting += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return list(found.values())


def _read_backward(operations, forward) -> Iterable[tf.Tensor]:
    found = {}
    for op in operations:
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


def _num_bytes(shape, dtype) -> int:
    itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    return math.prod(shape) * itemsize
