"""Distributed data sets in `fit`, `evaluate` and `predict`: the weights of the batches whole."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel

TWO = ["CPU:0", "CPU:1"]


def compiled_model():
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(6, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(2),
        ]
    )
    optimizer = keras.optimizers.SGD(0.05, momentum=0.1)
    model.compile(optimizer, "mse", metrics=[keras.metrics.MeanSquaredError()])
    return model


def batches(rows=27, size=8):
    generator = np.random.default_rng(3)
    x, y = generator.random((rows, 4), "float32"), generator.random((rows, 2), "float32")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


def under(strategy):
    with strategy.scope():
        return compiled_model()


def assert_same(model, expected):
    # float32; sums over replicas are taken in another order.
    for value, expected_weight in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(value, expected_weight, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_fit_evaluate_and_predict_take_what_the_strategy_has_distributed():
    strategy, plain = tfparallel.MirroredStrategy(TWO), compiled_model()
    model = under(strategy)
    distributed = strategy.experimental_distribute_dataset(batches())
    with strategy.scope():  # As Keras's integration test does.
        history = model.fit(distributed, validation_data=distributed, epochs=2, verbose=0)
    plain_history = plain.fit(batches(), validation_data=batches(), epochs=2, verbose=0)
    assert_same(model, plain)
    for name, values in plain_history.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5)
    np.testing.assert_allclose(
        model.evaluate(distributed, verbose=0), plain.evaluate(batches(), verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(
        model.predict(distributed, verbose=0), plain.predict(batches(), verbose=0), rtol=1e-5
    )


@pytest.mark.slow
def test_arrays_and_then_a_distributed_data_set_as_keras_own_test_has_it():
    strategy, plain = tfparallel.MirroredStrategy(TWO), compiled_model()
    model = under(strategy)
    x, y = np.random.random((100, 4)), np.random.random((100, 2))
    for each, distribute in (
        (model, strategy.experimental_distribute_dataset),
        (plain, lambda dataset: dataset),
    ):
        keras.utils.set_random_seed(1)
        each.fit(x, y, batch_size=32, epochs=2, validation_split=0.2, verbose=0)
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
        each.fit(distribute(dataset), epochs=2, verbose=0)
    assert_same(model, plain)


@pytest.mark.slow
def test_what_a_function_made_is_one_batch_of_all_replicas():
    """Batches of 4 for each replica, the last step of 3 for the first alone."""
    strategy, plain = tfparallel.MirroredStrategy(TWO), compiled_model()
    model = under(strategy)
    distributed = strategy.distribute_datasets_from_function(
        lambda context: batches(size=context.get_per_replica_batch_size(8))
    )
    model.fit(distributed, epochs=2, verbose=0)
    history = plain.fit(batches(), epochs=2, verbose=0)
    assert_same(model, plain)
    assert history.params["steps"] == model.history.params["steps"] == 4


@pytest.mark.slow
def test_what_a_function_made_may_have_no_end():
    strategy, plain = tfparallel.MirroredStrategy(TWO), compiled_model()
    model = under(strategy)
    distributed = strategy.distribute_datasets_from_function(
        lambda context: batches(rows=24, size=4).repeat()
    )
    model.fit(distributed, steps_per_epoch=5, verbose=0)
    plain.fit(batches(rows=24).repeat(), steps_per_epoch=5, verbose=0)
    assert_same(model, plain)


def test_rows_of_another_shape_each_step_are_put_together():
    """Ragged rows, as `unbatch` hands them on."""
    strategy = tfparallel.MirroredStrategy(TWO)
    ragged = tf.ragged.constant([[1], [2, 3], [4, 5, 6], [7], [8]])
    distributed = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensor_slices({"a": ragged, "b": tf.range(5)}).batch(2)
    )
    whole, is_of_worker = tfparallel.strategies.distributed_data.whole_batches(
        distributed, strategy
    )
    assert is_of_worker
    first, second = list(whole)
    assert first["a"].to_list() == [[1], [2, 3], [4, 5, 6], [7]]
    assert second["a"].to_list() == [[8]] and second["b"].numpy().tolist() == [4]


def test_a_model_that_is_not_compiled_predicts_of_it():
    strategy = tfparallel.MirroredStrategy(TWO)
    x = np.random.random((10, 4)).astype("float32")
    with strategy.scope():
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    distributed = strategy.experimental_distribute_dataset(
        tf.data.Dataset.from_tensor_slices(x).batch(4)
    )
    kernel = model.layers[0].kernel.numpy()
    np.testing.assert_allclose(model.predict(distributed, verbose=0), x @ kernel, rtol=1e-5)


@pytest.mark.slow
def test_class_weights_reach_a_distributed_data_set():
    x, y = np.random.random((20, 4)).astype("float32"), np.arange(20) % 2
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
    models = []
    for strategy in (tfparallel.MirroredStrategy(TWO), None):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
        if strategy is not None:
            model = tfparallel.data_parallel(model, strategy)
        model.compile("sgd", "sparse_categorical_crossentropy")
        data = dataset if strategy is None else strategy.experimental_distribute_dataset(dataset)
        model.fit(data, class_weight={0: 1.0, 1: 3.0}, verbose=0)
        models.append(model)
    assert_same(*models)


def test_a_data_set_of_another_strategy_is_refused():
    model = under(tfparallel.MirroredStrategy(TWO))
    other = tf.distribute.MirroredStrategy(
        TWO, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    for strategy in (other, tfparallel.MirroredStrategy(TWO)):
        distributed = strategy.experimental_distribute_dataset(batches())
        with pytest.raises(ValueError, match="DistributedDataset of a MirroredStrategy"):
            model.fit(distributed, verbose=0)


def test_a_custom_loop_still_has_its_rows():
    strategy = tfparallel.MirroredStrategy(TWO)
    distributed = strategy.experimental_distribute_dataset(batches(rows=16))
    sizes = [
        [rows.shape[0] for rows in strategy.experimental_local_results(x)] for x, _ in distributed
    ]
    assert sizes == [[4, 4], [4, 4]]
