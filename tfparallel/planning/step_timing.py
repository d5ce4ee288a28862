"""Measures the parts of a step other than layers: loss, updates and sums, on synthetic arrays."""

from collections.abc import Callable

import keras
import tensorflow as tf

from tfparallel.cloning.compiled import metric_like
from tfparallel.placement.layer_costs import copy_of
from tfparallel.placement.layer_timing import examples, marginal_seconds, specs
from tfparallel.seams.compiled import compile_arguments
from tfparallel.seams.functional import functional_of

_FEW, _MANY = 16, 2**20  # Elements of a weight; at most 4 MiB in float32.
_MORE_UPDATES = 3  # After the first. An update has many operations, and is slow to trace.
_NUM_SMALL = 4  # Small weights are measured together, since one takes only microseconds.


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
