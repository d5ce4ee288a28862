"""How long each layer takes in a step: measured, layer by layer, on copies.

A layer that is run alone pays for a call of a program, which in the model's step all layers share.
So a program runs it several times, each time behind the last, and the time of one more run counts:

    seconds = (T(1 + n) − T(1)) / n
"""

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
from tfparallel.seams.keras import takes_training

__all__ = [
    "LayerCall",
    "NoCopy",
    "examples",
    "inputs_of",
    "layer_calls",
    "lower_quartiles",
    "marginal_seconds",
    "measured_seconds",
    "measured_side_by_side",
    "program_of",
    "specs",
]

_LEAST_RUNS, _LEAST_SECONDS, _MOST_RUNS = 5, 0.1, 100
_MORE_RUNS, _MOST_SECONDS = 8, 0.02  # Behind the first; none for a layer that takes so long.
_LEAST = 1e-6  # Seconds: no layer takes none, whatever the clock says of two runs.
_LEAST_GAIN = 1.1  # Less is the noise of a measurement.
_HEAVIEST = 3  # Kinds of layers that are run side by side; the others are like them.


def measured_seconds(
    model: keras.Model,
    batch_size: int,
    *,
    backward: bool = True,
    progress: Callable[[str], None] = lambda layer: None,
) -> dict[str, float]:
    """Measures each layer's forward and backward pass.

    With `backward=False` it is the forward pass alone. `progress` is given the name of each layer
    that is about to be measured.

    Each layer runs alone, on a copy with weights and inputs of its own; layers of one configuration
    and one input shape are measured once. One that is called twice in the model counts twice. What
    reads the model's inputs alone sends no gradient back.

    Returns:
        The seconds for a batch, by the layer's name.
    """
    known: dict[str, float] = {}
    found = {layer.name: 0.0 for layer in layers_in_order(model)}
    for call in layer_calls(model):
        if call.kind not in known:
            progress(call.layer.name)
            known[call.kind] = marginal_seconds(call.program(batch_size, backward))
        found[call.layer.name] += known[call.kind]
    return found


def measured_side_by_side(
    model: keras.Model, batch_size: int, seconds: Mapping[str, float], number: int
) -> float:
    """Measures how much more is done in the same time when several layers are at work at once.

    The logical devices of a CPU share its cores, which a single layer may keep busy or not. The
    kinds of layers that take longest run side by side, forward and backward.

    Args:
        model: A functional or Sequential model.
        batch_size: The examples of a batch.
        seconds: Of each layer, by name; says which take longest.
        number: How many run at once.

    Returns:
        From 1, where cores are as busy with one, to `number`. A gain within the noise is none.
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
        # Long enough that what the call of a program takes does not count.
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
    """Returns what a batch looks like, of its declared size if it has one.

    Another axis of unknown length counts as 1.
    """

    def spec(t):
        return tf.TensorSpec([t.shape[0] or batch_size, *(n or 1 for n in t.shape[1:])], t.dtype)

    return keras.tree.map_structure(spec, tensors)


def marginal_seconds(
    program: Callable[[int], Callable[[], Any]], more_runs: int = _MORE_RUNS
) -> float:
    """What one more run takes of a program that is made for so many.

    Args:
        program: Makes the program of a number of runs, one behind the other.
        more_runs: How many are behind the first.
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
    """Returns a function from a number of runs to a program that takes so many steps.

    With `num_chains` the program has as many chains of runs, which do not wait for each other.
    """
    variables = model.trainable_variables

    @tf.function(autograph=False)  # Traced once, whatever the number of runs.
    def numbers_of_step(inputs):
        return [_one_number(made) for made in keras.tree.flatten(one_step(inputs))]

    def one_step(inputs):
        if not backward:
            return model(inputs, training=True)
        floating = [x for x in keras.tree.flatten(inputs) if x.dtype.is_floating]
        sources = [*(floating if has_input_gradient else []), *(v.value for v in variables)]
        with tf.GradientTape() as tape:
            tape.watch(floating if has_input_gradient else [])
            outputs = model(inputs, training=True)
        made = [o for o in keras.tree.flatten(outputs) if o.dtype.is_floating]
        # What comes back from the next layer is as large as what went there: the outputs do for it.
        found = tape.gradient(made, sources, output_gradients=made) if made else []
        return [keras.tree.flatten(outputs), [g for g in found if g is not None]]

    def program(num_runs, num_chains=1):
        # Inputs of their own, or TensorFlow would see that all runs are one.
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
            return tf.add_n(ends)  # What nobody reads, TensorFlow does not compute.

        return lambda: run(chains).numpy()

    return program


