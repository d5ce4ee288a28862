"""Measurements in addition to those of the layers, for a plan.

* The parts of a step other than layers: loss, updates and sums, on synthetic arrays.
* The overhead of a mesh: the steps of a tiny model, alone, on replicas, in stages.
* One part of a split layer relative to the whole layer:

      seconds of one of T parts = whole · (w + (1 − w)/T)

  w is the fraction of the work that every part repeats. A column reads the whole input, a row
  writes a whole output, and few channels at a time are less efficient than many. One measurement of
  a narrower layer determines w, at the largest possible number of parts.
"""

import statistics
from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf

from tfparallel import devices as device_lib
from tfparallel.callbacks.step_measures import StepTime
from tfparallel.cloning.compiled import metric_like
from tfparallel.extend import original_class
from tfparallel.pipeline.pipeline_parallel import pipeline_parallel
from tfparallel.placement.layer_costs import copy_of
from tfparallel.placement.layer_timing import (
    LayerCall,
    examples,
    layer_calls,
    marginal_seconds,
    program_of,
    specs,
)
from tfparallel.planning.calibration import NUM_MICRO_BATCHES, NUM_ROWS, TinySteps
from tfparallel.replication.data_parallel import data_parallel
from tfparallel.seams.compiled import compile_arguments
from tfparallel.seams.functional import functional_of
from tfparallel.user_log import unnoticed

_FEW, _MANY = 16, 2**20  # Elements of a weight; at most 4 MiB in float32.
_MORE_UPDATES = 3  # After the first. An update has many operations, and is slow to trace.
_NUM_SMALL = 4  # Small weights are measured together, since one takes only microseconds.
# The entries of a layer's config that are divided over the parts.
_COUNTS = ("units", "filters", "num_heads", "num_query_heads", "num_key_value_heads", "input_dim")
_BY_COUNT = ("column", "column, gathered", "heads", "vocabulary")
_NUM_STEPS = 60


def measured_loss(model: keras.Model, batch_size: int) -> float | None:
    """Measures the loss, its gradient and the metrics, on synthetic outputs and targets.

    Args:
        model: A compiled functional or Sequential model, with or without storage.
        batch_size: Number of rows.

    Returns:
        Seconds; None if synthetic targets do not fit the loss.
    """
    inputs = [keras.Input(batch_shape=t.shape, dtype=t.dtype) for t in model.outputs]
    names = [name.partition("/")[0] for name in functional_of(model).output_names]
    if len(set(names)) < len(names):  # Several outputs of one layer share a name.
        names = [f"{name}_{index}" for index, name in enumerate(names)]
    pairs = zip(inputs, names, strict=True)
    outputs = [keras.layers.Identity(name=name)(tensor) for tensor, name in pairs]
    alone = keras.Model(inputs, outputs if len(outputs) > 1 else outputs[0])
    try:
        config = dict(compile_arguments(model))
        for name in ("metrics", "weighted_metrics"):
            config[name] = keras.tree.map_structure(metric_like, config[name])
        names = ("loss", "loss_weights", "metrics", "weighted_metrics")
        alone.compile(**{name: config[name] for name in names})
        return marginal_seconds(_loss_program(alone, batch_size))
    except (ValueError, TypeError, KeyError, AttributeError, tf.errors.OpError):
        return None  # The loss needs targets that only the user can provide.


def _loss_program(alone, batch_size):
    loss = alone.loss
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    is_sparse = "sparse" in name.lower()

    def target(tensor):
        return tf.zeros(tf.shape(tensor)[:-1] if is_sparse else tf.shape(tensor))

    @tf.function(autograph=False)  # Traced once, whatever the number of runs.
    def one(outputs):
        with tf.GradientTape() as tape:
            tape.watch(outputs)
            y_pred = outputs if len(outputs) > 1 else outputs[0]
            y = keras.tree.map_structure(target, y_pred)
            loss = alone.compute_loss(x=None, y=y, y_pred=y_pred, training=True)
        gradients = tape.gradient(loss, outputs)
        alone.compute_metrics(x=None, y=y, y_pred=y_pred)
        ends = [tf.reshape(each, [-1])[0] for each in gradients if each is not None]
        return [tf.cast(end, tf.float32) for end in (loss, *ends)]

    one(examples(specs(alone.inputs, batch_size), 0))  # Metrics may create variables here.

    def program(num_runs):
        batches = [examples(specs(alone.inputs, batch_size), i) for i in range(num_runs)]

        @tf.function(autograph=False)
        def run(batches):
            values = [tf.zeros(())]
            for batch in batches:
                with tf.control_dependencies(values):
                    values = [*values, *one([tf.identity(tensor) for tensor in batch])]
            return tf.add_n(values)

        return lambda: run(batches).numpy()

    return program


def measured_update(optimizer: keras.Optimizer) -> dict[int, float]:
    """Measures the update of a small and of a large weight, by a copy of the optimizer.

    Returns:
        Seconds per weight, by its size in bytes.
    """
    seconds = {}
    for count, number in ((_FEW, _NUM_SMALL), (_MANY, 1)):
        program = _update_program(copy_of(optimizer), count, number)
        seconds[count * 4] = marginal_seconds(program, _MORE_UPDATES) / number
    return seconds


