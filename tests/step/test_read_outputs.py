"""Outputs that no loss and no metric reads may have any shape, as in Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.comparison import seeded

TWO = ["CPU:0", "CPU:1"]
GENERATOR = np.random.default_rng(1)
X, Y = GENERATOR.normal(size=(11, 3)), GENERATOR.normal(size=(11, 1))
NOT_READ = np.zeros((11, 1))
SIDES = {
    "table": lambda x, table: table * 2.0,
    "scalar": lambda x, table: tf.reduce_sum(table),
    "mean of the batch": lambda x, table: tf.reduce_mean(x),
    "rows per example": lambda x, table: tf.reshape(x, (-1, 1)),
}


class Side(keras.layers.Layer):
    def __init__(self, kind):
        super().__init__(name="side")
        self.kind = kind
        self.table = self.add_weight(shape=(3, 2), name="table", trainable=False)

    def call(self, x):
        return SIDES[self.kind](x, self.table)


class TwoOutputs(keras.Model):
    def __init__(self, kind):
        super().__init__()
        self.hidden, self.last = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)
        self.side = Side(kind)

    def call(self, x):
        x = self.hidden(x)
        return {"main": self.last(x), "side": self.side(x)}


def functional(kind):
    inputs = keras.Input((3,))
    x = keras.layers.Dense(4, "tanh")(inputs)
    return keras.Model(inputs, [keras.layers.Dense(1)(x), Side(kind)(x)])


def trained(model, loss, y, metrics, **options):
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=metrics, **options)
    logs = model.fit(X, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
    logs = [*logs.values(), model.evaluate(X, y, batch_size=5, verbose=0)]
    return [*model.get_weights(), *map(np.array, logs)]


def test_they_do_not_count(in_float64):
    """Story: all outputs had to have a row per example, those that nobody reads as well."""
    compare(functional, "table")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "kind", "options"),
    [
        (functional, "mean of the batch", {}),
        (TwoOutputs, "scalar", {}),
        (TwoOutputs, "rows per example", {}),
        (functional, "table", {"run_eagerly": True}),
        (functional, "rows per example", {"run_eagerly": True}),
    ],
)
def test_nor_do_others(build, kind, options, in_float64):
    compare(build, kind, **options)


def compare(build, kind, **options):
    loss, y, metrics = ["mse", None], [Y, NOT_READ], [["mae"], []]
    if build is TwoOutputs:
        names = ("main", "side")
        loss, y, metrics = (dict(zip(names, each, strict=True)) for each in (loss, y, metrics))
    expected = trained(seeded(lambda: build(kind)), loss, y, metrics, **options)
    model = tfparallel.data_parallel(lambda: seeded(lambda: build(kind)), devices=TWO)
    for one, other in zip(trained(model, loss, y, metrics, **options), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    if kind != "rows per example":
        with pytest.raises(ValueError, match="does not have a row for each example|Mean"):
            model.predict(X, batch_size=5, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["data", "pipeline"])
def test_rows_are_not_taken_for_the_targets_of_outputs(form, in_float64):
    """Story: Keras took two rows of an eager replica for the targets of its two outputs."""

    def build():
        inputs = keras.Input((3,))
        x = keras.layers.Dense(4, "tanh")(inputs)
        return keras.Model(inputs, [keras.layers.Dense(1)(x), keras.layers.Dense(1)(x)])

    expected = trained(seeded(build), ["mse", None], Y, None, run_eagerly=True)
    if form == "data":
        model = tfparallel.data_parallel(lambda: seeded(build), devices=TWO)
    else:
        model = tfparallel.pipeline_parallel(lambda: seeded(build), TWO, 2)
    placed = trained(model, ["mse", None], Y, None, run_eagerly=True)
    for one, other in zip(placed, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_one_that_a_metric_reads_is_judged(run_eagerly):
    """The proof of an eager step, in which no metric read it, does not hold for another metric."""
    model = tfparallel.data_parallel(lambda: functional("scalar"), devices=TWO)
    model.compile("sgd", ["mse", None], run_eagerly=run_eagerly)
    model.evaluate(X, [Y, NOT_READ], batch_size=11, verbose=0)
    model.compile("sgd", ["mse", None], metrics=[[], ["mae"]], run_eagerly=run_eagerly)
    with pytest.raises(ValueError, match="class Side .*output 1 does not have a row"):
        model.evaluate(X, [Y, NOT_READ], batch_size=11, verbose=0)


def test_their_targets_may_be_left_out(in_float64):
    loss, metrics = ["mse", None], [["mae"], None]
    expected = trained(seeded(lambda: functional("table")), loss, Y, metrics)
    model = tfparallel.data_parallel(lambda: seeded(lambda: functional("table")), devices=TWO)
    for one, other in zip(trained(model, loss, Y, metrics), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
