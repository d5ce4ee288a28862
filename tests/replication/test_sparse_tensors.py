"""Sparse tensors: whose gradients have a slice for each feature that a batch holds."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import tfparallel
from tfparallel.collectives import indexed_slices

FORMS = {
    "data": lambda build: tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1"]),
    "pipeline": lambda build: tfparallel.pipeline_parallel(build, ["CPU:0", "CPU:1"], 2),
}


def build():
    inputs = keras.Input((64,), sparse=True)
    x = keras.layers.Dense(8, activation="relu")(inputs)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def digits():
    x, y = load_digits(return_X_y=True)
    return tf.sparse.from_dense(np.where(x[:40] > 8, x[:40], 0.0).astype("float32")), y[:40]


@pytest.mark.parametrize("form", FORMS)
def test_an_eager_step_is_refused(form):
    model = FORMS[form](build)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, run_eagerly=True)
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"run_eagerly=True, sparse tensors \[\(20, 64\)\]"):
        model.fit(*digits(), batch_size=20, verbose=0)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_slices_are_added_where_the_graph_says_that_each_index_comes_once():
    @tf.function
    def join(ids, distinct):
        table = tf.ones((9, 2))
        parts = []
        for part in ids:
            with tf.GradientTape() as tape:
                tape.watch(table)
                total = tf.reduce_sum(tf.gather(table, tf.unique(part)[0] if distinct else part))
            parts.append(tape.gradient(total, table))
        found = indexed_slices.joined(parts)
        return found.values, found.indices

    ids = [tf.constant([4, 1]), tf.constant([1, 7])]
    values, indices = join(ids, True)
    assert indices.numpy().tolist() == [4, 1, 7]
    assert values.numpy().tolist() == [[1, 1], [2, 2], [1, 1]]
    values, indices = join(ids, False)
    assert indices.numpy().tolist() == [4, 1, 1, 7]
    assert values.numpy().tolist() == [[1, 1]] * 4
