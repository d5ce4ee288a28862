"""How long each layer takes in a step: measured, layer by layer, on copies.

A layer that is run alone pays for a call of a program, which in the model's step all layers share.
So a program runs it several times, each time behind the last, and the time of one more run counts:

    seconds = (T(1 + n) − T(1)) / n
"""

import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.callbacks.step_time import StepTime
from tfparallel.cloning.complete import without_draws
from tfparallel.cloning.layers import copy_layers, like
from tfparallel.placement.graph import layers_in_order

__all__ = ["copy_of", "inputs_of", "measured_overhead", "measured_seconds", "specs"]

_LEAST_RUNS, _LEAST_SECONDS, _MOST_RUNS = 5, 0.1, 100
_MORE_RUNS, _MOST_SECONDS = 8, 0.02  # Behind the first; none for a layer that takes so long.
_OVERHEAD_STEPS = 60
_LEAST = 1e-6  # Seconds: no layer takes none, whatever the clock says of two runs.


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
    and one input shape are measured once. One that is called twice in the model counts twice. What
    reads the model's inputs alone sends no gradient back.

    Returns:
        The seconds for a batch, by the layer's name.
    """
    known: dict[str, float] = {}
    found = {}
    given = {id(tensor) for tensor in keras.tree.flatten(inputs_of(model))}
    for layer in layers_in_order(model):
        found[layer.name] = 0.0
        for inputs, outputs, node in _nodes_of(layer, model):
            is_first = all(id(tensor) in given for tensor in keras.tree.flatten(inputs))
            key = _kind(layer, inputs, outputs, is_first)
            if key not in known:
                alone = _alone(layer, inputs, outputs, node)
                program = _program_of(alone, batch_size, optimizer, backward, not is_first)
                known[key] = _marginal_seconds(program)
            found[layer.name] += known[key]
    return found


def measured_overhead(optimizer: keras.Optimizer) -> float:
    """Measures what a step of `fit` takes with next to nothing to do, in seconds."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(copy_of(optimizer), "mse")
    steps = StepTime()
    x = np.zeros((_OVERHEAD_STEPS, 1), "float32")
    model.fit(x, x, batch_size=1, verbose=0, callbacks=[steps])
    return statistics.median(steps.seconds[1:])


