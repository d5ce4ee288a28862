"""The rows of a call's arguments, and the masks beside them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.comparison import seeded
from tfparallel.piece import Piece
from tfparallel.replication import sharding
from tfparallel.replication.inputs import BatchInputs


def masked():
    x = tf.ones((4, 3, 2))
    x._keras_mask = tf.constant([[True, True, False]] * 4)
    return x


def split(inputs, num_rows):
    return inputs.split([Piece(k, 2, k * num_rows // 2, num_rows // 2, num_rows) for k in (0, 1)])


def test_a_mask_that_a_call_takes_off_its_rows_is_off_the_batch():
    """As Keras's attention does: what is called later finds none, as on one device."""
    x, untouched = masked(), masked()
    inputs = BatchInputs((x, x, untouched), {})
    parts = split(inputs, 4)
    for rows in parts[0][:2]:
        rows._keras_mask = None
    inputs.take_off_masks(parts[0])
    assert x._keras_mask is None and untouched._keras_mask is not None


def test_the_row_that_stands_for_none_has_a_mask():
    x = masked()[:0]
    x._keras_mask = tf.zeros((0, 3), tf.bool)
    (rows,), _ = BatchInputs((x,), {}, may_be_empty=True).structure
    np.testing.assert_array_equal(rows._keras_mask, [[True] * 3])


class Scales(keras.Model):
    """Its call reads a number that it trains, or the value of one that it does not."""

    def __init__(self, is_trained, is_kept):
        super().__init__()
        self.is_kept, self.scale = is_kept, None
        self.dense = keras.layers.Dense(2)
        self.number = self.add_weight(shape=(), initializer="ones", trainable=is_trained)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x, scale=None):
        return self.dense(x) * (self.scale if self.is_kept else scale)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            self.scale = tf.exp(self.number.value)
            arguments = () if self.is_kept else (self.scale,)
            loss = self.compute_loss(y=y, y_pred=self(x, *arguments))
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_number_whose_gradient_would_be_lost_is_refused(is_kept):
    x, y = np.ones((4, 3), "float32"), np.ones((4, 2), "float32")

    def train(is_trained):
        def build():
            model = Scales(is_trained, is_kept)
            model.build((None, 3))
            return model

        model = tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1"])
        model.compile("sgd", "mse")
        model.fit(x, y, verbose=0)

    train(False)
    with pytest.raises(ValueError, match=r"its gradient would be lost.*shape \(\), in a call"):
        train(True)


class Halves(keras.Model):
    """Its step calls two layers, of which the second computes with a weight of the first's."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(5, "tanh")

        def read(x):
            return keras.ops.matmul(x, keras.ops.transpose(self.first.kernel))

        self.second = keras.Sequential([keras.layers.Dense(5), keras.layers.Lambda(read)])

    def call(self, x):
        return self.second(self.first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self.second(self.first(x)))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("shard", [None, "optimizer", "parameters"])
def test_a_weight_of_another_layer_has_the_gradient_of_all_that_read_it(
    shard, run_eagerly, in_float64, monkeypatch
):
    """Story: what the second layer made of it was lost, and nothing said so."""
    monkeypatch.setattr(sharding, "_FEWEST", 2)

    def build():
        model = seeded(Halves)
        model.build((None, 3))
        return model

    def trained(model):
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
        x = np.random.default_rng(0).normal(size=(10, 3))
        model.fit(x, x, batch_size=7, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    actual = trained(tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1"], shard=shard))
    for weight, one in zip(actual, trained(build()), strict=True):
        np.testing.assert_allclose(weight, one, rtol=1e-12)
