"""Steps do not wait for logs that nobody reads, and who reads them sees what Keras shows."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfparallel
from tfparallel import callbacks as ours
from tfparallel.callbacks import stall
from tfparallel.callbacks.stall import StallGuard
from tfparallel.step.logs import LogsWhereTheyAre

DEVICES = ["CPU:0", "CPU:1"]
FORMS = {
    "data": lambda model: tfparallel.data_parallel(model, devices=DEVICES),
    "model": lambda model: tfparallel.model_parallel(model, DEVICES),
    "tensor": lambda model: tfparallel.tensor_parallel(model, DEVICES),
    "pipeline": lambda model: tfparallel.pipeline_parallel(model, DEVICES, 2),
}
X = np.random.default_rng(0).normal(size=(10, 6)).astype("float32")
Y = np.random.default_rng(1).normal(size=(10, 2)).astype("float32")


def build():
    keras.utils.set_random_seed(5)
    return keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(2)])


def fitted(model, callbacks=(), verbose=0, **options):
    model.compile("sgd", "mse", metrics=["mae"])
    options = {"batch_size": 4, "epochs": 2, "shuffle": False, "validation_data": (X, Y)} | options
    return model.fit(X, Y, callbacks=list(callbacks), verbose=verbose, **options)


class Sees(keras.callbacks.Callback):
    """What a callback is told, and when."""

    def __init__(self, takes_tensors):
        super().__init__()
        self.takes_tensors, self.batches, self.epochs, self.settings = takes_tensors, [], [], None

    def on_train_begin(self, logs=None):
        self.settings = dict(self.params)

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append((batch, logs))

    def on_test_batch_end(self, batch, logs=None):
        self.batches.append((batch, logs))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append((epoch, logs))


def numbers_of(logs):
    return [(batch, {name: float(value) for name, value in each.items()}) for batch, each in logs]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_callbacks_see_what_keras_shows_them(form):
    expected, safe, asking = Sees(False), Sees(True), Sees(False)
    history = fitted(build(), [expected]).history
    for callback in (safe, asking):
        shown = fitted(FORMS[form](build()), [callback]).history
        assert list(shown) == list(history)
        for name in history:
            np.testing.assert_allclose(shown[name], history[name], rtol=1e-5)
        assert callback.settings == expected.settings == {"verbose": 0, "epochs": 2, "steps": 3}
        assert len(callback.batches) == len(expected.batches) == 12
        for of_ours, of_keras in zip(
            numbers_of(callback.batches) + callback.epochs,
            numbers_of(expected.batches) + expected.epochs,
            strict=True,
        ):
            assert of_ours[0] == of_keras[0] and list(of_ours[1]) == list(of_keras[1])
            np.testing.assert_allclose(
                list(of_ours[1].values()), list(of_keras[1].values()), rtol=1e-5
            )
    assert all(tf.is_tensor(value) for _, logs in safe.batches for value in logs.values())
    assert all(isinstance(value, float) for _, logs in asking.batches for value in logs.values())
    assert all(isinstance(value, float) for _, logs in safe.epochs for value in logs.values())


def asks(*callbacks, verbose=1):
    logs = LogsWhereTheyAre(list(callbacks), verbose)
    logs.begin(build(), verbose=verbose, epochs=1, steps=3)
    return logs._asks_in["train"]


def test_no_step_waits_for_callbacks_of_ours(tmp_path):
    batches = tfparallel.data.EpochBatches((X, Y), global_batch_size=4)
    assert not asks(ours.Checkpoint(tmp_path), ours.SentBytes(), StallGuard(60.0, 0), batches)


def test_these_read_each_step():
    """The loss of each, and the end of each."""
    assert asks(ours.NaNGuard()) and asks(ours.StepTime())


def test_of_keras_those_that_look_at_epochs_do_not(tmp_path):
    path = str(tmp_path / "model.keras")
    assert not asks(
        keras.callbacks.ModelCheckpoint(path),
        keras.callbacks.EarlyStopping(),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.LambdaCallback(on_epoch_end=print),
    )
    assert asks(keras.callbacks.ModelCheckpoint(path, save_freq=2))
    extended = type("Extended", (keras.callbacks.ModelCheckpoint,), {})
    assert asks(extended(path))  # Which may read what it likes.
    assert asks(keras.callbacks.TerminateOnNaN())
    assert asks(keras.callbacks.LambdaCallback(on_train_batch_end=print))

    class Old(keras.callbacks.Callback):
        def on_batch_end(self, batch, logs=None):
            """The name that Keras has for both."""

    assert asks(Old())


@pytest.mark.slow
def test_one_that_keras_may_call_from_another_thread_sees_numbers():
    safe = Sees(False)
    safe.async_safe = True  # Keras's attribute.
    fitted(FORMS["data"](build()), [safe])
    assert all(isinstance(value, float) for _, logs in safe.batches for value in logs.values())


@pytest.mark.slow
def test_callbacks_are_told_of_as_many_epochs_as_keras_allows():
    seen = Sees(True)
    keras.config.set_max_epochs(1)
    try:
        fitted(FORMS["data"](build()), [seen])
    finally:
        keras.config.set_max_epochs(None)
    assert seen.settings["epochs"] == 1 == len(seen.epochs)


def test_what_is_no_scalar_is_shown_as_keras_shows_it():
    seen = Sees(True)
    logs = LogsWhereTheyAre([seen], 0)
    logs.begin(build(), verbose=0, epochs=1, steps=1)
    logs.on_train_batch_end(0, {"loss": tf.constant(2.0), "more": {"mae": tf.constant(3.0)}})
    assert seen.batches == [(0, {"loss": 2.0, "mae": 3.0})]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["data", "pipeline"])
def test_the_progress_bar_shows_the_same(form, capsys):
    def last_lines(model):
        keras.utils.set_random_seed(1)
        fitted(model, verbose=1, validation_data=None)
        lines = capsys.readouterr().out.replace("\b", "").replace("\r", "\n").splitlines()
        return [line[line.index("loss") :].strip() for line in lines if "loss" in line][-1]

    assert last_lines(FORMS[form](build())) == last_lines(build())


def test_a_list_of_the_users_is_left_alone():
    seen = Sees(True)
    model = FORMS["data"](build())
    model.compile("sgd", "mse")
    callbacks = keras.callbacks.CallbackList([seen], add_history=True, model=model, epochs=1)
    model.fit(X, Y, verbose=0, callbacks=callbacks)
    assert isinstance(seen.batches[0][1]["loss"], float)


class FitsTwice(keras.Model):
    """With a `fit` of its own, of fewer arguments."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x)

    def fit(self, x, y, callbacks, verbose=0):
        super().fit(x, y, verbose=verbose, callbacks=[*callbacks, Sees(True)])
        return super().fit(x, y, verbose=verbose, callbacks=callbacks)


@pytest.mark.slow
def test_a_fit_of_the_users_is_left_alone():
    seen = Sees(True)
    model = tfparallel.data_parallel(FitsTwice, devices=DEVICES)
    model.compile("sgd", "mse")
    model.fit(X, Y, callbacks=[seen])
    assert len(seen.batches) == 2 and isinstance(seen.batches[0][1]["loss"], float)


def test_a_step_of_which_the_logs_are_on_a_gpu_may_go_on(monkeypatch):
    """On a CPU it is over, and a worker that hangs behind it is the one to be named."""
    guard = StallGuard(60.0, 0)
    for logs in ({"loss": 1.0}, {"loss": tf.constant(1.0)}, None):
        guard.on_train_batch_begin(0)
        guard.on_train_batch_end(0, logs)
        assert not guard._watched[0]
    monkeypatch.setattr(stall, "_is_on_gpu", tf.is_tensor)
    guard.on_train_batch_end(0, {"loss": tf.constant(1.0)})
    assert guard._watched[0]
