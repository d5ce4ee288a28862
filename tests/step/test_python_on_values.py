"""With `run_eagerly`, losses, metrics and layers may be Python on values, such as `.numpy()`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.comparison import seeded

TWO = ["CPU:0", "CPU:1"]
GENERATOR = np.random.default_rng(1)
X, Y = GENERATOR.normal(size=(11, 3)), GENERATOR.normal(size=(11, 1))


class ErrorOfValues(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="error_of_values")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(np.abs(np.asarray(y_true) - y_pred.numpy()).sum())

    def result(self):
        return self.total


class LossOfValues(keras.losses.Loss):
    def call(self, y_true, y_pred):
        scale = 2.0 if y_true.numpy().max() > 0.5 else 1.0  # Of the whole batch.
        return scale * tf.reduce_mean(tf.square(y_true - y_pred), -1)


class LayerOfValues(keras.layers.Layer):
    def compute_output_shape(self, shape):
        return shape

    def call(self, x):
        return x * float(np.sign(x.numpy().size))


class Net(keras.Model):
    """Is built by its first batch."""

    def __init__(self):
        super().__init__()
        self.hidden, self.last = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)

    def call(self, x):
        return self.last(self.hidden(x))


def net(*more):
    inner = [keras.layers.Dense(4, "tanh"), *(layer() for layer in more)]
    return keras.Sequential([keras.Input((3,)), *inner, keras.layers.Dense(1)])


def pipeline(build):
    return tfparallel.pipeline_parallel(build, TWO, 2, schedule="gpipe")


def replicated(build, **options):
    return tfparallel.data_parallel(build, devices=TWO, **options)


def trained(model, loss, metrics, on_batches=False):
    model.compile(keras.optimizers.Adam(0.01), loss(), metrics=metrics(), run_eagerly=True)
    if on_batches:
        logs = [model.train_on_batch(X[at : at + 5], Y[at : at + 5]) for at in (0, 5, 10)]
    else:
        logs = model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        logs = [*logs.values(), model.evaluate(X, Y, batch_size=5, verbose=0)]
    return [*model.get_weights(), *map(np.array, logs)]


@pytest.mark.parametrize(
    ("place", "build", "loss", "metrics", "on_batches"),
    [
        (replicated, net, keras.losses.MeanSquaredError, lambda: [ErrorOfValues()], False),
        (replicated, net, LossOfValues, lambda: ["mae"], False),
        (replicated, net, LossOfValues, lambda: [ErrorOfValues(), "mae"], True),
        (replicated, Net, LossOfValues, lambda: [ErrorOfValues()], False),
        (pipeline, net, LossOfValues, lambda: [ErrorOfValues()], False),
    ],
)
def test_losses_and_metrics_get_the_whole_batch(
    place, build, loss, metrics, on_batches, in_float64
):
    """Story: the model was built by a symbolic call of them, in which tensors have no values."""
    expected = trained(seeded(build), loss, metrics, on_batches)
    placed = trained(place(lambda: seeded(build)), loss, metrics, on_batches)
    for one, other in zip(placed, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_a_layer_of_values_cannot_be_judged(in_float64):
    def build():
        return seeded(lambda: net(LayerOfValues))

    loss, metrics = keras.losses.MeanSquaredError, lambda: ["mae"]
    with pytest.raises(ValueError, match=r"LayerOfValues.*Use tensor operations.*check_rows=False"):
        trained(replicated(build), loss, metrics)
    expected = trained(build(), loss, metrics)
    for one, other in zip(
        trained(replicated(build, check_rows=False), loss, metrics), expected, strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_a_wrong_loss_raises_its_own_error():
    model = replicated(net)
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Incompatible shapes"):
        model.fit(X, np.zeros((11, 2, 2)), verbose=0)
