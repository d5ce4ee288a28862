"""A metric that must see all rows has those of its output; nothing else meets for it."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.comparison import assert_equal, seeded, state_of
from tfparallel.step.metrics import StepMetrics

WORDS, HEIGHTS, NUM_EXAMPLES = 11, 3, 19  # No other tensor of the model has such a last axis.


class Largest(keras.metrics.Metric):
    """The largest output so far, which is no sum over the rows."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y, outputs, sample_weight=None):
        weight = 1.0 if sample_weight is None else keras.ops.max(sample_weight)
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(outputs) * weight))

    def result(self):
        return self.largest


def build():
    x = keras.Input((5,))
    hidden = layers.Dense(4, "tanh")(x)
    words = layers.Dense(WORDS, "softmax", name="words")(hidden)
    return keras.Model(x, {"words": words, "height": layers.Dense(HEIGHTS, name="height")(hidden)})


def data():
    random = np.random.default_rng(0)
    y = {
        "words": random.integers(0, WORDS, NUM_EXAMPLES),
        "height": random.normal(size=(NUM_EXAMPLES, HEIGHTS)),
    }
    weights = {"words": np.ones(NUM_EXAMPLES), "height": np.linspace(1.0, 2.0, NUM_EXAMPLES)}
    x = random.normal(size=(NUM_EXAMPLES, 5))
    return keras.tree.map_structure(
        lambda a: a.astype(keras.config.floatx()) if a.dtype == "float64" else a, (x, y, weights)
    )


def compiled(model, own_metric_of="height"):
    metrics = {"words": ["accuracy"], "height": ["mae"]}
    metrics[own_metric_of].append(Largest())
    model.compile(
        keras.optimizers.Adam(0.01),
        {"words": "sparse_categorical_crossentropy", "height": "mse"},
        metrics=metrics,
        weighted_metrics={"height": ["mse", Largest(name="weighted")]},
    )
    return model


FORMS = {
    "data": lambda: tfparallel.data_parallel(
        lambda: seeded(build), devices=["CPU:0", "CPU:1", "CPU:2"]
    ),
    "1f1b": lambda: tfparallel.pipeline_parallel(
        lambda: seeded(build), ["CPU:0", "CPU:1"], 4, schedule="1f1b"
    ),
    "gpipe": lambda: tfparallel.pipeline_parallel(
        lambda: seeded(build), ["CPU:0", "CPU:1"], 4, schedule="gpipe"
    ),
}


def trained(model, **options):
    x, y, weights = data()
    fitted = {"batch_size": 7, "epochs": 2, "shuffle": False, "verbose": 0} | options
    history = model.fit(x, y, sample_weight=weights, **fitted).history
    tested = model.evaluate(x, y, batch_size=7, sample_weight=weights, verbose=0, return_dict=True)
    return history | {f"test_{name}": [value] for name, value in tested.items()}, state_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eagerly", [False, True], ids=["graph", "eager"])
def test_it_is_that_of_one_device(in_float64, form, eagerly):
    one = compiled(seeded(build))
    model = compiled(FORMS[form]())
    one.run_eagerly = model.run_eagerly = eagerly
    assert_equal(trained(model), trained(one), rtol=1e-6)  # Metrics are float32.


def joined_in(model, form) -> collections.Counter:
    """How many tensors of each length of the last axis a step joins, of a batch of 7."""
    x, y, weights = keras.tree.map_structure(lambda array: tf.constant(array[:7]), data())

    @tf.function(autograph=False)
    def step(x, y, weights):
        if form == "data":
            with model.strategy.program():
                return model.train_step((x, y, weights))
        return model.train_step((x, y, weights))

    operations = step.get_concrete_function(x, y, weights).graph.get_operations()
    shapes = [op.outputs[0].shape for op in operations if op.type == "ConcatV2"]
    return collections.Counter(shape[-1] for shape in shapes if shape.rank == 2)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_no_other_output_meets(form):
    model = compiled(FORMS[form]())
    model.optimizer.build(model.trainable_variables)
    x, y, _ = data()
    model.train_on_batch(x[:7], keras.tree.map_structure(lambda array: array[:7], y))
    joined = joined_in(model, form)
    assert joined[HEIGHTS] and not joined[WORDS]
    assert model.why_joined.startswith("metric 'largest' might not be a sum over the examples: ")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_log_names_an_output_that_is_joined_for_a_metric(form, caplog):
    x, y, _ = data()
    with caplog.at_level("INFO", logger="absl"):
        compiled(FORMS[form]()).train_on_batch(x, y)
    size = NUM_EXAMPLES * HEIGHTS * 4
    assert (
        f"gathering output 'height' for the whole batch on one device ({size} bytes per batch), "
        "only for metrics, because metric 'largest' might not be a sum over the examples: "
        "operation Max" in caplog.text
    )


