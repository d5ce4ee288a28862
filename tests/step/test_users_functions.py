"""A `tf.function` of the user's own, in a metric or a layer: it is traced for the steps alone."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.tracing.apart import traced_apart

TWO = ["CPU:0", "CPU:1"]
FORMS = {
    "one": lambda model: tfparallel.data_parallel(model, devices=["CPU:0"]),
    "data": lambda model: tfparallel.data_parallel(model, devices=TWO),
    "model": lambda model: tfparallel.model_parallel(model, TWO),
    "pipeline": lambda model: tfparallel.pipeline_parallel(model, TWO, num_micro_batches=2),
    "tensor": lambda model: tfparallel.tensor_parallel(model, TWO),
}


class Farthest(keras.metrics.Metric):
    """The sum of the errors, added up in a function."""

    def __init__(self, name="farthest", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_variable(shape=(), initializer="zeros", name="total")

    @tf.function
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(tf.abs(y_true - y_pred)))

    def result(self):
        return self.total


class Counts(keras.layers.Layer):
    """Adds to its inputs how often it was called, in a function; its shapes need no call."""

    def build(self, input_shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")
        self.function = tf.function(self.count)

    def count(self, inputs):
        self.calls.assign_add(1.0)
        return inputs + 0.1 * self.calls

    def call(self, inputs):
        return self.function(inputs)

    def compute_output_shape(self, input_shape):
        return input_shape


def trained(form=None, *layers, metrics=()):
    """What `fit` and `evaluate` tell, and the states."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(4), *layers, keras.layers.Dense(2)]
    )
    if form is not None:
        model = FORMS[form](model)
    model.compile("sgd", "mse", metrics=list(metrics), jit_compile=False)
    x, y = np.ones((8, 6), "float32"), np.ones((8, 2), "float32")
    told = model.fit(x, y, batch_size=4, epochs=2, verbose=0).history
    told["evaluated"] = model.evaluate(x, y, batch_size=4, verbose=0)
    told["states"] = [v.numpy() for v in model.non_trainable_variables]
    return told


def assert_same(told, expected):
    assert told.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(told[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_of_a_metric(form):
    """Story: of what was traced ahead, for shapes, the metric's next call had no update."""
    assert_same(trained(form, metrics=[Farthest()]), trained(metrics=[Farthest()]))


@pytest.mark.parametrize("form", ["one", "model", "tensor"])
def test_of_a_layer_with_a_state(form):
    """Story: a cost, a copy's outputs and a proof were traced, and the state stayed as it was."""
    expected = trained(None, Counts())
    assert expected["states"] == [4.0 + 2.0]
    assert_same(trained(form, Counts()), expected)


@pytest.mark.parametrize("apart", [False, True])
def test_tensorflow_keeps_what_it_has_traced_where_writes_are_dropped(apart):
    """The canary: a function's trace is its next call's, and has no write."""
    state = keras.Variable(0.0)

    @tf.function
    def add():
        state.assign_add(1.0)

    with keras.StatelessScope(), tf.__internal__.FuncGraph("shapes").as_default():
        with traced_apart() if apart else contextlib.nullcontext():
            add()
    add()
    assert float(state.numpy()) == float(apart)
