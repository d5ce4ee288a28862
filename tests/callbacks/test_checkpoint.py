"""A `fit` that was interrupted ends as one that was not: weights, logs and history."""

import shutil
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfparallel
from tests.callbacks.interruption import Interrupt, Interruption, X, Y
from tfparallel.callbacks import Checkpoint
from tfparallel.checkpoint import folder, state
from tfparallel.checkpoint.folder import CheckpointFolder
from tfparallel.data.batches import EpochBatches

EPOCHS, STEPS = 3, 7  # 50 examples in batches of 8, the last one short.


class Noise(keras.layers.Layer):
    """Draws from Keras's own generator, which no layer holds."""

    def call(self, x, training=False):
        return x + 0.1 * keras.random.normal(keras.ops.shape(x)) if training else x


def build(width=5):
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.4),
            keras.layers.GaussianNoise(0.1),
            keras.layers.Dense(1),
        ],
        name="net",
    )


def one_device(build_model):
    return build_model()


def two_devices(build_model):
    return tfparallel.data_parallel(build_model, devices=["CPU:0", "CPU:1"])


def in_stages(build_model):
    return tfparallel.model_parallel(build_model, ["CPU:0", "CPU:1"])


def in_scope(build_model):
    with tfparallel.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        return build_model()


def fitted(form, directory=None, interrupt=None, *, build_model=build, opaque=False, **kwargs):
    """Trains from the same seeds; returns the model, its history and the checkpoint."""
    options = {"every_steps": 1} | kwargs.pop("checkpoint", {})
    optimizer = kwargs.pop("optimizer", lambda: keras.optimizers.Adam(0.01))
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    model = form(build_model)
    if form is in_scope:
        with model.distribute_strategy.scope():
            model.compile(optimizer=optimizer(), loss="mse", metrics=["mae"], **kwargs)
    else:
        model.compile(optimizer=optimizer(), loss="mse", metrics=["mae"], **kwargs)
    data = tf.data.Dataset.from_tensor_slices((X, Y)) if opaque else (X, Y)
    batches = EpochBatches(data, global_batch_size=8, seed=3)
    callbacks = [batches]
    checkpoint = None
    if directory is not None:
        checkpoint = Checkpoint(directory, batches=batches, **options)
        callbacks.append(checkpoint)
    if interrupt is not None:
        callbacks.append(Interrupt(*interrupt))
    history = model.fit(
        batches.dataset,
        epochs=EPOCHS,
        validation_data=(X[:10], Y[:10]),
        callbacks=callbacks,
        shuffle=False,
        verbose=0,
    )
    return model, history, checkpoint


def assert_same_run(whole, resumed):
    (model, history, _), (other, other_history, _) = whole, resumed
    # As a checkpoint sees it: an accumulator is the sum of its copies, however they share it.
    states = [state.capture(each)["training"] for each in (model, other)]
    names = [name for name, _, _ in state.describe(model)["training"]]
    for name, expected, value in zip(names, *states, strict=True):
        # CPU kernels may share their sums out to threads in another way.
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6, err_msg=name)
    assert other_history.epoch == history.epoch == [0, 1, 2]
    assert other_history.history.keys() == history.history.keys()
    for name, values in history.history.items():
        np.testing.assert_allclose(other_history.history[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form, at",
    [
        (one_device, (1, 0)),
        (two_devices, (1, 5)),
        (in_scope, (2, 6)),
    ],
)
def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path, capsys, form, at):
    whole = fitted(form)
    with pytest.raises(Interruption):
        fitted(form, tmp_path, at)
    capsys.readouterr()
    resumed = fitted(form, tmp_path)
    assert_same_run(whole, resumed)
    epoch, step = at
    assert resumed[2].resumed == {
        "step": epoch * STEPS + step,
        "epoch": epoch,
        "step_in_epoch": step,
    }
    assert resumed[2].num_passed == step
    assert f"resuming at epoch {epoch + 1}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "form"),
    [
        (
            {"optimizer": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=4)},
            one_device,
        ),
        ({"optimizer": lambda: keras.optimizers.SGD(0.01, momentum=0.9, use_ema=True)}, one_device),
        (
            {
                "optimizer": lambda: keras.optimizers.LossScaleOptimizer(
                    keras.optimizers.Adam(0.01, gradient_accumulation_steps=4), initial_scale=8.0
                )
            },
            two_devices,
        ),
        ({"steps_per_execution": 2, "checkpoint": {"every_steps": 2}}, one_device),
        ({"opaque": True}, one_device),
        (
            {
                "build_model": lambda: keras.Sequential(
                    [keras.Input((4,)), Noise(), *build().layers]
                )
            },
            two_devices,
        ),
    ],
    ids=["accumulation", "average", "loss_scale", "executions", "opaque", "global_generator"],
)
def test_all_of_the_state_is_kept(tmp_path, form, options):
    whole = fitted(form, **options)
    with pytest.raises(Interruption):
        fitted(form, tmp_path, (1, 2), **options)
    assert_same_run(whole, fitted(form, tmp_path, **options))