def copy_of(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Returns an optimizer of the same configuration, without slots."""
    return keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))


def inputs_of(model: keras.Model) -> Any:
    """Returns the symbolic inputs in the structure that the model is called with."""
    return model.inputs[0] if isinstance(model, keras.Sequential) else model.input


def specs(tensors: Any, batch_size: int) -> Any:
    """Returns what a batch looks like, of its declared size if it has one.

    Another axis of unknown length counts as 1.
    """

    def spec(t):
        return tf.TensorSpec([t.shape[0] or batch_size, *(n or 1 for n in t.shape[1:])], t.dtype)

    return keras.tree.map_structure(spec, tensors)


def _marginal_seconds(program: Callable[[int], Callable[[], Any]]) -> float:
    alone = program(1)
    (once,) = _seconds_of([alone], 0.0)
    if once > _MOST_SECONDS:
        return once
    once, several = _seconds_of([alone, program(1 + _MORE_RUNS)], 2 * _LEAST_SECONDS)
    return max((several - once) / _MORE_RUNS, _LEAST)


def _program_of(model, batch_size, optimizer, backward, has_input_gradient):
    """Returns a function from a number of runs to a program that takes so many steps."""
    variables = model.trainable_variables
    if optimizer is not None and variables:
        optimizer = copy_of(optimizer)
        optimizer.build(variables)

    def one_step(inputs):
        if not backward:
            return model(inputs, training=True)
        floating = [x for x in keras.tree.flatten(inputs) if x.dtype.is_floating]
        sources = floating if has_input_gradient else []
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = model(inputs, training=True)
            made = [o for o in keras.tree.flatten(outputs) if o.dtype != tf.string]
            total = sum((tf.reduce_sum(tf.cast(o, "float32")) for o in made), tf.zeros(()))
        found = tape.gradient(total, [*sources, *(v.value for v in variables)])
        own = found[len(sources) :]
        if optimizer is not None and any(gradient is not None for gradient in own):
            optimizer.apply(own, variables)
        return [keras.tree.flatten(outputs), [g for g in found if g is not None]]

    def program(num_runs):
        # Inputs of their own, or TensorFlow would see that all runs are one.
        batches = [_examples(specs(inputs_of(model), batch_size), i) for i in range(num_runs)]

        @tf.function(autograph=False)
        def run(batches):
            read: list[tf.Tensor] = [tf.zeros(())]
            for batch in batches:
                with tf.control_dependencies(read):
                    batch = keras.tree.map_structure(tf.identity, batch)
                    read = [*read, *map(_one_number, keras.tree.flatten(one_step(batch)))]
            return tf.add_n(read)  # What nobody reads, TensorFlow does not compute.

        return lambda: run(batches).numpy()

    return program


def _one_number(tensor) -> tf.Tensor:
    values = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
    one = tf.reshape(values, [-1])[0]
    return tf.cast(tf.strings.length(one) if one.dtype == tf.string else one, tf.float32)


def _seconds_of(functions: list[Callable[[], Any]], least_seconds: float) -> list[float]:
    """The lower quartile of each one's times, called in turn, for so long at least.

    What disturbs a machine makes calls slower, never faster, and calls in turn alike: of medians
    that are taken one after the other, the difference can be zero.
    """
    for function in functions:
        function()  # The first call traces.
    seconds: list[list[float]] = []
    while len(seconds) < _LEAST_RUNS or (
        sum(map(sum, seconds)) < least_seconds and len(seconds) < _MOST_RUNS
    ):
        ends = [time.perf_counter()]
        for function in functions:
            function()
            ends.append(time.perf_counter())
        seconds.append([end - start for start, end in itertools.pairwise(ends)])
    return [statistics.quantiles(each)[0] for each in zip(*seconds, strict=True)]


def _examples(specifications, seed):
    def example(spec):
        if spec.dtype.is_floating:
            return tf.random.stateless_normal(spec.shape, [seed, 2], dtype=spec.dtype)
        if spec.dtype == tf.string:
            return tf.fill(spec.shape, str(seed % 2))
        return tf.cast(tf.fill(spec.shape, seed % 2), spec.dtype)

    return keras.tree.map_structure(example, specifications)


class _Call:
    """A call of a layer that holds nothing: no copy is needed, and some have none (`Lambda`)."""

    variables, trainable_variables = (), ()

    def __init__(self, inputs, node):
        self.input = inputs
        self._node = node

    def __call__(self, inputs, training):
        given = {id(symbol): tensor for symbol, tensor in zip(self.input, inputs, strict=True)}
        args, kwargs = self._node.arguments.fill_in(given)
        layer = self._node.operation
        if layer._call_has_training_arg:
            kwargs = {**kwargs, "training": training}
        return layer(*args, **kwargs)


def _alone(layer, inputs, outputs, node) -> "keras.Model | _Call":
    """Makes a model of one call of a layer, with weights of its own."""
    if node is None:
        return copy_layers(keras.Model(inputs, outputs), like)
    if not layer.variables and not layer.metrics_variables:
        return _Call(inputs, node)
    # A model whose inputs were both an `Input` and a computed tensor would spoil the one that they
    # are from, whose config Keras could not tell any more: all are new.
    new = {id(t): keras.Input(batch_shape=t.shape, dtype=t.dtype) for t in inputs}
    args, kwargs = node.arguments.fill_in(new)
    with without_draws():
        return keras.Model(list(new.values()), like(layer)(*args, **kwargs))


def _nodes_of(layer, model) -> list[tuple[Any, Any, Any]]:
    """What each call of a layer was given and returned, as symbolic tensors, and its node."""
    if isinstance(layer, keras.Model):
        return [(layer.inputs, layer.outputs, None)]
    own = set(map(id, _tensors_of(model)))
    nodes = [
        # One that is read twice, as query and as value, is one input.
        (list({id(t): t for t in node.input_tensors}.values()), node.output_tensors, node)
        for node in layer._inbound_nodes
        if all(id(tensor) in own for tensor in node.output_tensors)
    ]
    return nodes or [(layer.input, layer.output, None)]


def _tensors_of(model) -> Iterable[Any]:
    functional = model._functional if isinstance(model, keras.Sequential) else model
    for nodes in functional._nodes_by_depth.values():
        for node in nodes:
            yield from node.output_tensors


def _kind(layer, inputs, outputs, is_first) -> str:
    config = {**layer.get_config(), "name": None}
    tensors = keras.tree.flatten((inputs, outputs))
    shapes = [(str(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    what = [type(layer).__name__, config, shapes, is_first]
    return json.dumps(what, default=str, sort_keys=True)
