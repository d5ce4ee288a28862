"""Callbacks, interrupted and resumed runs, freezing, loading and saving."""

from __future__ import annotations

import csv
import json
import tempfile
import zipfile
from pathlib import Path

import keras
import numpy as np

from .. import data, refusals
from ..case import Plain, fit_arguments, observe, optimizers_of
from ..programs import case, compiled, digits, mlp
from .metrics import conv_norm_net
from .optimizers import image_digits
from .structures import Subclassed

GROUP = "Callbacks, saving and resuming"


def with_validation():
    return digits() | {"validation_data": data.flat(30, 87)}


def with_callbacks(*make):
    """Trains with fresh callbacks; `make` are functions of a temporary directory."""

    def train(form, case):
        with tempfile.TemporaryDirectory() as directory:
            callbacks = [one(Path(directory)) for one in make]
            model = form.model(case)
            history = model.fit(**fit_arguments(case), callbacks=callbacks)
            outputs = {}
            for path in sorted(Path(directory).rglob("*.csv")):
                rows = list(csv.DictReader(path.open()))
                outputs["csv"] = [[float(v) for v in row.values()] for row in rows]
            return observe(model, history.history, **outputs)

    return train


def early(_):
    return keras.callbacks.EarlyStopping(
        "val_loss", patience=1, restore_best_weights=True, min_delta=0.05
    )


def plateau(_):
    return keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.2)


def schedule(_):
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7 if epoch else rate)


def board(directory):
    return keras.callbacks.TensorBoard(directory / "board", histogram_freq=1, update_freq=2)


def log(directory):
    return keras.callbacks.CSVLogger(directory / "log.csv")


def callback_case(feature, name, *make, **fields):
    fields = {
        "compile": compiled(metrics=lambda: ["accuracy"]),
        "data": with_validation,
        "train": with_callbacks(*make),
    } | fields
    return case(GROUP, feature, name, **fields)


CASES = [
    callback_case("`EarlyStopping`", "EarlyStopping", early, fit={"epochs": 8}),
    callback_case("`ReduceLROnPlateau`", "ReduceLROnPlateau", plateau, fit={"epochs": 6}),
    callback_case("`LearningRateScheduler`", "LearningRateScheduler", schedule),
    callback_case("`TensorBoard`", "TensorBoard", board),
    callback_case("`CSVLogger`", "CSVLogger", log),
    callback_case(
        "`SwapEMAWeights`",
        "SwapEMAWeights",
        lambda _: keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        compile=compiled(lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)),
    ),
    callback_case(
        "`initial_epoch`", "initial_epoch", schedule, fit={"initial_epoch": 2, "epochs": 5}
    ),
]


def checkpointed(pattern, weights_only):
    """Trains with ModelCheckpoint; compares what the best file holds, read by plain Keras."""

    def train(form, case):
        with form.directory() as directory:
            path = Path(directory) / pattern
            model = form.model(case)
            callback = keras.callbacks.ModelCheckpoint(
                path, save_best_only=True, save_weights_only=weights_only, monitor="val_accuracy"
            )
            history = model.fit(**fit_arguments(case), callbacks=[callback])
            form.wait_for_all()  # The chief may still be writing.
            if weights_only:
                best = case.build()
                best.load_weights(path)
            else:
                best = keras.models.load_model(path)
            x, _ = data.flat(7)
            return observe(
                model,
                history.history,
                best=best.get_weights(),
                predictions=best.predict(x, verbose=0),
            )

    return train


CASES += [
    callback_case(
        "`ModelCheckpoint`",
        f"ModelCheckpoint {pattern}",
        train=checkpointed(pattern, weights_only),
    )
    for pattern, weights_only in [("best.keras", False), ("best.weights.h5", True)]
]


class Killed(Exception):
    """Stands for the end of a process."""