def _one_number(tensor) -> tf.Tensor:
    values = tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor
    one = tf.reshape(values, [-1])[0]
    return tf.cast(tf.strings.length(one) if one.dtype == tf.string else one, tf.float32)


def lower_quartiles(functions: list[Callable[[], Any]], least_seconds: float) -> list[float]:
    """Returns the lower quartile of each one's times, called in turn, for so long at least.

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


def examples(specifications: Any, seed: int) -> Any:
    """Makes up a batch of these shapes; another one for another seed."""

    def example(spec):
        if spec.dtype.is_floating:
            return tf.random.stateless_normal(spec.shape, [seed, 2], dtype=spec.dtype)
        if spec.dtype == tf.string:
            return tf.fill(spec.shape, str(seed % 2))
        if seed % 2 or spec.shape.rank < 2:
            return tf.cast(tf.fill(spec.shape, seed % 2), spec.dtype)
        # Padding, if it is one, stands behind words: cuDNN takes no other.
        is_word = tf.range(spec.shape[-1]) < max(1, spec.shape[-1] - 1)
        return tf.cast(tf.broadcast_to(is_word, spec.shape), spec.dtype)

    return keras.tree.map_structure(example, specifications)


class NoCopy(PlacementError):
    """A layer cannot be copied, and so cannot be run alone."""

    def __init__(self, layer: keras.Layer):
        super().__init__(
            "A layer is measured on a copy that is made of its config, so `get_config` and "
            f"`from_config` are required. Received: layer '{layer.name}' of class "
            f"{original_class(layer).__name__}, which cannot be made again. Give the class a "
            "`get_config`, or take what measures nothing, such as balance='memory'."
        )


class LayerCall(NamedTuple):
    """A call of a layer in a model; calls of one kind take as long.

    Attributes:
        layer: The layer.
        kind: Its class, its configuration and the shapes, as text.
        inputs: The symbolic tensors that it is given.
        outputs: Those that it returns.
        node: Keras's own note of the call; None for a model that is a layer.
        is_first: Whether it reads the model's inputs alone, and sends no gradient back.
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
        """What `program_of` returns, for a copy of the layer alone."""
        try:
            alone = _alone(self.layer, self.inputs, self.node)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise NoCopy(self.layer) from error
        return program_of(alone, batch_size, backward, not self.is_first)


def layer_calls(model: keras.Model) -> Iterator[LayerCall]:
    """Yields each call of each layer, producers before consumers."""
    given = {id(tensor) for tensor in keras.tree.flatten(inputs_of(model))}
    for layer in layers_in_order(model):
        for inputs, outputs, node in _nodes_of(layer, model):
            is_first = all(id(tensor) in given for tensor in keras.tree.flatten(inputs))
            try:
                kind = _kind(layer, inputs, outputs, is_first)
            except NotImplementedError as error:  # Keras's, of a layer without `get_config`.
                raise NoCopy(layer) from error
            yield LayerCall(layer, kind, inputs, outputs, node, is_first)


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
        if takes_training(layer):
            kwargs = {**kwargs, "training": training}
        return layer(*args, **kwargs)


def _alone(layer, inputs, node) -> "keras.Model | _Call":
    """Makes a model of one call of a layer, with weights of its own."""
    if node is None:
        return copy_layers(layer, like) if is_its_graph(layer) else rebuilt(layer)
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
    if has_graph(layer):
        return [(layer.inputs, layer.outputs, None)]
    own = set(map(id, _tensors_of(model)))
    nodes = [
        # One that is read twice, as query and as value, is one input.
        (list({id(t): t for t in node.input_tensors}.values()), node.output_tensors, node)
        for node in calls_to(layer)
        if all(id(tensor) in own for tensor in node.output_tensors)
    ]
    return nodes or [(layer.input, layer.output, None)]


def _tensors_of(model) -> Iterable[Any]:
    return (tensor for node in calls_of(model) for tensor in node.output_tensors)


def _kind(layer, inputs, outputs, is_first) -> str:
    config = {**layer.get_config(), "name": None}
    tensors = keras.tree.flatten((inputs, outputs))
    shapes = [(str(tensor.shape), str(tensor.dtype)) for tensor in tensors]
    what = [type(layer).__name__, config, shapes, is_first]
    return json.dumps(what, default=str, sort_keys=True)
