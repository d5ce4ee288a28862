"""What the docs say of TensorFlow's own tools, held by the smallest case."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel

NUM_EXAMPLES, BATCH_SIZE = 50, 20
DEVICES = ["CPU:0", "CPU:1"]


def build():
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu", name="hidden"),
            keras.layers.Dense(1),
        ],
        name="net",
    )


def trained(dataset, make=build):
    """Trains for two epochs and returns the weights."""
    keras.utils.set_random_seed(0)
    model = make()
    model.compile("adam", "mse")
    model.fit(dataset, epochs=2, verbose=0)
    return model.get_weights()


def parallel():
    return tfparallel.data_parallel(build, devices=DEVICES)


@pytest.fixture
def examples():
    x = np.random.default_rng(0).normal(size=(NUM_EXAMPLES, 4)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True)))


@pytest.fixture
def service():
    """A dispatcher and a worker of tf.data's service, in this process."""
    tf_service = tf.data.experimental.service
    dispatcher = tf_service.DispatchServer()
    address = dispatcher.target.partition("://")[2]
    worker = tf_service.WorkerServer(tf_service.WorkerConfig(dispatcher_address=address))
    yield dispatcher.target
    del worker, dispatcher


def assert_equal(weights, expected):
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_snapshot_trains_as_what_it_was_made_of(examples, tmp_path):
    expected = trained(examples.batch(BATCH_SIZE))
    snapshot = examples.snapshot(str(tmp_path / "snapshot")).batch(BATCH_SIZE)
    assert_equal(trained(snapshot, parallel), expected)  # Written in the first epoch,
    assert_equal(trained(snapshot, parallel), expected)  # and read in all others.


@pytest.mark.slow
@pytest.mark.parametrize("has_size", [True, False], ids=["of known size", "of unknown size"])
def test_what_the_service_sends_trains_as_what_it_was_made_of(examples, service, has_size):
    """Plain Keras counts a step more an epoch for the end of data of unknown size; we do not."""
    batches = examples.batch(BATCH_SIZE)
    sent = batches.apply(tf.data.experimental.service.distribute("parallel_epochs", service))
    if has_size:
        sent = sent.apply(tf.data.experimental.assert_cardinality(len(batches)))
    assert_equal(trained(sent, parallel), trained(batches))


@pytest.mark.slow
def test_a_profile_names_the_operations_of_each_replica(examples, tmp_path):
    model = parallel()
    model.compile("adam", "mse")
    board = keras.callbacks.TensorBoard(tmp_path, profile_batch=(2, 5), write_graph=False)
    model.fit(examples.batch(BATCH_SIZE), epochs=2, verbose=0, callbacks=[board])
    (profile,) = tmp_path.rglob("*.xplane.pb")
    content = profile.read_bytes()
    # Keras numbers names that a session has had before.
    assert re.search(rb"StatefulPartitionedCall/net(_\d+)?/hidden", content)
    assert re.search(rb"/replica_1/net(_\d+)?/hidden", content)
