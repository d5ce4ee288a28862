"""A subclassed model whose `call` pads what it is given: ragged tensors."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tests.comparison import assert_equal, seeded, state_of


class Pads(keras.Model):
    """Sums or averages the embeddings of a text's words."""

    def __init__(self, averages):
        super().__init__()
        self.averages = averages
        self.embed, self.head = layers.Embedding(9, 4), layers.Dense(2)

    def call(self, ids):
        padded = ids.to_tensor()
        x = self.embed(padded)
        if self.averages:
            return self.head(keras.ops.mean(x, 1))  # Over the padding of the longest, too.
        return self.head(keras.ops.sum(x * keras.ops.cast(padded > 0, x.dtype)[..., None], 1))


def trained(model):
    ids = tf.ragged.constant([[1], [2, 3], [4, 5, 6, 7], [8], [1, 2], [3, 4, 5]])
    model.compile("sgd", "mse")
    model.fit(ids, np.ones((6, 2)), batch_size=3, shuffle=False, verbose=0)
    return {}, state_of(model)


def replicated(averages):
    devices = ["CPU:0", "CPU:1"]
    return tfparallel.data_parallel(lambda: seeded(lambda: Pads(averages)), devices=devices)


@pytest.mark.slow
def test_a_call_that_pads_is_built_with_ragged_tensors(in_float64):
    """Story: Keras builds it with dense ones, which have no `to_tensor`."""
    expected = trained(seeded(lambda: Pads(False)))
    assert_equal(trained(replicated(False)), expected, rtol=1e-10)


def test_what_depends_on_the_longest_of_the_batch_is_refused():
    """Story: no ragged rows were made up, so that each replica took its own longest, silently."""
    with pytest.raises(ValueError, match="A layer mixes examples, so the batch cannot be divided"):
        trained(replicated(True))


class Averages(keras.Model):
    """Averages each row's numbers, as many as it has."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(2)

    def call(self, x):
        return self.head(tf.reduce_mean(x, 1)[:, None])


@pytest.mark.slow
def test_replicas_have_other_numbers_of_rows(in_float64):
    """Story: that of the first, where it was known, was a constant of all."""
    numbers = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0], [5.0, 6.0, 7.0], [8.0]], tf.float64)

    def averaged(model):
        model.compile("sgd", "mse")
        rows = tf.data.Dataset.from_tensor_slices((numbers, np.ones((5, 2))))
        model.fit(rows.batch(5, drop_remainder=True), verbose=0)
        return {}, state_of(model)

    model = tfparallel.data_parallel(lambda: seeded(Averages), devices=["CPU:0", "CPU:1"])
    assert_equal(averaged(model), averaged(seeded(Averages)), rtol=1e-10)
