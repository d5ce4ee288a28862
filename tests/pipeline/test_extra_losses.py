"""Losses of layers and regularizers whose gradients are not those of a plain sum."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import tfparallel
from tests.comparison import assert_equal, seeded, state_of

DEVICES = [f"CPU:{k}" for k in range(4)]
FORMS = {
    "gpipe": lambda build: tfparallel.pipeline_parallel(build, DEVICES[:2], 2, schedule="gpipe"),
    "recomputed": lambda build: tfparallel.pipeline_parallel(
        build, DEVICES[:2], 2, schedule="gpipe", recompute="always"
    ),
    "1f1b": lambda build: tfparallel.pipeline_parallel(build, DEVICES[:2], 2, schedule="1f1b"),
    "hybrid": lambda build: tfparallel.hybrid_parallel(
        build, tfparallel.Mesh(data=2, pipeline=2), DEVICES, num_micro_batches=2, schedule="gpipe"
    ),
}
X = np.random.default_rng(0).normal(size=(13, 4))
Y = X.sum(1, keepdims=True)


class Penalizes(layers.Layer):
    def __init__(self, power):
        super().__init__()
        self.power = power

    def call(self, x):
        self.add_loss(0.3 * ops.mean(ops.abs(x) ** self.power))
        return x


class Half(keras.Model):
    """Scales all losses."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return 0.5 * super().compute_loss(x, y, y_pred, sample_weight, training)


class Without(keras.Model):
    """Leaves out what layers add."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred))


def penalized(cls):
    def build():
        x = keras.Input((4,))
        middle = Penalizes(3)(Penalizes(2)(layers.Dense(5, activation="tanh")(x)))
        return cls(x, layers.Dense(1)(Penalizes(1)(layers.Dense(3)(middle))))

    return build


def shares_softly():
    """The regularizer of one weight reads another, which trains on another device."""
    x, first = keras.Input((4,)), layers.Dense(4)
    hidden = first(x)
    second = layers.Dense(4, kernel_regularizer=lambda w: 0.1 * ops.sum((w - first.kernel) ** 2))
    return keras.Model(x, layers.Dense(1)(second(hidden)))


def trained(model):
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    history = model.fit(X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0)
    return history.history, state_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gpipe", "recomputed", "hybrid"])
@pytest.mark.parametrize("cls", [Half, Without])
def test_a_loss_of_ones_own_weighs_what_layers_add(in_float64, form, cls):
    """Story: it had the gradient of a plain sum, whatever `compute_loss` did with it."""
    build = penalized(cls)
    expected = trained(seeded(build))
    assert_equal(trained(seeded(lambda: FORMS[form](build))), expected, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_regularizer_trains_the_other_weights_that_it_reads(in_float64, form):
    """Story: they got no gradient of it."""
    expected = trained(seeded(shares_softly))
    assert_equal(trained(seeded(lambda: FORMS[form](shares_softly))), expected, rtol=1e-9)
