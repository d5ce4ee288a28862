"""A callback on the chief alone; `tests/workers/test_loggers.py` runs it on several workers."""

import keras
import numpy as np
import pytest

import tfparallel
from tfparallel.callbacks import ChiefOnly
from tfparallel.collectives.chief_alone import check_all_take_part, on_chief_alone
from tfparallel.step.logs import LogsWhereTheyAre

X = np.arange(12, dtype="float32").reshape(6, 2)
Y = X.sum(1, keepdims=True)


class Notes(keras.callbacks.Callback):
    """Notes which of its methods were called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_begin(self, logs=None):
        self.seen.append(("begin", self.params["epochs"], self.model.name))

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(("epoch", epoch, sorted(logs)))
        self.model.stop_training = epoch == 1


def fit(callback, epochs=3):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="net")
    model.compile("sgd", "mse")
    model.fit(X, Y, epochs=epochs, verbose=0, callbacks=[callback])
    return model


def test_in_one_process_it_is_the_callback():
    notes = Notes()
    fit(ChiefOnly(notes))
    assert notes.seen == [("begin", 3, "net"), ("epoch", 0, ["loss"]), ("epoch", 1, ["loss"])]


def test_a_function_is_called_when_fit_begins_and_once():
    created = []

    def create():
        created.append(Notes())
        return created[-1]

    callback = ChiefOnly(create)
    assert not created
    fit(callback, epochs=1)
    fit(callback, epochs=1)
    (notes,) = created
    assert [what for what, *_ in notes.seen] == ["begin", "epoch"] * 2
    assert notes.seen[0][1] == 1


def test_a_lambda_callback_keeps_its_functions():
    """Its methods are attributes of the object, and not of its class."""
    seen = []
    fit(ChiefOnly(keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(1))))
    assert len(seen) == 3


class OfBatches(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


@pytest.mark.parametrize(("inner", "asks"), [(Notes(), False), (OfBatches(), True)])
def test_logs_of_a_step_are_read_only_for_a_callback_that_reads_them(inner, asks):
    callbacks = LogsWhereTheyAre([ChiefOnly(inner)], verbose=0)
    callbacks.begin(fit(keras.callbacks.Callback(), 1), verbose=0, epochs=1, steps=1)
    assert callbacks._asks_in["train"] is asks


@pytest.mark.parametrize(
    "callback",
    [
        keras.callbacks.ReduceLROnPlateau(),
        keras.callbacks.EarlyStopping(restore_best_weights=True),
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        tfparallel.callbacks.NaNGuard(),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_one_that_changes_the_training_must_run_everywhere(callback):
    name = type(callback).__name__
    with pytest.raises(ValueError, match=f"must run on every worker. Received: {name}. List it"):
        ChiefOnly(callback)
    with pytest.raises(ValueError, match=f"Received: {name}"):
        fit(ChiefOnly(lambda: callback))


def test_what_is_no_callback_is_refused():
    with pytest.raises(ValueError, match="needs a Keras callback, or a function.* Received: str."):
        ChiefOnly("logs")
    with pytest.raises(ValueError, match="Received: NoneType"):
        fit(ChiefOnly(lambda: None))


def test_what_needs_all_workers_is_an_error_on_the_chief_alone():
    check_all_take_part()
    with on_chief_alone("`on_epoch_end` of Notes", "Do this."):
        with pytest.raises(RuntimeError, match="^`on_epoch_end` of Notes runs on .* Do this.$"):
            check_all_take_part()
    check_all_take_part()
