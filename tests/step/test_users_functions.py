"""A `tf.function` of the user's own, in a metric or a layer: it is traced for the steps alone."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.tracing.trial_trace import traced_apart

TWO = ["CPU:0", "CPU:1"]
FORMS = {
    "one": lambda build: tfparallel.data_parallel(build(), devices=["CPU:0"]),
    "data": lambda build: tfparallel.data_parallel(build(), devices=TWO),
    "model": lambda build: tfparallel.model_parallel(build(), TWO),
    "model of a function": lambda build: tfparallel.model_parallel(build, TWO),
    "pipeline": lambda build: tfparallel.pipeline_parallel(build(), TWO, num_micro_batches=2),
    "tensor": lambda build: tfparallel.tensor_parallel(build(), TWO),
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
    """Counts its calls, in a function, and adds some of the number; its shapes need no call."""

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


def batches(rows):
    """Two batches of as many rows; of None, of four, which the data set does not tell."""
    x, y = np.ones((2 * (rows or 4), 6), "float32"), np.ones((2 * (rows or 4), 2), "float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(rows or 4, drop_remainder=True)
    if rows:
        return dataset
    of_any = (tf.TensorSpec((None, 6)), tf.TensorSpec((None, 2)))
    of_unknown_size = tf.data.Dataset.from_generator(lambda: iter(dataset), output_signature=of_any)
    return of_unknown_size.apply(tf.data.experimental.assert_cardinality(2))


def trained(form=None, *layers, metrics=(), rows=4):
    """What `fit` and `evaluate` tell, and the states."""
    keras.utils.set_random_seed(1)

    def build():
        return keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4), *layers, keras.layers.Dense(2)]
        )

    model = build() if form is None else FORMS[form](build)
    model.compile("sgd", "mse", metrics=list(metrics), jit_compile=False)
    result = model.fit(batches(rows), epochs=2, verbose=0).history
    result["evaluated"] = model.evaluate(batches(rows), verbose=0)
    result["states"] = [v.numpy() for v in model.non_trainable_variables]
    return result


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_of_a_metric(form):
    """Story: of what was traced ahead, for shapes, the metric's next call had no update."""
    assert_same(trained(form, metrics=[Farthest()]), trained(metrics=[Farthest()]))


# Of two rows are the outputs that a copy is compared by, of 32 the costs, of any number a proof.
@pytest.mark.parametrize("rows", [2, 32, None])
@pytest.mark.parametrize("form", ["one", "model", "model of a function", "tensor"])
def test_of_a_layer_with_a_state(form, rows):
    """Story: a cost, a copy's outputs and a proof were traced, and the state stayed as it was."""
    expected = trained(None, Counts(), rows=rows)
    assert expected["states"] == [4.0 + 2.0]
    assert_same(trained(form, Counts(), rows=rows), expected)


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
