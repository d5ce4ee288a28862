"""The step at which the loss stops being a number is named."""

import warnings

import keras
import numpy as np
import pytest

from tfparallel.callbacks.nan import NaNGuard, NaNLossError


def fit(guard, bad=(), epochs=2):
    x = np.ones((12, 1), "float32")
    x[list(bad)] = np.nan
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    model.fit(x, x, batch_size=4, epochs=epochs, shuffle=False, verbose=0, callbacks=[guard])


def test_one_warning_names_the_step_and_training_goes_on():
    guard = NaNGuard()
    with pytest.warns(UserWarning, match="at step 2 of epoch 1") as caught:
        fit(guard, bad=[5])
    assert (guard.epoch, guard.step) == (1, 2)
    assert len([w for w in caught if "not a finite number" in str(w.message)]) == 1


def test_stops_with_the_step_in_the_error():
    with pytest.raises(NaNLossError, match="at step 3 of epoch 1.*Received: loss=nan.*Lower"):
        fit(NaNGuard(stop=True), bad=[11])


def test_silent_on_good_data():
    guard = NaNGuard(stop=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(guard)
    assert guard.step is None


def test_infinity_counts_and_a_second_fit_starts_anew():
    guard = NaNGuard()
    guard.on_epoch_begin(4)
    with pytest.warns(UserWarning, match="at step 8 of epoch 5.*loss=inf"):
        guard.on_train_batch_end(7, {"loss": float("inf")})
    fit(guard)
    assert guard.step is None


def test_nan_that_a_relu_hides_is_found_in_the_weights():
    """relu(NaN) is 0 on CPU: the loss stays finite while the weights are lost."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(2, activation="relu"), keras.layers.Dense(1)]
    )
    model.compile(optimizer="sgd", loss="mse")
    x = np.ones((12, 1), "float32")
    x[5] = np.nan
    with pytest.warns(UserWarning, match="dense.*contains NaN or infinity after epoch 1|at step"):
        model.fit(x, np.ones((12, 1)), batch_size=4, verbose=0, callbacks=[NaNGuard()])
