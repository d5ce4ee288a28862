"""A replica or micro-batch without rows adds nothing to a gradient, though its dummy row gives NaN.

The gradient of `Normalized` is dy / |dy|, which is 0 / 0 for the dummy row, since no loss reads it.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfparallel
from tests.comparison import seeded
from tfparallel.piece import Piece
from tfparallel.replication import sharding
from tfparallel.replication.dummy_rows import zeros_without_rows

THREE = ["CPU:0", "CPU:1", "CPU:2"]
# Batches of 6: the last has one row.
GENERATOR = np.random.default_rng(1)
X, Y = GENERATOR.normal(size=(13, 4)), GENERATOR.normal(size=(13, 1))
WORDS = GENERATOR.integers(0, 5, size=(13, 4))


class Normalized(keras.layers.Layer):
    """Passes rows on, and normalizes the gradient of each."""

    def call(self, x):
        @tf.custom_gradient
        def passed(x):
            return tf.identity(x), lambda dy: dy / tf.norm(dy, axis=-1, keepdims=True)

        return passed(x)


class Positions(keras.layers.Layer):
    """Adds the embedding of a position: the same indices for all rows, while words depend on them.

    Both are read from one table, so its sparse gradient has two lookups.
    """

    def build(self, shape):
        self.table = self.add_weight(shape=(5, 3), initializer="random_normal")

    def call(self, words):
        position = ops.take(self.table, ops.arange(ops.shape(words)[1]), axis=0)
        return ops.take(self.table, words, axis=0) + position


def dense():
    layers = [keras.layers.Dense(5), Normalized(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *layers])


def normalizes():
    """The gradient of the moments is a sum over all replicas."""
    layers = [keras.layers.Dense(5), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dense(5), Normalized(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *layers])


def looks_up():
    layers = [Positions(), Normalized(), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((4,), dtype="int64"), *layers])


class Penalty(keras.Model):
    """Its loss contains the gradient of its output by the rows."""

    def __init__(self):
        super().__init__()
        self.net = dense()

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                predicted = self(x, training=True)
            slope = inner.gradient(predicted, x)
            loss = ops.mean(ops.square(predicted - y)) + ops.mean(ops.square(slope - 1))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def trained(model, x, run_eagerly):
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=run_eagerly)
    model.fit(x, Y, batch_size=6, shuffle=False, verbose=0)
    return model.get_weights()


def test_a_gradient_of_nan_stays_in_the_replica(in_float64):
    """Story: 0 / 0 of the dummy row was the gradient of every weight."""
    compare(dense)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "options"),
    [
        (normalizes, {}),
        (looks_up, {}),
        (Penalty, {}),
        (normalizes, {"shard": "optimizer"}),
        (normalizes, {"shard": "parameters"}),
        (looks_up, {"shard": "parameters"}),
        (dense, {"pipeline": 1}),
        (looks_up, {"pipeline": 1}),
        (dense, {"pipeline": 1, "schedule": "1f1b"}),
        (dense, {"pipeline": 2}),
        (dense, {"pipeline": 2, "shard": "parameters"}),
        (looks_up, {"pipeline": 2, "shard": "parameters"}),
        (dense, {"pipeline": 1, "run_eagerly": True}),
        (normalizes, {"run_eagerly": True}),
        (looks_up, {"run_eagerly": True, "shard": "parameters"}),
    ],
)
def test_so_does_that_of_more_than_dense_weights(build, options, in_float64, monkeypatch):
    monkeypatch.setattr(sharding, "_FEWEST", 2)
    compare(build, **options)


def compare(build, run_eagerly=False, pipeline=0, **options):
    """Trains on three replicas, or on so many replicas of two stages."""
    x = WORDS if build is looks_up else X
    expected = trained(seeded(build), x, run_eagerly)
    if pipeline == 1:
        options = {"schedule": "gpipe", **options}
        model = tfparallel.pipeline_parallel(lambda: seeded(build), THREE[:2], 3, **options)
    elif pipeline:
        mesh = tfparallel.Mesh(data=pipeline, pipeline=2)
        model = tfparallel.hybrid_parallel(
            lambda: seeded(build), mesh, [*THREE, "CPU:3"], num_micro_batches=2, **options
        )
    else:
        model = tfparallel.data_parallel(lambda: seeded(build), devices=THREE, **options)
    for weight, one in zip(trained(model, x, run_eagerly), expected, strict=True):
        np.testing.assert_allclose(weight, one, rtol=1e-9, atol=1e-12)


def test_a_replica_that_always_has_rows_computes_nothing_more():
    gradient = tf.constant([1.0, np.nan])
    assert zeros_without_rows(Piece(0, 2, 0, 1, 2), [gradient, None]) == [gradient, None]
    zeros, _ = zeros_without_rows(Piece(0, 2, 0, 0, 1), [gradient, None])
    assert zeros.numpy().tolist() == [0.0, 0.0]
