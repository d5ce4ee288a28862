"""What a tensor of a graph was made of."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfparallel.tracing.provenance import NUMBER, ROWS, made_of

TABLE = tf.constant(np.arange(4000))  # Too large for TensorFlow to copy into a graph.


@tf.function
def inner(x, size):
    return tf.range(size), x[:, 0]


CASES = {
    "a constant": (lambda x: tf.range(3), set()),
    "a constant that the layer holds": (lambda x: TABLE + 1, set()),
    "a weight": (lambda x: WEIGHT * 2.0, set()),
    "rows": (lambda x: tf.cast(x, tf.int32)[:, 1:], {ROWS}),
    "rows of a weight": (lambda x: tf.gather(WEIGHT, tf.cast(x, tf.int32)), {ROWS}),
    "the length of a row": (lambda x: tf.range(tf.shape(x)[1]), set()),
    "the number of rows": (lambda x: tf.range(tf.shape(x)[0]), {NUMBER}),
    "a constant for each row": (lambda x: tf.ones_like(x), {NUMBER}),
    "a draw": (lambda x: tf.random.stateless_uniform((3,), (1, 2)), {ROWS}),
    "a function's constant": (lambda x: inner(x, 4)[0], set()),
    "a function's rows": (lambda x: inner(x, 4)[1], {ROWS}),
    "a function's argument": (lambda x: inner(x, tf.shape(x)[0])[0], {NUMBER}),
}
WEIGHT = tf.Variable([1.0, 2.0])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("source", ["argument", "iterator"])
def test_a_tensor_is_made_of(name, source):
    make, expected = CASES[name]
    sources = []

    def look(x):
        sources.append(made_of(make(x)))

    if source == "argument":
        tf.function(look).get_concrete_function(tf.TensorSpec((None, None)))
    else:
        data = tf.data.Dataset.from_tensor_slices(np.ones((4, 3), "float32"))
        iterator = iter(data.batch(2).padded_batch(1).unbatch())
        tf.function(lambda: look(next(iterator))).get_concrete_function()
    assert sources == [expected]


def test_an_eager_tensor_does_not_tell():
    with pytest.raises(ValueError, match=r"Received: an eager tensor of shape \(2,\)"):
        made_of(keras.ops.ones(2))
