"""A `fit` that was interrupted goes on with the state of its callbacks."""

import keras
import numpy as np
import pytest

import tfparallel
from tests.callbacks.test_checkpoint_of_losses import Interrupt, Interruption, two_devices
from tfparallel.callbacks import Checkpoint
from tfparallel.callbacks.callback_states import CallbackStates

X = np.random.default_rng(0).normal(size=(20, 4))
Y = X.sum(1, keepdims=True)


def two_parts(build_model):
    return tfparallel.model_parallel(build_model, ["CPU:0", "CPU:1"])


def build():
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])


def fit(model, *callbacks, epochs=8):
    """Trains until a callback stops it: each epoch is a plateau."""
    model.compile(keras.optimizers.SGD(0.05), "mse")
    options = {"monitor": "loss", "min_delta": 1e6}
    history = model.fit(
        X,
        Y,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[
            keras.callbacks.ReduceLROnPlateau(factor=0.5, patience=2, **options),
            keras.callbacks.EarlyStopping(patience=4, restore_best_weights=True, **options),
            *callbacks,
        ],
    )
    rate = float(model.optimizer.learning_rate)
    return [*model.get_weights(), rate, history.history["loss"]]


@pytest.mark.parametrize("form", [two_devices, two_parts])
def test_a_resumed_fit_ends_as_an_undisturbed_one(tmp_path, form, in_float64):
    undisturbed = fit(form(build))
    assert len(undisturbed[-1]) < 8 and undisturbed[-2] < 0.05  # Both have acted.

    def checkpoint():
        return Checkpoint(tmp_path, every_steps=1)

    with pytest.raises(Interruption):
        fit(form(build), checkpoint(), Interrupt())
    for value, expected in zip(fit(form(build), checkpoint()), undisturbed, strict=True):
        np.testing.assert_array_equal(value, expected)
    # It had stopped: nothing is left to do.
    again = fit(form(build), checkpoint())
    np.testing.assert_array_equal(again[0], undisturbed[0])
    np.testing.assert_array_equal(again[-1], undisturbed[-1])


def test_more_patience_goes_on(tmp_path):
    def train(patience):
        model = tfparallel.data_parallel(build, devices=["CPU:0", "CPU:1"])
        model.compile("sgd", "mse")
        stop = keras.callbacks.EarlyStopping("loss", min_delta=1e6, patience=patience)
        options = {"epochs": 9, "verbose": 0, "callbacks": [stop, Checkpoint(tmp_path)]}
        return len(model.fit(X, Y, **options).history["loss"])

    assert [train(2), train(2), train(4)] == [3, 3, 5]


def test_states_are_found_again_by_kind_and_place():
    def callbacks():
        return [
            keras.callbacks.ReduceLROnPlateau(),
            keras.callbacks.CSVLogger("log.csv"),
            *(keras.callbacks.EarlyStopping(patience=patience) for patience in (1, 2)),
        ]

    before, after = callbacks(), callbacks()[1:]
    states = CallbackStates(before)
    before[0].wait, before[3].best, before[3].best_weights = 4, np.float32(0.5), [np.ones(2)]
    states.take()
    CallbackStates(after).restore(states.numbers, states.arrays)
    assert after[1].best is None and after[1].best_weights is None
    assert (after[2].best, after[2].patience) == (0.5, 2)
    np.testing.assert_array_equal(after[2].best_weights, [[1, 1]])
