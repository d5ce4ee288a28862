"""A resumed `fit` skips the steps that are done, wherever the data ends or the epochs began."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.callbacks.interruption import Interrupt, Interruption, X, Y
from tfparallel.callbacks import Checkpoint


def build():
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(5, activation="relu"), keras.layers.Dense(1)]
    )


def in_stages():
    return tfparallel.model_parallel(build, ["CPU:0", "CPU:1"])


def batches(number=7):
    """Batches whose number Keras does not know."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).take(number)
    return data.filter(lambda x, y: True)


def compiled(form=build, steps_per_execution=1, optimizer="adam"):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    model = form()
    model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
    return model


def fitted(model, data, directory=None, interrupt=None, every=1, **options):
    callbacks = [Checkpoint(directory, every_steps=every)] if directory else []
    callbacks += [Interrupt(*interrupt)] if interrupt else []
    options = {"epochs": 3, "verbose": 0, "callbacks": callbacks} | options
    return model.fit(data, **options)


def assert_same(model, history, other, other_history):
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(two, one)
    assert other_history.epoch == history.epoch
    assert other_history.history == history.history


@pytest.mark.slow
@pytest.mark.parametrize("at", [(0, 8), (1, 6)])
def test_a_short_last_execution_is_passed(tmp_path, at):
    """7 batches in executions of 2. Steps used to pass, without an end, in all later epochs."""
    whole = compiled(steps_per_execution=2)
    history = fitted(whole, batches())
    with pytest.raises(Interruption):
        fitted(compiled(steps_per_execution=2), batches(), tmp_path, at, every=2)
    resumed = compiled(steps_per_execution=2)
    assert_same(whole, history, resumed, fitted(resumed, batches(), tmp_path, every=2))


@pytest.mark.slow
def test_data_that_ends_before_the_checkpoint_raises(tmp_path):
    with pytest.raises(Interruption):
        fitted(compiled(), batches(), tmp_path, (0, 5))
    with pytest.raises(ValueError, match=r"Received: 4 steps in .* was written after 5\)"):
        fitted(compiled(), batches(4), tmp_path)


@pytest.mark.slow
def test_data_that_ends_at_the_checkpoint_ends_the_epoch(tmp_path):
    """With SGD: where the data ends, Keras may count a step in `iterations` that Adam reads."""
    whole = compiled(optimizer="sgd")
    history = fitted(whole, batches(4))
    with pytest.raises(Interruption):
        fitted(compiled(optimizer="sgd"), batches(), tmp_path, (0, 4))
    resumed = compiled(optimizer="sgd")
    assert_same(whole, history, resumed, fitted(resumed, batches(4), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("at", [(3, 0), (3, 2), (4, 1)])
def test_a_fit_that_begins_at_a_later_epoch(tmp_path, at):
    """It reads its data from the start, however many epochs were trained before."""
    data = batches().repeat()
    options = {"initial_epoch": 2, "epochs": 5, "steps_per_epoch": 3}
    whole = compiled(in_stages)
    history = fitted(whole, data, **options)
    with pytest.raises(Interruption):
        fitted(compiled(in_stages), data, tmp_path, at, **options)
    resumed = compiled(in_stages)
    assert_same(whole, history, resumed, fitted(resumed, data, tmp_path, **options))


@pytest.mark.slow
def test_an_interrupted_resumed_fit_leaves_the_next_one_alone(tmp_path):
    """The next `fit` used to begin at the epoch of the checkpoint, and to train nothing."""
    model = compiled()
    fitted(model, batches(), tmp_path)
    with pytest.raises(Interruption):
        fitted(model, batches(), tmp_path, (3, 1), epochs=4)
    assert fitted(model, batches()).epoch == [0, 1, 2]
    # Nor is a `fit` into another folder moved, if no epoch had begun.
    model._initial_epoch = 3
    assert fitted(model, batches(), tmp_path / "other").epoch == [0, 1, 2]


@pytest.mark.slow
def test_a_metric_of_several_numbers(tmp_path):
    labels = keras.utils.to_categorical(np.arange(50) % 3)

    def run(directory=None, interrupt=None):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
        model.compile("adam", "categorical_crossentropy", metrics=[keras.metrics.F1Score()])
        data = tf.data.Dataset.from_tensor_slices((X, labels)).batch(8)
        return fitted(model, data, directory, interrupt).history

    history = run()
    with pytest.raises(Interruption):
        run(tmp_path, (1, 3))
    resumed = run(tmp_path)
    assert [np.shape(value) for value in resumed["f1_score"]] == [(3,)] * 3
    for name, values in history.items():
        np.testing.assert_array_equal(np.asarray(resumed[name]), np.asarray(values))