def interrupted(save_freq):
    """Killed in the fourth epoch, then run again by a fresh model, with BackupAndRestore."""

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if updates(self.model) == 3 * 6 + 2:
                raise Killed

    def train(form, case):
        with tempfile.TemporaryDirectory() as directory:

            def backup():
                return keras.callbacks.BackupAndRestore(directory, save_freq=save_freq)

            try:
                form.model(case).fit(**fit_arguments(case), callbacks=[backup(), Kill()])
            except Killed:
                pass
            keras.backend.clear_session()
            keras.utils.set_random_seed(99)  # other initial weights: they must be restored
            model = form.model(case)
            history = model.fit(**fit_arguments(case), callbacks=[backup()])
            # Only the epochs after the restart have a history.
            last = {name: values[-1] for name, values in history.history.items()}
            return observe(model, last)

    return train


def updates(model):
    return int(keras.ops.convert_to_numpy(model.optimizer.iterations))


def uninterrupted(form, case):
    model = form.model(case)
    history = model.fit(**fit_arguments(case))
    return observe(model, {name: values[-1] for name, values in history.history.items()})


CASES += [
    callback_case(
        "`BackupAndRestore`: resumed is uninterrupted",
        "BackupAndRestore",
        compile=compiled(
            lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=5),
            metrics=lambda: ["accuracy"],
        ),
        train=interrupted("epoch"),
        baseline=uninterrupted,
    )
]


def freeze_and_thaw(form, case):
    """Trains, freezes a layer, compiles and trains again, thaws it and trains on."""
    model = form.model(case)
    seen = {}
    for stage, trainable in enumerate([True, False, True]):
        model.layers[0].trainable = trainable
        form.compile(model, case.compile)
        history = model.fit(**fit_arguments(case))
        seen[f"loss of stage {stage}"] = history.history["loss"]
        seen[f"weights of stage {stage}"] = model.get_weights()
    return observe(model, history.history, **seen)


def load_then_train(form, case):
    """Weights are loaded from a file after the model was built and compiled."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "start.weights.h5"
        keras.utils.set_random_seed(41)
        case.build().save_weights(path)
        model = form.model(case)
        model.load_weights(path)
        before = model.get_weights()
        history = model.fit(**fit_arguments(case))
        return observe(model, history.history, before=before)


def set_then_train(form, case):
    model = form.model(case)
    model.set_weights(
        [np.cos(np.arange(w.size)).reshape(w.shape) * 0.1 for w in model.get_weights()]
    )
    history = model.fit(**fit_arguments(case))
    return observe(model, history.history)


def pretrained():
    """A built model that was trained for an epoch, its first layer frozen since."""
    model = conv_norm_net()
    compiled(lambda: keras.optimizers.SGD(0.05))(model)
    arguments = image_digits()
    model.fit(**arguments, epochs=1, batch_size=20, shuffle=False, verbose=0)
    model.layers[0].trainable = False
    model.compile(
        optimizer=keras.optimizers.SGD(0.02, momentum=0.5),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def built_model(form, case):
    """A built, trained, partly frozen and compiled model is handed over; no compile."""
    original = pretrained()
    model = form.make(original) if type(form) is not Plain else original
    history = model.fit(**fit_arguments(case))
    trainable = [float(layer.trainable) for layer in model.layers]
    return observe(model, history.history, trainable=trainable)


CASES += [
    case(
        GROUP,
        "freeze, compile again, thaw",
        "freeze and thaw",
        build=conv_norm_net,
        compile=compiled(lambda: keras.optimizers.SGD(0.05, momentum=0.9)),
        data=image_digits,
        train=freeze_and_thaw,
        fit={"epochs": 2},
        refused=refusals.MOMENTS_OF_A_BATCH,
    ),
    case(
        GROUP,
        "`load_weights` and `set_weights` after building",
        "load_weights",
        train=load_then_train,
    ),
    case(
        GROUP,
        "`load_weights` and `set_weights` after building",
        "set_weights",
        train=set_then_train,
    ),
    case(
        GROUP,
        "a built model, with its weights, frozen layers and compile state",
        "built model",
        build=conv_norm_net,
        data=image_digits,
        train=built_model,
        drop_in=False,
        refused=refusals.MOMENTS_OF_A_BATCH,
    ),
]


def restored():
    """A built optimizer with the state of another training."""

    def restore(optimizer, weights):
        optimizer.build(weights)
        state = {}
        optimizer.save_own_variables(state)
        for name, value in state.items():
            if value.ndim:  # Slots; the rest are the number of steps and the rate.
                state[name] = 0.01 * np.cos(np.arange(value.size)).reshape(value.shape) ** 2
        optimizer.load_own_variables(state)
        optimizer.iterations.assign(3)

    return keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=5), restore


def built_before_compile(form, case):
    """The optimizer is built, and a state restored, outside of any scope; then `compile`."""
    model = form.make(case.build)
    optimizer, restore = restored()
    restore(optimizer, model.trainable_variables)
    form.compile(model, compiled(lambda: optimizer))
    return observe(model, model.fit(**fit_arguments(case)).history)


def set_after_compile(form, case):
    """`model.optimizer = …` puts another optimizer in the compiled one's place."""
    model = form.model(case)
    optimizer, restore = restored()
    restore(optimizer, model.trainable_variables)
    model.optimizer = optimizer
    return observe(model, model.fit(**fit_arguments(case)).history)


