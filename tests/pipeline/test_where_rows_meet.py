"""Losses and metrics of micro-batches, added up: no outputs meet, unless they must."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.comparison import assert_equal, seeded, state_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_float64")]

SCHEDULES = ["gpipe", "1f1b"]
NUM_MICRO_BATCHES, NUM_EXAMPLES, LENGTH = 3, 12, 13  # The length names an output in a graph.


class OwnSquares(keras.losses.Loss):
    """Looks at all examples, to no effect."""

    def call(self, y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 2, -1) + 0 * keras.ops.max(y_pred)


class Largest(keras.metrics.Metric):
    """The largest output: not a sum over the rows."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self):
        return self.value


def build():
    inputs = keras.Input((4,))
    x = layers.Dense(6, activation="tanh")(inputs)
    x = layers.Dense(5, activation="tanh", kernel_regularizer="l2")(x)
    return keras.Model(inputs, layers.Dense(LENGTH, activation="sigmoid")(x))


def data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM_EXAMPLES + 2, 4))  # A last batch of 2, for 3 micro-batches.
    y = generator.integers(0, 2, size=(NUM_EXAMPLES + 2, LENGTH)).astype("float64")
    return x, y, generator.uniform(size=NUM_EXAMPLES + 2)


def kerass():
    return {
        "loss": keras.losses.BinaryCrossentropy(reduction="mean_with_sample_weight"),
        "metrics": ["mae", keras.metrics.BinaryIoU(name="iou")],
        "weighted_metrics": ["accuracy", keras.metrics.AUC(num_thresholds=20, name="auc")],
    }


def compiled(model, options):
    model.compile(keras.optimizers.Adam(0.01), **options)
    return model


def pipelined(schedule):
    return tfparallel.pipeline_parallel(
        lambda: seeded(build), ["CPU:0", "CPU:1"], NUM_MICRO_BATCHES, schedule=schedule,
        layers_per_stage=[2, 1],
    )  # fmt: skip


def trained(model):
    x, y, weights = data()
    fitted = {"batch_size": NUM_EXAMPLES, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(x, y, sample_weight=weights, **fitted).history, state_of(model)


def joins_outputs(model):
    """Whether the passes of a step lay rows of outputs end to end."""
    x, y, weights = (tf.constant(array[:NUM_EXAMPLES]) for array in data())

    @tf.function(autograph=False)
    def step(x, y, weights):
        result = model.passes(x, y, weights).run(x, y, weights)
        return result.loss, result.gradients

    operations = step.get_concrete_function(x, y, weights).graph.get_operations()
    joined = [op.outputs[0].shape for op in operations if op.type == "ConcatV2"]
    return any(shape.rank == 2 and shape[1] == LENGTH for shape in joined)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_outputs_of_all_micro_batches_are_nowhere(schedule):
    model = compiled(pipelined(schedule), kerass())
    assert not joins_outputs(model)
    assert model.why_joined is None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_and_metrics_are_those_of_the_whole_batch(schedule):
    expected = trained(compiled(seeded(build), kerass()))
    actual = trained(compiled(pipelined(schedule), kerass()))
    assert actual[0].keys() == expected[0].keys()
    assert_equal(actual, expected, rtol=1e-6)  # Metrics are float32.
    assert_equal(({}, actual[1]), ({}, expected[1]), rtol=1e-10)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("loss 'own_squares' might mix examples", lambda: {"loss": OwnSquares(name="own_squares")}),
        ("metric 'largest' might not be", lambda: {"loss": "mse", "metrics": [Largest()]}),
    ],
    ids=["loss", "metric"],
)
def test_where_they_must_they_meet(schedule, what, options):
    expected = trained(compiled(seeded(build), options()))
    model = compiled(pipelined(schedule), options())
    actual = trained(model)
    assert what in model.why_joined
    assert joins_outputs(model)
    assert_equal(actual, expected, rtol=1e-6)
    assert_equal(({}, actual[1]), ({}, expected[1]), rtol=1e-10)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("what", ["loss", "metric"])
def test_one_tensor_as_two_outputs_meets_as_both(schedule, what):
    """Two losses of one prediction: the outputs have one key between them."""

    def build_two():
        model = build()
        return keras.Model(model.inputs, {"a": model.output, "b": model.output})

    def fitted(model):
        x, y, _ = data()
        if what == "loss":
            compiled(model, {"loss": {"a": OwnSquares(), "b": "mae"}})
        else:
            compiled(model, {"loss": "mse", "metrics": {"a": [Largest()], "b": [Largest()]}})
        options = {"batch_size": NUM_EXAMPLES, "shuffle": False, "verbose": 0}
        return model.fit(x, {"a": y, "b": y / 2}, **options).history, state_of(model)

    expected = fitted(seeded(build_two))
    model = tfparallel.pipeline_parallel(
        lambda: seeded(build_two), ["CPU:0", "CPU:1"], NUM_MICRO_BATCHES, schedule=schedule,
        layers_per_stage=[2, 1],
    )  # fmt: skip
    actual = fitted(model)
    assert model.why_joined is not None
    assert_equal(actual, expected, rtol=1e-6)
    assert_equal(({}, actual[1]), ({}, expected[1]), rtol=1e-10)