def _update_program(optimizer, count, number) -> Callable:
    variables = [keras.Variable(tf.zeros([count]), dtype="float32") for _ in range(number)]
    optimizer.build(variables)

    @tf.function(autograph=False)  # Traced once, whatever the number of runs.
    def update(gradients):
        optimizer.apply(gradients, variables)

    def program(num_runs):
        @tf.function(autograph=False)
        def run(gradients):
            for _ in range(num_runs):
                update(gradients)
            return tf.add_n([variable.value[0] for variable in variables])

        gradients = [tf.ones([count]) for _ in variables]
        return lambda: run(gradients).numpy()

    return program


def measured_sum() -> float:
    """Measures the seconds per byte of an addition.

    It computes maxima instead, because TensorFlow would merge several sums into one.
    """

    def program(num_runs):
        @tf.function(autograph=False)
        def run(tensors):
            total = tensors[0]
            for _ in range(num_runs):
                total = tf.maximum(total, tensors[1])
            return total[0]

        tensors = [tf.random.stateless_normal([4 * _MANY], [i, 2]) for i in range(2)]
        return lambda: run(tensors).numpy()

    return marginal_seconds(program) / (16 * _MANY)


def measured_whole_shares(
    model: keras.Model,
    splits: Mapping[str, str],
    num_parts: int,
    batch_size: int,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Measures w of each kind of split layer.

    Args:
        model: A functional or Sequential model.
        splits: How each split layer is split, by name.
        num_parts: T.
        batch_size: Number of rows.
        seconds: Time of each whole layer, by name.

    Returns:
        w by layer name, from 0 to 1, for the layers that have a narrower version.
    """
    share_of_kind: dict[tuple[str, str], float | None] = {}
    shares = {}
    for call in layer_calls(model):
        kind = splits.get(call.layer.name)
        if kind not in (*_BY_COUNT, "row"):
            continue
        key = (call.kind, kind)
        if key not in share_of_kind:
            whole_seconds = seconds[call.layer.name]
            share_of_kind[key] = _whole_share(call, kind, num_parts, batch_size, whole_seconds)
        if share_of_kind[key] is not None:
            shares[call.layer.name] = share_of_kind[key]
    return shares


def _whole_share(
    call: LayerCall, kind: str, num_parts: int, batch_size: int, whole_seconds: float
) -> float | None:
    try:
        part = _part_of(call, kind, num_parts)
        program = program_of(part, batch_size, True, not call.is_first)
        part_seconds = marginal_seconds(program)
    except (ValueError, TypeError, tf.errors.OpError):
        return None
    return min(max((part_seconds / whole_seconds - 1 / num_parts) / (1 - 1 / num_parts), 0.0), 1.0)


def _part_of(call: LayerCall, kind: str, num_parts: int) -> keras.Model:
    """Returns a model of a single layer with 1/T of the units or inputs."""
    config = {**call.layer.get_config(), "name": None}
    shapes = [list(tensor.shape) for tensor in call.inputs]
    if kind in _BY_COUNT:
        for name in _COUNTS:
            if isinstance(config.get(name), int):
                config[name] = -(-config[name] // num_parts)
    else:
        shapes[0][-1] = -(-shapes[0][-1] // num_parts)
    new = {
        id(tensor): keras.Input(batch_shape=shape, dtype=tensor.dtype)
        for tensor, shape in zip(call.inputs, shapes, strict=True)
    }
    args, kwargs = call.node.arguments.fill_in(new)
    part = original_class(call.layer).from_config(config)
    return keras.Model(list(new.values()), part(*args, **kwargs))


def measured_tiny_steps(
    optimizer: keras.Optimizer, *, on_replicas: bool, in_stages: bool, in_shares: bool
) -> TinySteps:
    """Measures the steps of the tiny model; those on two devices only if there are two.

    Args:
        optimizer: The optimizer, which is copied.
        on_replicas: Whether to measure a step on two replicas.
        in_stages: Whether to measure a step in two stages.
        in_shares: Whether to measure a step on two replicas that shard the optimizer.
    """

    def measured(under: Callable[[Callable[[], keras.Model]], keras.Model]) -> float:
        with unnoticed():
            return _step_seconds(under(_build), optimizer)

    alone, replicas, stages, shares = measured(lambda build: build()), None, None, None
    if on_replicas or in_stages:
        try:
            devices = device_lib.choose_devices(num_devices=2)
        except (ValueError, RuntimeError):  # One GPU, or TensorFlow already started with one CPU.
            return TinySteps(alone)
        if on_replicas:
            replicas = measured(lambda build: data_parallel(build, devices=devices))
        if in_shares:
            shares = measured(
                lambda build: data_parallel(build, devices=devices, shard="optimizer")
            )
        if in_stages:
            stages = measured(
                lambda build: pipeline_parallel(
                    build, devices, NUM_MICRO_BATCHES, layers_per_stage=[1, 1]
                )
            )
    return TinySteps(alone, replicas, stages, shares)


def _build() -> keras.Model:
    return keras.Sequential([keras.Input((1,)), *(keras.layers.Dense(1) for _ in range(2))])


def _step_seconds(model: keras.Model, optimizer: keras.Optimizer) -> float:
    """Returns the time of an almost empty step of `fit`."""
    model.compile(copy_of(optimizer), "mse")
    steps = StepTime()
    x = np.zeros((_NUM_STEPS * NUM_ROWS, 1), "float32")
    model.fit(x, x, batch_size=NUM_ROWS, verbose=0, callbacks=[steps])
    return statistics.median(steps.seconds[1:])