def thawed_after_compile(form, case):
    """A layer is frozen while the model is compiled, and another one while it trains."""
    model = form.make(case.build)
    first, last = model.layers[0], model.layers[-1]
    first.trainable = False
    form.compile(model, case.compile)
    first.trainable, last.trainable = True, False
    return observe(model, model.fit(**fit_arguments(case)).history)


CASES += [
    case(
        GROUP,
        "an optimizer that was built, and given a state, before training",
        "optimizer built before compile",
        train=built_before_compile,
    ),
    case(
        GROUP,
        "an optimizer that was built, and given a state, before training",
        "optimizer set after compile",
        train=set_after_compile,
    ),
    case(
        GROUP,
        "a layer frozen or thawed between `compile` and `fit`",
        "thawed after compile",
        train=thawed_after_compile,
        fit={"epochs": 2},
    ),
]


def saved_and_loaded(form, case):
    """Saves after training, loads in plain Keras, and trains on there."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.keras"
        model = form.model(case)
        arguments = fit_arguments(case)
        history = model.fit(**arguments)
        model.save(path)
        with zipfile.ZipFile(path) as archive:
            text = archive.read("config.json").decode()
        if "tfparallel" in text:
            raise AssertionError(f"The saved file names tfparallel: {json.loads(text)}")
        loaded = keras.models.load_model(path)
        if "tfparallel" in {c.__module__.split(".")[0] for c in type(loaded).__mro__}:
            raise AssertionError(f"The loaded model is of the class {type(loaded)}")
        x = arguments["x"]
        outputs = {
            "weights of the file": loaded.get_weights(),
            "slots of the file": [v.numpy() for o in optimizers_of(loaded) for v in o.variables],
            "predictions of the file": loaded.predict(x, verbose=0),
            "predictions": model.predict(x, verbose=0),
        }
        if type(form) is not Plain:
            for index, (ours, theirs) in enumerate(
                zip(model.get_weights(), loaded.get_weights(), strict=True)
            ):
                if not np.array_equal(ours, theirs):
                    raise AssertionError(f"Weight {index} changed on its way through the file")
        again = loaded.fit(**arguments)
        return observe(model, history.history, again=again.history["loss"], **outputs)


CASES += [
    case(
        GROUP,
        "`save`, then `keras.models.load_model` without tfparallel",
        f"save and load {name}",
        build=build,
        compile=compiled(lambda: keras.optimizers.Adam(0.01), metrics=lambda: ["accuracy"]),
        data=load,
        train=saved_and_loaded,
        fit={"epochs": 2},
        tolerance=tolerance,
        refused=refused,
    )
    for name, build, load, tolerance, refused in [
        ("Sequential", mlp, digits, None, {}),
        (
            "functional with convolutions and batch normalization",
            conv_norm_net,
            image_digits,
            # Before batch normalization a bias has no true gradient; Adam makes steps of its
            # rounding.
            1e-8,
            refusals.MOMENTS_OF_A_BATCH,
        ),
        ("registered subclass", Subclassed, digits, None, refusals.SUBCLASSED),
    ]
]
