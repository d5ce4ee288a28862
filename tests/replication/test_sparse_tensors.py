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


def build_shared():
    inputs = [keras.Input((64,), sparse=True) for _ in range(2)]
    shared = keras.layers.Dense(8)
    x = keras.layers.Add()([shared(each) for each in inputs])
    return keras.Model(inputs, keras.layers.Dense(10)(x))


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_of_two_sparse_tensors_is_refused(form):
    """Each index has then as many slices as there are tensors that have it."""
    model = FORMS[form](build_shared)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = model.get_weights()
    x, y = digits()
    with pytest.raises(ValueError, match=r"Received: a weight of shape \(64, 8\)"):
        model.fit([x, x], y, batch_size=20, verbose=0)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_reduce_gradients_adds_them_in_a_loop_of_ones_own():
    strategy = tfparallel.MirroredStrategy(["CPU:0", "CPU:1"])
    ids = [[4, 1], [1, 7]]

    @tf.function
    def step():
        def reduce():
            k = tf.distribute.get_replica_context().replica_id_in_sync_group
            distinct, _ = tf.unique(tf.constant(ids)[k])
            gradient = tf.IndexedSlices(tf.ones([2, 3]), distinct, tf.constant([9, 3]))
            (reduced,) = tfparallel.reduce_gradients([gradient])
            return reduced.values[:, 0], reduced.indices

        return [strategy.experimental_local_results(each) for each in strategy.run(reduce)]

    for values, indices in zip(*step(), strict=True):
        assert indices.numpy().tolist() == [4, 1, 7]
        assert values.numpy().tolist() == [1, 2, 1]


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
