"""Layers that ask Python for the number of rows, which a piece does not know."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfparallel
from tfparallel.judge.proof import prove

FEATURES = 5


def gradient(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return tape.gradient(y, x)


def exchanged(layer, x):
    """The weights of the layer, in another order where the number of rows is known."""
    return (layer.first, layer.second)[:: -1 if x.shape[0] else 1]


def in_turn(x, first, second):
    return ops.tanh(x * first) * second


def in_loop(x, first, second):
    turn = lambda i, x: (i + 1, in_turn(x, first, second))  # noqa: E731
    return tf.while_loop(lambda i, _: i < 3, turn, (0, x))[1]


def by_row(x, weight):
    return tf.map_fn(lambda row: ops.tanh(row * weight), x)


RIGHT = {
    "known, or asked for": lambda _, x: tf.reshape(x, [x.shape[0] or tf.shape(x)[0], FEATURES]),
    "shape of the backend": lambda _, x: ops.reshape(x, (ops.shape(x)[0], FEATURES)),
    "ones": lambda _, x: x * ops.ones(ops.shape(x)) + ops.zeros((ops.shape(x)[0], FEATURES)),
    "tiled": lambda _, x: x + ops.tile(ops.ones((1, FEATURES)), (ops.shape(x)[0], 1)),
    "joined": lambda _, x: ops.concatenate([x, ops.ones((ops.shape(x)[0], 1))], 1)[:, :FEATURES],
    "row by row": lambda _, x: x * tf.gather_nd(x, tf.stack([tf.range(tf.shape(x)[0])], 1)),
    "gradient": lambda layer, x: gradient(lambda x: ops.tanh(x * layer.first + 1.0), x),
    "loop": lambda layer, x: in_loop(x, layer.first, layer.second),
    "function": lambda layer, x: tf.function(in_turn)(x, layer.first.value, layer.second.value),
    "every row by itself": lambda layer, x: by_row(x, layer.first) + layer.second,
    "factors in another order": lambda layer, x: ops.einsum(
        "bi,ij,i->bj", x, layer.first[:, None] * ops.ones((1, FEATURES)), layer.second
    ),
    "padded": lambda layer, x: (
        ops.concatenate([x, ops.zeros((ops.shape(x)[0], 1))], 1)[:, 1:] * layer.first
    ),
    "weights for all rows": lambda layer, x: ops.tile(layer.first[None], (ops.shape(x)[0], 1)) * x,
    "branch by the width": lambda _, x: x if x.shape[1] == FEATURES else ops.tanh(x),
}
WRONG = {
    "size, or 1": lambda _, x: x / (x.shape[0] or 1),
    "constant": lambda _, x: x * (2.0 if x.shape[0] else 3.0),
    "operation": lambda _, x: x if x.shape[0] else ops.tanh(x),
    "operation where it is known": lambda _, x: ops.tanh(x) if x.shape[0] else x,
    "division where it is known": lambda _, x: x / x.shape[0] if x.shape[0] else x,
    "weight": lambda layer, x: x * (layer.first if x.shape[0] is None else layer.second),
    "order of weights": lambda layer, x: in_turn(x, *exchanged(layer, x)),
    "place of weights": lambda layer, x: x * exchanged(layer, x)[0] + exchanged(layer, x)[1],
    "order in a loop": lambda layer, x: in_loop(x, *exchanged(layer, x)),
    "order in a function": lambda layer, x: tf.function(in_turn)(
        x, *(weight.value for weight in exchanged(layer, x))
    ),
    "weights behind what moves them": lambda layer, x: (
        ops.tanh(
            ops.concatenate([x * exchanged(layer, x)[0][None], ops.ones_like(x)], 1)[:, :FEATURES]
        )
        + exchanged(layer, x)[1]
    ),
    "operand": lambda _, x: ops.tanh(x) - ops.sin(x) if x.shape[0] else ops.sin(x) - ops.tanh(x),
}


class Of(keras.layers.Layer):
    """A function of rows, with two weights that it may read."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, shape):
        self.first, self.second = (self.add_weight(shape=(shape[-1],)) for _ in range(2))

    def call(self, x):
        return self.function(self, x)


def fault_of(function, num_rows):
    layer = Of(function)
    layer.build((None, FEATURES))
    return prove(layer, layer.__call__, (tf.TensorSpec([num_rows, FEATURES]),), {}).fault


@pytest.mark.parametrize("function", RIGHT.values(), ids=RIGHT)
def test_the_same_is_computed(function):
    assert fault_of(function, 8) is None


@pytest.mark.parametrize("function", WRONG.values(), ids=WRONG)
def test_something_else_is_computed(function):
    fault = fault_of(function, 8)
    assert fault is not None and "where Python knows the number of rows" in str(fault)
    assert fault_of(function, None) is None  # One device does not know it, either.


def test_functions_of_keras_layers_are_compared_too():
    layer = keras.layers.Lambda(lambda x: x / (x.shape[0] or 1))
    fault = prove(layer, layer.__call__, (tf.TensorSpec([8, FEATURES]),), {}).fault
    assert fault is not None and "where Python knows the number of rows" in str(fault)


def test_a_data_set_of_whole_batches_is_refused():
    def build():
        layers = [keras.layers.Dense(FEATURES), Of(WRONG["size, or 1"])]
        return keras.Sequential([keras.Input((FEATURES,)), *layers])

    model = tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1"])
    model.compile("sgd", "mse")
    rows = tf.data.Dataset.from_tensor_slices((np.ones((8, FEATURES)), np.ones((8, FEATURES))))
    with pytest.raises(ValueError, match=r"'of\w*' of class Of .* knows the number of rows"):
        model.fit(rows.batch(4, drop_remainder=True), verbose=0)
    model.fit(rows.batch(4), verbose=0)
