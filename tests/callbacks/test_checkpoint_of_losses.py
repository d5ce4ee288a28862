"""A `fit` that was interrupted goes on with the variables of its losses."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tfparallel.callbacks import Checkpoint
from tfparallel.checkpoint import state
from tfparallel.checkpoint.folder import CheckpointFolder
from tfparallel.checkpoint.stored import ForeignCheckpointError, digest

X = np.random.default_rng(0).normal(size=(20, 4))
Y = X.sum(1, keepdims=True)
EPOCHS, STEPS = 3, 3  # 20 examples in batches of 8, the last one short.


class Weighted(keras.losses.Loss):
    """Has a weight, and a shift that is a variable of TensorFlow."""

    def __init__(self):
        super().__init__(name="weighted")
        self.weight = keras.Variable(1.0, trainable=False)
        self.others = {"shift": tf.Variable(0.0, trainable=False, dtype="float64")}

    def call(self, y_true, y_pred):
        return self.weight * (y_pred - y_true - self.others["shift"]) ** 2

    def move(self):
        self.weight.assign(self.weight * 1.1)
        self.others["shift"].assign_add(0.2)

    def values(self):
        return [float(self.weight), float(self.others["shift"])]


class Moves(keras.callbacks.Callback):
    """Moves the variables after each step."""

    def __init__(self, loss):
        super().__init__()
        self._loss = loss

    def on_train_batch_end(self, batch, logs=None):
        self._loss.move()


class Interruption(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """Ends `fit` before the second step of the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self._epoch, batch) == (1, 1):
            raise Interruption


def build():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, activation="tanh")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1, name="out")(hidden), name="net")


def one_device(build_model):
    return build_model()


def two_devices(build_model):
    return tfparallel.data_parallel(build_model, devices=["CPU:0", "CPU:1"])


def closed_over(loss):
    return lambda y_true, y_pred: loss.call(y_true, y_pred)


def in_function(loss):
    @tf.function
    def weighted(y_true, y_pred):  # With a lambda for it, Keras fails.
        return loss.call(y_true, y_pred)

    return weighted


class ReadsModule(keras.losses.Loss):
    """Its `call` reads a variable of the module."""

    def call(self, y_true, y_pred):
        return _loss_of_module.call(y_true, y_pred)


_loss_of_module: Weighted | None = None


def of_module(loss):
    global _loss_of_module
    _loss_of_module = loss
    return ReadsModule()


def compiled(form, given_as):
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    model, loss = form(build), Weighted()
    model.compile(keras.optimizers.SGD(0.05), given_as(loss))
    return model, loss


def fitted(form, given_as, *callbacks):
    model, loss = compiled(form, given_as)
    history = model.fit(
        X,
        Y,
        batch_size=8,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[Moves(loss), *callbacks],
    )
    return [*model.get_weights(), *history.history["loss"], *loss.values()]


def interrupted(directory, form, given_as):
    with pytest.raises(Interruption):
        fitted(form, given_as, Checkpoint(directory, every_steps=1), Interrupt())
    CheckpointFolder(str(directory), keep=2).settle()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "given_as"),
    [
        (one_device, lambda loss: loss),
        (two_devices, lambda loss: loss),
        (two_devices, lambda loss: [loss]),
        (one_device, lambda loss: {"out": loss}),
        (two_devices, closed_over),
        (two_devices, in_function),
        (one_device, of_module),
    ],
    ids=[
        *("object", "on two devices", "in a list", "in a dictionary", "in a closure"),
        *("in a closure of a tf.function", "in the module"),
    ],
)
def test_a_resumed_run_ends_as_if_it_had_not_been_interrupted(tmp_path, in_float64, form, given_as):
    expected = fitted(form, given_as)
    interrupted(tmp_path, form, given_as)
    resumed = fitted(form, given_as, Checkpoint(tmp_path, every_steps=1))
    for one, other in zip(resumed, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)  # Sums in another order.


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path, in_float64):
    """It has no group for them: they keep their values, and a warning says so."""
    interrupted(tmp_path, one_device, lambda loss: loss)
    (*_, newest) = sorted(tmp_path.glob("step_*"))
    stored = json.loads((newest / "manifest.json").read_text())
    manifest = stored["manifest"]
    number = manifest["content"]["num_arrays"].pop()
    del manifest["arrays"][-number:]
    (newest / "manifest.json").write_text(
        json.dumps({"manifest": manifest, "sha256": digest(manifest)})
    )
    checkpoint = Checkpoint(tmp_path, every_steps=1)
    with pytest.warns(UserWarning, match="values that they have: loss/weight, loss/others/shift"):
        fitted(one_device, lambda loss: loss, checkpoint)
    assert number == 2 and checkpoint.resumed["step"] == STEPS + 1