@pytest.mark.slow
def test_a_run_goes_on_in_another_form(tmp_path, capsys):
    def without_noise():  # Which each form draws anew.
        drawing = keras.layers.GaussianNoise
        return keras.Sequential(
            [keras.Input((4,)), *(la for la in build().layers if not isinstance(la, drawing))]
        )

    whole = fitted(two_devices, build_model=without_noise)
    with pytest.raises(Interruption):
        fitted(two_devices, tmp_path, (1, 2), build_model=without_noise)
    capsys.readouterr()
    assert_same_run(whole, fitted(in_stages, tmp_path, build_model=without_noise))
    assert capsys.readouterr().out.rstrip().endswith("written on data=2")


def plain():
    """Layers that every form takes without a word."""
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dropout(0.4),
            keras.layers.Dense(6, activation="tanh"),
            keras.layers.Dense(1),
        ],
        name="plain",
    )


DEVICES = [f"CPU:{index}" for index in range(4)]


def in_shares(build_model):
    return tfparallel.data_parallel(build_model, devices=DEVICES, shard="optimizer")


def on_mesh(*, shard=None, **axes):
    size = tfparallel.Mesh(**axes).size
    return lambda build_model: tfparallel.hybrid_parallel(
        build_model, tfparallel.Mesh(**axes), DEVICES[:size], shard=shard
    )


CHAIN = [
    one_device,
    on_mesh(data=2, pipeline=2),
    lambda build_model: tfparallel.data_parallel(build_model, devices=DEVICES[:3]),
    on_mesh(data=2, tensor=2, shard="optimizer"),
    in_shares,
    on_mesh(pipeline=2, tensor=2),
    lambda build_model: tfparallel.tensor_parallel(build_model, DEVICES[:2]),
    lambda build_model: tfparallel.pipeline_parallel(build_model, DEVICES[:2], 2),
    on_mesh(data=4),
]


