"""Measures the seconds of each layer in a step, layer by layer, on copies.

A layer that runs alone pays for the call of a program, which all layers share in the model's step.
So a program runs it several times in sequence, and only the time of further runs counts:

    seconds = (T(1 + n) − T(1)) / n
"""

import contextlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfparallel.cloning.copy_state import without_draws
from tfparallel.cloning.layers import copy_layers, is_its_graph, like, rebuilt
from tfparallel.extend import original_class
from tfparallel.placement.graph import layers_in_order
from tfparallel.problems import PlacementError
from tfparallel.seams.functional import calls_of, calls_to, has_graph
from tfparallel.seams.keras import (
    GLOBAL_SEED_GENERATOR,
    get_global,
    set_global,
    takes_training,
)

_LEAST_RUNS, _LEAST_SECONDS, _MOST_RUNS = 5, 0.1, 100
_MORE_RUNS, _MOST_SECONDS = 8, 0.02  # After the first; none for a layer that takes so long.
_LEAST = 1e-6  # Seconds: the lower bound, whatever the clock says.
_LEAST_GAIN = 1.1  # A smaller gain is noise.
_HEAVIEST = 3  # The number of layer kinds to run side by side; they represent the others.


def measured_seconds(
    model: keras.Model,
    batch_size: int,
    *,
    backward: bool = True,
    progress: Callable[[str], None] = lambda layer: None,
) -> dict[str, float]:
    """Measures each layer's forward and backward pass.

    With `backward=False`, it measures only the forward pass. `progress` receives the name of each
    layer before it is measured.

    Each layer runs alone, on a copy with its own weights and inputs; layers of the same config and
    input shape are measured once. A layer that is called twice in the model counts twice. A layer
    that reads only the model's inputs computes no gradient of its inputs.

    Returns:
        The seconds for a batch, by the layer's name.
    """
    seconds_by_kind: dict[str, float] = {}
    seconds = {layer.name: 0.0 for layer in layers_in_order(model)}
    for call in layer_calls(model):
        if call.kind not in seconds_by_kind:
            progress(call.layer.name)
            with _leaving_draws():
                seconds_by_kind[call.kind] = marginal_seconds(call.program(batch_size, backward))
        seconds[call.layer.name] += seconds_by_kind[call.kind]
    return seconds


def measured_side_by_side(
    model: keras.Model, batch_size: int, seconds: Mapping[str, float], number: int
) -> float:
    """Measures the gain in throughput when several layers run at once.

    The logical devices of a CPU share its cores, which a single layer may or may not keep busy. The
    slowest kinds of layers run side by side, forward and backward.

    Args:
        model: A functional or Sequential model.
        batch_size: The examples of a batch.
        seconds: The seconds of each layer, by name, to find the slowest.
        number: The number of layers that run at once.

    Returns:
        From 1, if one layer keeps all cores busy, to `number`. A gain within the noise counts as 1.
    """
    calls: dict[str, LayerCall] = {}
    totals: dict[str, float] = {}
    for call in layer_calls(model):
        calls[call.kind] = call
        totals[call.kind] = totals.get(call.kind, 0.0) + seconds[call.layer.name]
    one_after_the_other = at_once = 0.0
    for kind in sorted(calls, key=totals.__getitem__, reverse=True)[:_HEAVIEST]:
        call = calls[kind]
        program = call.program(batch_size)
        # Long enough to hide the overhead of calling a program.
        most = math.ceil(_MOST_SECONDS / 4 / max(seconds[call.layer.name], _LEAST))
        num_runs = min(1 + _MORE_RUNS, most)
        programs = [program(num_runs), program(num_runs, number)]
        alone, together = lower_quartiles(programs, 2 * _LEAST_SECONDS)
        one_after_the_other += number * totals[kind]
        at_once += totals[kind] * min(max(together / alone, 1.0), number)
    gain = one_after_the_other / at_once if at_once else float(number)
    return gain if gain >= _LEAST_GAIN else 1.0


def inputs_of(model: keras.Model) -> Any:
    """Returns the symbolic inputs in the structure that the model is called with."""
    return model.inputs[0] if isinstance(model, keras.Sequential) else model.input


def specs(tensors: Any, batch_size: int) -> Any:
    """Returns the specs of a batch, with its declared size if it has one.

    Any other axis of unknown length counts as 1.
    """

    def spec(t):
        return tf.TensorSpec([t.shape[0] or batch_size, *(n or 1 for n in t.shape[1:])], t.dtype)

    return keras.tree.map_structure(spec, tensors)


