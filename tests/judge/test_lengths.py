"""Rows padded to the longest of a piece: what pads change is no longer that of each row."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfparallel.judge.proof import prove

ROWS = [[1.0, 2.0], [0.5], [3.0, 1.0, 2.0, 4.0, 5.0], [1.0], [2.0, 2.0, 2.0]]
CUT = 2


class Of(keras.layers.Layer):
    """A function of ragged rows."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def padded(x, **options):
    return x.to_tensor(**options)


RIGHT = {
    "sum": lambda x: tf.reduce_sum(padded(x), 1, keepdims=True),
    "sum of squares": lambda x: tf.reduce_sum(tf.square(padded(x)), 1, keepdims=True),
    "masked": lambda x: tf.reduce_sum(
        tf.exp(padded(x)) * tf.cast(padded(x) > 0, x.dtype), 1, keepdims=True
    ),
    "up to a length": lambda x: tf.reduce_sum(tf.exp(padded(x, shape=(None, 6))), 1, keepdims=True),
    "of the ragged rows": lambda x: tf.reduce_sum(tf.exp(x), 1)[:, None],
}
WRONG = {
    "sum of exponentials": lambda x: tf.reduce_sum(tf.exp(padded(x)), 1, keepdims=True),
    "padded with ones": lambda x: tf.reduce_sum(padded(x, default_value=1.0), 1, keepdims=True),
    "masked along another axis": lambda x: tf.reduce_sum(
        tf.exp(padded(x))[:, :, None] * tf.cast(padded(x) > 0, x.dtype)[:, None, :], [1, 2]
    )[:, None],
    "mean": lambda x: tf.reduce_mean(padded(x), 1, keepdims=True),
    "sum but for the first": lambda x: tf.reduce_sum(padded(x)[:, 1:] + 1, 1, keepdims=True),
    "mean but for the first": lambda x: tf.reduce_mean(padded(x)[:, 1:], 1, keepdims=True),
    "sum of the reshaped": lambda x: tf.reduce_sum(
        tf.reshape(tf.exp(padded(x)), (tf.shape(padded(x))[0], -1)), 1, keepdims=True
    ),
    "least": lambda x: tf.reduce_min(padded(x), 1, keepdims=True),
}


def fault_of(function):
    layer = Of(function)
    return prove(layer, layer.__call__, (tf.RaggedTensorSpec([None, None], "float64"),), {}).fault


def is_of_each_row(function):
    rows = tf.ragged.constant(ROWS, dtype="float64")
    whole, one, other = (np.asarray(function(each)) for each in (rows, rows[:CUT], rows[CUT:]))
    return np.allclose(whole, np.concatenate([one, other]))


@pytest.mark.parametrize(
    "name",
    # Ragged rows are a loop of many small functions, which the judge tries one by one.
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "of the ragged rows" else name
        for name in RIGHT
    ],
)
def test_what_pads_do_not_change_is_proved(name, in_float64):
    assert is_of_each_row(RIGHT[name])
    assert fault_of(RIGHT[name]) is None


@pytest.mark.parametrize("name", WRONG)
def test_what_pads_change_is_refused(name, in_float64):
    assert not is_of_each_row(WRONG[name])
    assert "longest" in str(fault_of(WRONG[name])) or "size depends" in str(fault_of(WRONG[name]))