@pytest.mark.slow
def test_a_run_goes_on_under_every_other_mesh(tmp_path, in_float64):
    """A run that goes from one form to the next, two steps in each, ends as one on one device."""
    options = {"build_model": plain, "optimizer": lambda: keras.optimizers.AdamW(0.01, clipnorm=1)}
    whole, _, _ = fitted(one_device, **options)
    for number, form in enumerate(CHAIN[:-1], start=1):
        with pytest.raises(Interruption):
            fitted(form, str(tmp_path), divmod(2 * number, STEPS), **options)
    model, _, checkpoint = fitted(CHAIN[-1], str(tmp_path), **options)
    assert checkpoint.resumed["step"] == 2 * (len(CHAIN) - 1)
    for one, other in zip(whole.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_from_a_damaged_one_the_run_falls_back(tmp_path):
    with pytest.raises(Interruption):
        fitted(one_device, tmp_path, (1, 3))
    CheckpointFolder(str(tmp_path), keep=2).settle()
    file = tmp_path / "step_00000010" / "state.npy"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.warns(UserWarning, match="step_00000010, which is damaged"):
        resumed = fitted(one_device, tmp_path)
    assert resumed[2].resumed["step"] == 9
    assert_same_run(fitted(one_device), resumed)


class At(keras.callbacks.Callback):
    """Calls a function before a step of the first epoch."""

    def __init__(self, step, function):
        super().__init__()
        self._step, self._function = step, function

    def on_train_batch_begin(self, batch, logs=None):
        if batch == self._step and self._function is not None:
            function, self._function = self._function, None
            function()


@pytest.mark.slow
def test_training_goes_on_beside_a_write(tmp_path):
    """A disk that takes nothing until two more steps are done."""
    done, seen = threading.Event(), []

    def look():
        seen.extend(sorted(path.name for path in tmp_path.glob("step_*")))
        done.set()

    model = build()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    checkpoint = Checkpoint(tmp_path, every_steps=3)
    callbacks = [At(2, lambda: folder._WRITER.submit(done.wait, 60)), checkpoint, At(5, look)]
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=callbacks)
    assert seen == ["step_00000000"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000006", "step_00000007"]


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 6])
def test_a_write_that_fails_beside_ends_the_training(tmp_path, step):
    """By the next write, or at the end."""
    directory = tmp_path / "checkpoints"

    def lose():
        CheckpointFolder(str(directory), keep=2).settle()
        shutil.rmtree(directory)
        directory.write_text("no folder any more")

    model = build()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    callbacks = [At(step, lose), Checkpoint(directory, every_steps=2)]
    with pytest.raises(RuntimeError, match="could not be written; free space and a working disk"):
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=callbacks)


@pytest.mark.slow
def test_what_is_written_when(tmp_path):
    options = {"checkpoint": {"every_steps": 5, "keep": 99}}
    fitted(one_device, tmp_path / "steps", **options)
    steps = [int(path.name[5:]) for path in sorted((tmp_path / "steps").iterdir())]
    assert steps == [0, 5, 7, 10, 14, 15, 20, 21]
    fitted(one_device, tmp_path / "epochs", checkpoint={"every_steps": None, "keep": 2})
    steps = [int(path.name[5:]) for path in sorted((tmp_path / "epochs").iterdir())]
    assert steps == [14, 21]


@pytest.mark.slow
def test_a_run_that_is_done_is_left_alone(tmp_path, capsys):
    whole = fitted(one_device, tmp_path)
    capsys.readouterr()
    again = fitted(one_device, tmp_path)
    assert "nothing to do: 3 of 3 epochs are done" in capsys.readouterr().out
    assert again[1].history == whole[1].history
    for expected, weight in zip(whole[0].weights, again[0].weights, strict=True):
        np.testing.assert_array_equal(weight.numpy(), expected.numpy())
    # And nothing of it stays with the model: a `fit` without a checkpoint trains.
    before = again[0].get_weights()
    again[0].fit(X, Y, verbose=0)
    assert any((a != b).any() for a, b in zip(before, again[0].get_weights(), strict=True))


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_before_training(tmp_path):
    fitted(one_device, tmp_path)
    with pytest.raises(ValueError) as caught:
        fitted(one_device, tmp_path, build_model=lambda: build(width=6))
    text = str(caught.value)
    assert "belongs to another run" in text and "only the model has net/dense/kernel (4, 6)" in text
    assert "only the checkpoint has net/dense/kernel (4, 5) float32" in text
    with pytest.raises(ValueError, match=r"(?i)only the model has .*sgd/"):
        fitted(one_device, tmp_path, optimizer=lambda: keras.optimizers.SGD())


@pytest.mark.slow
def test_other_configurations_and_other_data_are_refused(tmp_path):
    options = {"every_steps": 1, "configuration": {"seed": 1}}
    with pytest.raises(Interruption):
        fitted(one_device, tmp_path, (0, 3), checkpoint=options)
    with pytest.raises(ValueError, match=r"Received: seed=2 \(the checkpoint has 1\)"):
        fitted(one_device, tmp_path, checkpoint=options | {"configuration": {"seed": 2}})
    with pytest.raises(ValueError, match="steps_per_execution=2 .* after 3 steps of an epoch"):
        fitted(one_device, tmp_path, checkpoint=options, steps_per_execution=2)
    model = build()
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
    checkpoint = Checkpoint(tmp_path, configuration={"seed": 1})
    with pytest.raises(ValueError, match="5 steps per epoch .* in mid-epoch, has 7"):
        model.fit(X, Y, batch_size=10, callbacks=[checkpoint], verbose=0)