def marginal_seconds(
    program: Callable[[int], Callable[[], Any]], more_runs: int = _MORE_RUNS
) -> float:
    """Measures the seconds of one more run of a program.

    Args:
        program: Makes a program of a number of runs in sequence.
        more_runs: The number of runs after the first.
    """
    alone = program(1)
    (once,) = lower_quartiles([alone], 0.0)
    if once > _MOST_SECONDS:
        return once
    once, several = lower_quartiles([alone, program(1 + more_runs)], 2 * _LEAST_SECONDS)
    return max((several - once) / more_runs, _LEAST)


def program_of(
    model: "keras.Model | _Call", batch_size: int, backward: bool, has_input_gradient: bool
) -> Callable[..., Callable[[], Any]]:
    """Returns a function that makes a program of a number of runs of a step.

    With `num_chains`, the program has several chains of runs that do not wait for each other.
    """
    variables = model.trainable_variables

    @tf.function(autograph=False)  # Traced once, whatever the number of runs.
    def numbers_of_step(inputs):
        return [_one_number(result) for result in keras.tree.flatten(one_step(inputs))]

    def one_step(inputs):
        if not backward:
            return model(inputs, training=True)
        floating = [x for x in keras.tree.flatten(inputs) if x.dtype.is_floating]
        sources = [*(floating if has_input_gradient else []), *(v.value for v in variables)]
        with tf.GradientTape() as tape:
            tape.watch(floating if has_input_gradient else [])
            outputs = model(inputs, training=True)
        targets = [o for o in keras.tree.flatten(outputs) if o.dtype.is_floating]
        # Gradients from the next layer have the shapes of the outputs, so the outputs can serve.
        gradients = tape.gradient(targets, sources, output_gradients=targets) if targets else []
        return [keras.tree.flatten(outputs), [g for g in gradients if g is not None]]

    def program(num_runs, num_chains=1):
        # Different inputs for each run; otherwise TensorFlow would merge equal runs.
        chains = [
            [
                examples(specs(inputs_of(model), batch_size), chain * num_runs + i)
                for i in range(num_runs)
            ]
            for chain in range(num_chains)
        ]

        @tf.function(autograph=False)
        def run(chains):
            ends: list[tf.Tensor] = []
            for batches in chains:
                read: list[tf.Tensor] = [tf.zeros(())]
                for batch in batches:
                    with tf.control_dependencies(read):
                        batch = keras.tree.map_structure(tf.identity, batch)
                        read = [*read, *numbers_of_step(batch)]
                ends += read
            return tf.add_n(ends)  # TensorFlow prunes results that nothing reads.

        return lambda: run(chains).numpy()

    return program


@contextlib.contextmanager
def _leaving_draws() -> Iterator[None]:
    """Restores the random numbers of Python and Keras: layers without a seed draw in each run."""
    seeds = get_global(GLOBAL_SEED_GENERATOR)
    state = None if seeds is None else keras.ops.convert_to_numpy(seeds.state)
    with without_draws():
        try:
            yield
        finally:
            set_global(GLOBAL_SEED_GENERATOR, seeds)
            if seeds is not None:
                seeds.state.assign(state)


def _one_number(tensor) -> tf.Tensor:
    values = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
    one = tf.reshape(values, [-1])[0]
    return tf.cast(tf.strings.length(one) if one.dtype == tf.string else one, tf.float32)


