"""What evaluates before training, or trains on single batches, leaves as in plain Keras."""

import keras
import numpy as np
import pytest
from keras import layers

import tfparallel
from tests.comparison import assert_equal, seeded
from tests.suites import also_slow
from tfparallel.replication import sharding

DEVICES = ["CPU:0", "CPU:1"]
FORMS = {
    "one device": lambda build: tfparallel.data_parallel(build, devices=DEVICES[:1]),
    "data": lambda build: tfparallel.data_parallel(build, devices=DEVICES),
    "sharded": lambda build: tfparallel.data_parallel(build, devices=DEVICES, shard="optimizer"),
    "model": lambda build: tfparallel.model_parallel(build, DEVICES),
    "tensor": lambda build: tfparallel.tensor_parallel(build, DEVICES),
    "pipeline": lambda build: tfparallel.pipeline_parallel(build, DEVICES, 2),
    "hybrid": lambda build: tfparallel.hybrid_parallel(
        build, tfparallel.Mesh(pipeline=2), DEVICES, num_micro_batches=2
    ),
}
X = np.random.default_rng(0).normal(size=(8, 4))
Y = X.sum(1, keepdims=True)

pytestmark = pytest.mark.usefixtures("in_float64")


def build():
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(6, "tanh", name="first"), layers.Dense(1)]
    )


def trained_after(evaluate, model):
    """Evaluates, freezes a layer, and trains with averages of the trained weights."""
    model.compile(keras.optimizers.Adam(0.1, use_ema=True), "mse", metrics=["mae"])
    evaluate(model)
    assert not model.optimizer.built
    model.get_layer("first").trainable = False
    history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False).history
    return history, model.get_weights()


@pytest.mark.parametrize("form", also_slow(FORMS, {"data", "pipeline"}))
@pytest.mark.parametrize("method", ["evaluate", "test_on_batch"])
def test_evaluation_builds_no_optimizer(form, method):
    def evaluate(model):
        getattr(model, method)(X, Y, **({"verbose": 0} if method == "evaluate" else {}))

    expected = trained_after(evaluate, seeded(build))
    assert_equal(trained_after(evaluate, FORMS[form](lambda: seeded(build))), expected)


def counted_metric():
    metric = keras.metrics.MeanAbsoluteError(name="mae")
    metric.update_state([[0.0], [0.0]], [[100.0], [300.0]])
    return metric


def logs_of_batches(model, metric, first):
    """The logs of single batches, of an evaluation between them, and of a `fit`."""
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[metric])
    logs = []
    if first == "test_on_batch":
        logs.append(model.test_on_batch(X, Y, return_dict=True))
    elif first == "evaluate":
        logs.append(model.evaluate(X, Y, verbose=0, return_dict=True))
    for size in (5, 6, 8):
        logs.append(model.train_on_batch(X[:size], Y[:size], return_dict=True))
        if size == 6:
            logs.append(model.evaluate(X, Y, verbose=0, return_dict=True))
            logs.append(model.test_on_batch(X, Y, return_dict=True))
    history = model.fit(X, Y, batch_size=4, verbose=0, shuffle=False).history
    return {name: [each[name] for each in logs] + values for name, values in history.items()}


@pytest.mark.parametrize("form", also_slow(FORMS, {"data", "pipeline"}))
@pytest.mark.parametrize("first", ["train_on_batch", "test_on_batch", "evaluate"])
@pytest.mark.parametrize("make", [lambda: "mae", counted_metric], ids=["new", "counted"])
def test_single_batches_count_as_in_keras(form, first, make):
    """A metric that has counted before goes on from there in the first step, as in Keras."""
    expected = logs_of_batches(seeded(build), make(), first)
    logs = logs_of_batches(FORMS[form](lambda: seeded(build)), make(), first)
    assert_equal((logs, []), (expected, []))


class Predicts(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.model.predict_on_batch(X)


def test_a_prediction_resets_no_metric():
    histories = []
    for model in (seeded(build), FORMS["data"](lambda: seeded(build))):
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[counted_metric()])
        histories.append(model.fit(X, Y, verbose=0, callbacks=[Predicts()]).history)
    assert_equal((histories[1], []), (histories[0], []), rtol=1e-6)


class BuiltByABatch(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(6, "tanh"), layers.Dense(1)

    def call(self, x):
        return self.last(self.first(x))


@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_later_evaluations_read_the_weights_that_were_sharded(method, monkeypatch):
    monkeypatch.setattr(sharding, "_FEWEST", 4)
    results = []
    for shard in (None, "parameters"):
        model = tfparallel.data_parallel(
            lambda: seeded(BuiltByABatch), devices=DEVICES, shard=shard
        )
        model.compile("adam", "mse")
        arguments = (X, Y) if method == "evaluate" else (X,)
        getattr(model, method)(*arguments, verbose=0)
        model.fit(X, Y, epochs=3, verbose=0)
        results.append(getattr(model, method)(*arguments, verbose=0))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-9)