@pytest.mark.slow
def test_metrics_are_divided_by_output():
    model = compiled(build())
    x, y, weights = data()
    model.train_on_batch(x, y, weights)
    compile_metrics, outputs = model._compile_metrics, model(x)
    assert StepMetrics.divided(compile_metrics, ()) == (compile_metrics, None)
    assert StepMetrics.divided(None, ()).places(outputs) == []
    (accuracy,) = [m for m in compile_metrics.metrics if m.name == "accuracy"]
    divided = StepMetrics.divided(compile_metrics, {id(accuracy)})
    assert divided.joined.metrics == [accuracy]
    assert len(divided.summed.metrics) == len(compile_metrics.metrics) - 1
    names = list(outputs)
    place = keras.tree.flatten({name: name for name in names}).index("words")
    assert divided.places(outputs) == [place]


@pytest.mark.slow
def test_keras_keeps_metrics_by_output():
    """The canary of `StepMetrics`: fails when Keras keeps them otherwise."""
    model = compiled(build())
    model.train_on_batch(*data())
    by_output = model._compile_metrics._flat_metrics
    assert [[m.name for m in metrics.metrics] for metrics in by_output] == [
        ["accuracy"] if name == "words" else ["mae", "largest"] for name in model.output_names
    ]


class BeginsAtOne(keras.metrics.Metric):
    """Its first epoch begins at one, as Keras resets a metric once it has been updated."""

    def __init__(self):
        super().__init__(name="begins")
        self.total = self.add_variable((), "ones", name="total")

    def update_state(self, y, outputs, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.abs(y - outputs)))

    def result(self):
        return self.total


def test_what_a_metric_begins_with_counts_once():
    """Story: under `MirroredStrategy` each replica's copy began with it."""
    x = np.linspace(-1, 1, 12, dtype="float32").reshape(6, 2)
    seen = []
    for strategy in (tf.distribute.get_strategy(), tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])):
        with strategy.scope():
            model = seeded(lambda: keras.Sequential([keras.Input((2,)), layers.Dense(1)]))
            model.compile("sgd", "mse", metrics=[BeginsAtOne()])
        history = model.fit(x, x[:, :1], epochs=2, batch_size=4, shuffle=False, verbose=0).history
        seen.append(history["begins"])
    np.testing.assert_allclose(seen[1], seen[0], rtol=1e-5)


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize("form", ["builder", "drop-in"])
def test_a_step_of_ones_own_has_compiled_metrics(form):
    """Its metrics are made in its trace."""
    x = np.linspace(-1, 1, 12, dtype="float32").reshape(6, 2)

    def built():
        inputs = keras.Input((2,))
        return seeded(lambda: OwnStep(inputs, layers.Dense(1)(inputs)))

    def trained(model):
        model.compile("sgd", "mse", metrics=["mae"])
        return model.fit(x, x[:, :1], epochs=2, batch_size=4, shuffle=False, verbose=0).history

    expected = trained(built())
    if form == "builder":
        history = trained(tfparallel.data_parallel(built, devices=["CPU:0", "CPU:1"]))
    else:
        with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
            model = built()
        history = trained(model)
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)


def test_a_metric_that_reads_a_weight_reads_it_behind_the_update():
    def on_two(build):
        return tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1"])

    x = np.linspace(-1, 1, 12, dtype="float32").reshape(6, 2)
    seen = []
    for wrap in (lambda build: build(), on_two):
        model = wrap(lambda: seeded(lambda: keras.Sequential([keras.Input((2,)), layers.Dense(1)])))
        kernel = model.layers[-1].kernel
        model.compile(
            keras.optimizers.SGD(0.3),
            "mse",
            metrics=[lambda y, p, k=kernel: keras.ops.abs(y - p) * keras.ops.sum(k**2)],
        )
        history = model.fit(x, x[:, :1], epochs=2, batch_size=4, shuffle=False, verbose=0).history
        seen.append(list(history.values()))
    np.testing.assert_allclose(seen[1], seen[0], rtol=1e-5)