@pytest.mark.slow
def test_a_loss_with_other_variables_belongs_to_another_run(tmp_path, in_float64):
    interrupted(tmp_path, one_device, lambda loss: loss)
    with pytest.raises(ForeignCheckpointError, match="only the checkpoint has loss/weight"):
        fitted(one_device, lambda loss: "mse", Checkpoint(tmp_path, every_steps=1))


class Distance(keras.losses.Loss):
    """Compares what a layer makes of targets and outputs."""

    def __init__(self, layer, **attributes):
        super().__init__()
        self.layer = layer
        vars(self).update(attributes)

    def call(self, y_true, y_pred):
        return (self.layer(y_true) - self.layer(y_pred)) ** 2


def names_of(model):
    return [name for name, _, _ in state.describe(model)["losses"]]


def test_what_a_loss_reads():
    layer, frozen = keras.layers.Dense(1, name="inner"), keras.layers.Dense(1, trainable=False)
    for each in (layer, frozen):
        each.build((None, 1))
    model = build()
    weight = keras.Variable(1.0)
    model.compile(
        "sgd",
        {"out": Distance(layer, again=layer, frozen=frozen, weights=[weight, weight])},
    )
    assert names_of(model) == [
        "loss/out/layer/inner/kernel",
        "loss/out/layer/inner/bias",
        "loss/out/weights/0",
    ]
    # Those of the model itself are in another group.
    model.compile("sgd", Distance(model.layers[-1]))
    assert names_of(model) == []
    model.compile("sgd", ["mse"])
    model.fidelity = [Distance(layer)]
    assert names_of(model) == ["fidelity/0/layer/inner/kernel", "fidelity/0/layer/inner/bias"]


class Counts(keras.layers.Layer):
    """Scales by the number of its calls in training, which Keras does not track."""

    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0.0, trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1.0)
        return x * (1 + 0.1 * tf.cast(self.calls, x.dtype))


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    """Falls by what a callback says."""

    def __init__(self):
        self.rate = tf.Variable(0.05)

    def __call__(self, step):
        return self.rate


@pytest.mark.parametrize("form", [one_device, two_devices])
def test_what_layers_and_schedules_keep_is_resumed(tmp_path, form):
    def build_counting():
        keras.utils.set_random_seed(3)
        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(1)(Counts()(inputs)))

    def fit(*callbacks):
        model, rate = form(build_counting), Falling()
        model.compile(keras.optimizers.SGD(rate), "mse")

        def fall(batch, logs):
            rate.rate.assign(rate.rate * 0.9)

        callbacks += (keras.callbacks.LambdaCallback(on_train_batch_end=fall),)
        model.fit(
            X, Y, batch_size=8, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=list(callbacks)
        )
        return [*model.get_weights(), float(rate.rate)]

    undisturbed = fit()
    with pytest.raises(Interruption):
        fit(Checkpoint(tmp_path, every_steps=1), Interrupt())
    for value, expected in zip(fit(Checkpoint(tmp_path, every_steps=1)), undisturbed, strict=True):
        np.testing.assert_array_equal(value, expected)
