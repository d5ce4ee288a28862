"""The batches of a fit: order, epochs, uneven ends, data sets."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfparallel.data.batches import (
    EpochBatches,
    batches_dataset,
    evaluation_batches,
    first_batches,
)
from tfparallel.data.example_order import batch_indices, epoch_order


class Seen(keras.Model):
    """Notes the examples of every training step."""

    def __init__(self):
        super().__init__()
        self.steps = []
        self.weight = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        return x * self.weight

    def train_step(self, data):
        self.steps.append(data[0].numpy()[:, 0].astype(int).tolist())
        return {"loss": tf.constant(0.0)}


def fit(data, epochs=1, initial_epoch=0, **kwargs):
    batches = EpochBatches(data, **kwargs)
    model = Seen()
    model.compile(loss="mse", run_eagerly=True)
    model.fit(
        batches.dataset,
        epochs=epochs,
        initial_epoch=initial_epoch,
        callbacks=[batches],
        shuffle=False,
        verbose=0,
    )
    return model.steps


def numbered(num_examples):
    x = np.arange(num_examples, dtype="float64")[:, None]
    return x, x


def test_fit_sees_the_order_of_each_epoch_and_a_resumed_run_its_own():
    """Keras peeks one batch before training, and makes iterators it throws away."""
    options = {"global_batch_size": 4, "seed": 3}
    steps = fit(numbered(10), epochs=3, **options)
    assert [len(step) for step in steps] == [4, 4, 2] * 3
    flat = [i for step in steps for i in step]
    assert flat == [i for epoch in range(3) for i in epoch_order(10, 3, epoch)]
    assert fit(numbered(10), epochs=3, initial_epoch=2, **options) == steps[6:]


def test_steps_per_epoch_goes_on_through_further_passes():
    options = {"global_batch_size": 4, "seed": 3, "steps_per_epoch": 5}
    steps = fit(numbered(10), epochs=2, **options)
    assert steps == [list(step) for step in batch_indices(10, 4, 3, 0, 10)]
    assert fit(numbered(10), epochs=2, initial_epoch=1, **options) == steps[5:]


@pytest.mark.parametrize("steps_per_epoch, cardinality", [(None, 3), (2, 2), (7, 7)])
def test_keras_knows_the_number_of_batches(steps_per_epoch, cardinality):
    for data in (numbered(10), tf.data.Dataset.from_tensor_slices(numbered(10))):
        batches = EpochBatches(data, global_batch_size=4, steps_per_epoch=steps_per_epoch)
        assert int(batches.dataset.cardinality()) == cardinality
        assert len(list(batches.dataset)) == cardinality


def test_nested_arrays_keep_their_structure_and_take_on_floatx():
    x = {"a": np.ones((5, 2)), "b": (np.arange(5), np.zeros((5, 1), "float32"))}
    batches = EpochBatches((x, np.ones(5), np.ones(5)), global_batch_size=4)
    inputs, _, weight = next(iter(batches.dataset))
    assert inputs["a"].dtype == weight.dtype == keras.config.floatx()
    assert inputs["b"][0].dtype == tf.int64 and inputs["a"].shape == (4, 2)


def test_a_data_set_comes_in_its_own_order_and_starts_anew():
    data = tf.data.Dataset.from_tensor_slices(numbered(5))
    assert fit(data, global_batch_size=2) == [[0, 1], [2, 3], [4]]
    steps = fit(data, epochs=2, global_batch_size=2, steps_per_epoch=4)
    assert steps == [[0, 1], [2, 3], [4], [0, 1]] * 2


def test_infinite_data_needs_a_length():
    data = tf.data.Dataset.from_tensor_slices(numbered(5)).repeat()
    with pytest.raises(ValueError, match="is infinite.*--steps_per_epoch=100"):
        EpochBatches(data, global_batch_size=2)
    with pytest.raises(ValueError, match="is infinite"):
        evaluation_batches(data, 2)
    assert len(fit(data, global_batch_size=2, steps_per_epoch=3)) == 3


def test_evaluation_keeps_the_order_and_the_short_batch():
    batches = [x.numpy()[:, 0].tolist() for x, _ in evaluation_batches(numbered(5), 2)]
    assert batches == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("as_dataset", [False, True])
@pytest.mark.parametrize("num_batches, sizes", [(2, [4, 2]), (3, [4, 4, 2]), (4, [4, 4, 2, 4])])
def test_first_batches_hold_a_short_one(as_dataset, num_batches, sizes):
    data = numbered(10)
    if as_dataset:
        data = tf.data.Dataset.from_tensor_slices(data)
    batches = first_batches(data, global_batch_size=4, seed=0, num_batches=num_batches)
    assert [len(x) for x, _ in batches] == sizes
    again = [len(x) for x, _ in batches_dataset(batches)]
    assert again == sizes
