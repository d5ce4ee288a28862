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
    x, y = x[:40].astype(keras.config.floatx()), y[:40]
    return tf.sparse.from_dense(np.where(x > 8, x, 0.0)), y


def trained(model, x, y, run_eagerly=False):
    """The weights after two steps of Adam, which shows a slice too many."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, run_eagerly=run_eagerly)
    model.fit(x, y, batch_size=20, shuffle=False, verbose=0)
    return model.get_weights()


def assert_equal_to_one_device(form, build, x, y, run_eagerly=False):
    single = build()
    initial = single.get_weights()
    expected = trained(single, x, y)
    model = FORMS[form](build)
    model.set_weights(initial)
    for one, other in zip(expected, trained(model, x, y, run_eagerly), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_an_eager_step_asks_a_trace_which_slices_are_added(form, in_float64):
    assert_equal_to_one_device(form, build, *digits(), run_eagerly=True)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_an_eager_step_on_arrays_reads_a_table_by_rows(form):
    def build():
        inputs = keras.Input((4,), dtype="int64")
        x = keras.layers.Flatten()(keras.layers.Embedding(9, 3)(inputs))
        return keras.Model(inputs, keras.layers.Dense(1)(x))

    x, y = np.arange(20).reshape(5, 4) % 9, np.arange(5.0)[:, None]
    single, model = build(), FORMS[form](build)
    model.set_weights(single.get_weights())
    for each in (single, model):
        each.compile(keras.optimizers.Adagrad(0.1), "mse", run_eagerly=True)
        each.train_on_batch(x, y)
    for one, other in zip(single.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-5)


def build_shared():
    inputs = [keras.Input((64,), sparse=True) for _ in range(2)]
    shared = keras.layers.Dense(8)
    x = keras.layers.Add()([shared(each) for each in inputs])
    return keras.Model(inputs, keras.layers.Dense(10)(x))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_of_two_sparse_tensors_has_slices_of_two_readings(form, in_float64):
    x, y = digits()
    assert_equal_to_one_device(form, build_shared, [x, x], y)


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("read", "indices", "values"),
    [
        (lambda ids: tf.unique(ids)[0], [4, 1, 7], [1, 2, 1]),
        (lambda ids: ids, [4, 1, 1, 7], [1, 1, 1, 1]),
        (lambda ids: tf.range(2), [0, 1], [2, 2]),
    ],
    ids=["distinct", "rows", "once"],
)
def test_the_graph_says_which_slices_are_added(read, indices, values):
    @tf.function
    def join(ids):
        table = tf.ones((9, 2))
        parts = []
        for part in ids:
            with tf.GradientTape() as tape:
                tape.watch(table)
                total = tf.reduce_sum(tf.gather(table, read(part)))
            parts.append(tape.gradient(total, table))
        (reading,) = indexed_slices.joined(parts)
        return reading.values, reading.indices

    joined = join([tf.constant([4, 1]), tf.constant([1, 7])])
    assert joined[1].numpy().tolist() == indices
    assert joined[0].numpy().tolist() == [[value] * 2 for value in values]


def test_readings_of_several_kinds_are_refused_where_nothing_tells_them_apart():
    slices = tf.IndexedSlices(tf.ones((2, 3)), tf.constant([0, 1]), tf.constant([9, 3]))
    with pytest.raises(ValueError, match=r"shape \(9, 3\), read 2 times"):
        indexed_slices.readings(slices, ("rows", "once"))