@pytest.mark.slow
def test_plain_arrays_of_fit(tmp_path):
    """No EpochBatches: what Keras makes of arrays is read and passed over."""

    def fit(interrupt=None, directory=None):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        model = build()
        model.compile(optimizer="adam", loss="mse")
        callbacks = [Checkpoint(directory, every_steps=2)] if directory else []
        callbacks += [Interrupt(*interrupt)] if interrupt else []
        return model, model.fit(
            X, Y, batch_size=8, epochs=3, shuffle=False, callbacks=callbacks, verbose=0
        ), None

    with pytest.raises(Interruption):
        fit((1, 5), tmp_path)
    assert_same_run(fit(), fit(directory=tmp_path))


def endless():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8).repeat()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "steps"),
    [(lambda: (endless(),), 3), (lambda: (X, Y), 2), (lambda: (X, Y), 4)],
    ids=["endless", "arrays", "the last step of the second epoch has no data"],
)
def test_epochs_that_continue_in_the_data(tmp_path, data, steps):
    """With `steps_per_epoch`, Keras keeps its iterator for the next epoch."""

    def fit(interrupt=None, directory=None):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        model = in_stages(build)
        model.compile(optimizer="adam", loss="mse")
        callbacks = [Checkpoint(directory, every_steps=1)] if directory else []
        callbacks += [Interrupt(*interrupt)] if interrupt else []
        arguments = data()
        size = {"batch_size": 8} if len(arguments) > 1 else {}
        options = {"epochs": 3, "shuffle": False, "callbacks": callbacks, "verbose": 0} | size
        return model, model.fit(*arguments, steps_per_epoch=steps, **options), None

    with pytest.raises(Interruption):
        fit((2, 1), tmp_path)
    assert_same_run(fit(), fit(directory=tmp_path))


class Decay(keras.callbacks.Callback):
    """Lowers the rate before each step."""

    def on_train_batch_begin(self, batch, logs=None):
        rate = self.model.optimizer.learning_rate
        self.model.optimizer.learning_rate = 0.9 * float(rate.numpy())


@pytest.mark.slow
@pytest.mark.parametrize(
    "callback",
    [lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate), Decay],
    ids=["before an epoch", "before a step"],
)
def test_what_other_callbacks_change_is_not_changed_again(tmp_path, callback):
    """The rate in the checkpoint is already that of the interrupted epoch."""

    def fit(interrupt=None, directory=None):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        model = build()
        model.compile(optimizer="adam", loss="mse")
        callbacks = [callback()]
        callbacks += [Checkpoint(directory, every_steps=1)] if directory else []
        callbacks += [Interrupt(*interrupt)] if interrupt else []
        options = {"epochs": 3, "shuffle": False, "callbacks": callbacks, "verbose": 0}
        return model, model.fit(X, Y, batch_size=8, **options), None

    with pytest.raises(Interruption):
        fit((1, 3), tmp_path)
    assert_same_run(fit(), fit(directory=tmp_path))


def test_averages_may_not_be_in_the_place_of_the_weights(tmp_path):
    model = in_stages(build)
    model.compile(optimizer=keras.optimizers.SGD(0.1, use_ema=True), loss="mse")
    callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True), Checkpoint(tmp_path)]
    with pytest.raises(ValueError, match="List it after Checkpoint"):
        model.fit(X, Y, callbacks=callbacks, verbose=0)
    callbacks = [Checkpoint(tmp_path), keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]
    model.fit(X, Y, callbacks=callbacks, verbose=0)


def test_arguments_out_of_range():
    for options in ({"every_steps": 0}, {"keep": 0}):
        with pytest.raises(ValueError, match="Received: every_steps="):
            Checkpoint("folder", **options)
