"""Weights that were created frozen, and those that were frozen later, once they are unfrozen."""

import keras
import numpy as np
import pytest
from keras import layers

import tfparallel
from tests.comparison import assert_equal, seeded
from tests.suites import also_slow
from tfparallel import Mesh
from tfparallel.replication import sharding

DEVICES = [f"CPU:{k}" for k in range(4)]
TWO = DEVICES[:2]
FORMS = {
    "data": lambda build: tfparallel.data_parallel(build, devices=TWO),
    "shares": lambda build: tfparallel.data_parallel(build, devices=TWO, shard="parameters"),
    "model": lambda build: tfparallel.model_parallel(build, TWO),
    "gpipe": lambda build: tfparallel.pipeline_parallel(build, TWO, 2, schedule="gpipe"),
    "1f1b": lambda build: tfparallel.pipeline_parallel(build, TWO, 2, schedule="1f1b"),
    "stages of parts": lambda build: tfparallel.hybrid_parallel(
        build, Mesh(pipeline=2, tensor=2), DEVICES, num_micro_batches=2
    ),
    "sharded": lambda build: tfparallel.hybrid_parallel(
        build, Mesh(data=2, pipeline=2), DEVICES, num_micro_batches=2, shard="parameters"
    ),
}
X = np.random.default_rng(0).normal(size=(9, 4))
Y = X.sum(1, keepdims=True)

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture(autouse=True)
def shard_small_weights(monkeypatch):
    monkeypatch.setattr(sharding, "_FEWEST", 4)


@keras.saving.register_keras_serializable("tests")
class Scales(layers.Layer):
    """Scales its inputs by two weights, one of which was created frozen."""

    def build(self, shape):
        arguments = {"shape": shape[-1:], "initializer": "ones", "regularizer": "l2"}
        self.fixed = self.add_weight(**arguments, trainable=False, name="fixed")
        self.free = self.add_weight(**arguments, name="free")

    def call(self, x):
        return x * self.fixed * self.free


def scaled():
    """A model that unfreezes a weight that was created frozen."""
    x = keras.Input((4,))
    scales = Scales(name="scales")
    model = keras.Model(x, layers.Dense(1)(scales(layers.Dense(6, "tanh")(x))))
    scales.fixed.trainable = True
    return model


@keras.saving.register_keras_serializable("tests")
class FrozenFirst(keras.Model):
    """A functional model of a class of its own, which freezes its first layer."""

    def __init__(self, units=6, **kwargs):
        x, first = keras.Input((4,)), layers.Dense(units, "tanh", name="first")
        super().__init__(x, layers.Dense(1, name="last")(first(x)), **kwargs)
        first.trainable = False
        self.units = units

    def get_config(self):
        return {"units": self.units}


def trained(model, unfreeze=None):
    histories = []
    for layer in [None] if unfreeze is None else [None, unfreeze]:
        if layer is not None:
            model.get_layer(layer).trainable = True
        model.compile(keras.optimizers.Adam(0.1), "mse")
        histories.append(model.fit(X, Y, batch_size=9, epochs=2, verbose=0, shuffle=False))
    return histories[-1].history, model.get_weights()


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("from_model", [False, True])
@pytest.mark.parametrize("form", also_slow(FORMS, {"shares", "model", "gpipe"}))
def test_a_weight_that_was_created_frozen_stays_so_as_in_keras(form, from_model):
    expected = trained(seeded(scaled))
    model = FORMS[form](seeded(scaled) if from_model else lambda: seeded(scaled))
    assert_equal(trained(model), expected)
    assert (model.get_layer("scales").fixed.numpy() == 1).all()
    assert model.get_layer("scales").fixed.trainable


@pytest.mark.parametrize("from_model", [False, True])
@pytest.mark.parametrize("form", also_slow(FORMS, {"model", "gpipe"}))
def test_a_layer_that_was_frozen_trains_once_it_is_unfrozen(form, from_model):
    expected = trained(seeded(FrozenFirst), unfreeze="first")
    model = FORMS[form](seeded(FrozenFirst) if from_model else lambda: seeded(FrozenFirst))
    assert_equal(trained(model, unfreeze="first"), expected)