def lower_quartiles(functions: list[Callable[[], Any]], least_seconds: float) -> list[float]:
    """Returns the lower quartile of each function's times, called in turn for `least_seconds`.

    Disturbances of a machine only slow calls down, and calls in turn equally: the difference of
    medians that are measured one after the other can be zero.
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


def examples(specifications: Any, seed: int) -> Any:
    """Makes synthetic examples of these specs; they differ by seed."""

    def example(spec):
        if spec.dtype.is_floating:
            return tf.random.stateless_normal(spec.shape, [seed, 2], dtype=spec.dtype)
        if spec.dtype == tf.string:
            return tf.fill(spec.shape, str(seed % 2))
        if seed % 2 or spec.shape.rank < 2:
            return tf.cast(tf.fill(spec.shape, seed % 2), spec.dtype)
        # Padding must come after words for cuDNN.
        is_word = tf.range(spec.shape[-1]) < max(1, spec.shape[-1] - 1)
        return tf.cast(tf.broadcast_to(is_word, spec.shape), spec.dtype)

    return keras.tree.map_structure(example, specifications)


class NoCopy(PlacementError):
    """A layer cannot be copied, so it cannot run alone."""

    def __init__(self, layer: keras.Layer):
        super().__init__(
            "A layer is measured on a copy made from its config, so it needs `get_config` and "
            f"`from_config`. Received: layer '{layer.name}' of class "
            f"{original_class(layer).__name__}, which cannot be made from its config. Define "
            "`get_config`, or use an option that measures nothing, such as balance='memory'."
        )


class LayerCall(NamedTuple):
    """A call of a layer in a model; calls of the same kind take the same time.

    Attributes:
        layer: The layer.
        kind: Its class, config and shapes, as text.
        inputs: Its symbolic inputs.
        outputs: Its symbolic outputs.
        node: Keras's node of the call; None for a nested model.
        is_first: Whether it reads only the model's inputs, and sends no gradient back.
    """

    layer: keras.Layer
    kind: str
    inputs: Any
    outputs: Any
    node: Any
    is_first: bool

    def program(
        self, batch_size: int, backward: bool = True
    ) -> Callable[..., Callable[[], Any]]:
        """Returns the result of `program_of` for a copy of the layer alone."""
        try:
            alone = _alone(self.layer, self.inputs, self.node)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise NoCopy(self.layer) from error
        return program_of(alone, batch_size, backward, not self.is_first)


def layer_calls(model: keras.Model) -> Iterator[LayerCall]:
    """Yields each call of each layer, producers before consumers."""
    model_inputs = {id(tensor) for tensor in keras.tree.flatten(inputs_of(model))}
    for layer in layers_in_order(model):
        for inputs, outputs, node in _nodes_of(layer, model):
            is_first = all(id(tensor) in model_inputs for tensor in keras.tree.flatten(inputs))
            try:
                kind = _kind(layer, inputs, outputs, is_first)
            except NotImplementedError as error:  # Keras raises it without `get_config`.
                raise NoCopy(layer) from error
            yield LayerCall(layer, kind, inputs, outputs, node, is_first)


class _Call:
    """A call of a layer without state: it needs no copy, and some (`Lambda`) cannot be copied."""

    variables, trainable_variables = (), ()

    def __init__(self, inputs, node):
        self.input = inputs
        self._node = node

    def __call__(self, inputs, training):
        values = {id(symbol): tensor for symbol, tensor in zip(self.input, inputs, strict=True)}
        args, kwargs = self._node.arguments.fill_in(values)
        layer = self._node.operation
        if takes_training(layer):
            kwargs = {**kwargs, "training": training}
        return layer(*args, **kwargs)


def _alone(layer, inputs, node) -> "keras.Model | _Call":
    """Makes a model of one call of a layer, with its own weights."""
    if node is None:
        return copy_layers(layer, like) if is_its_graph(layer) else rebuilt(layer)
    if not layer.variables and not layer.metrics_variables:
        return _Call(inputs, node)
    # All inputs are new: a model with both an `Input` and a computed tensor as inputs would corrupt
    # the model that they are from, and Keras could no longer return its config.
    new = {id(t): keras.Input(batch_shape=t.shape, dtype=t.dtype) for t in inputs}
    args, kwargs = node.arguments.fill_in(new)
    with without_draws():
        return keras.Model(list(new.values()), like(layer)(*args, **kwargs))


def _nodes_of(layer, model) -> list[tuple[Any, Any, Any]]:
    """Returns the symbolic inputs and outputs of each call of a layer, and its node."""
    if has_graph(layer):
        return [(layer.inputs, layer.outputs, None)]
    tensors = set(map(id, _tensors_of(model)))
    nodes = [
        # A tensor that is read twice, as query and as value, is one input.
        (list({id(t): t for t in node.input_tensors}.values()), node.output_tensors, node)
        for node in calls_to(layer)
        if all(id(tensor) in tensors for tensor in node.output_tensors)
    ]
    return nodes or [(layer.input, layer.output, None)]


def _tensors_of(model) -> Iterable[Any]:
    return (tensor for node in calls_of(model) for tensor in node.output_tensors)


def _kind(layer, inputs, outputs, is_first) -> str:
    config = {**layer.get_config(), "name": None}
    tensors = keras.tree.flatten((inputs, outputs))
    shapes = [(str(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    description = [type(layer).__name__, config, shapes, is_first]
    return json.dumps(description, default=str, sort_keys=True)
