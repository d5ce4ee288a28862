"""What each worker of `test_loggers.py` runs: callbacks that write, on the chief alone."""

import importlib.util
import json
import os
import pathlib

import keras
import numpy as np

import tfparallel
from tfparallel.callbacks import ChiefOnly

EPOCHS = 2
X = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def build():
    """With a weight that is large enough to be sharded."""
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1024), keras.layers.Dense(1)])


def fit(callbacks, **options):
    """Trains two workers' model; returns it and its losses."""
    keras.utils.set_random_seed(0)
    model = tfparallel.data_parallel(build, **options)
    model.compile("adam", "mse")
    history = model.fit(X, Y, batch_size=8, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    return model, history.history["loss"]


class Lines(keras.callbacks.Callback):
    """Appends a line an epoch, as a user's own logger."""

    def __init__(self, path):
        super().__init__()
        self._path = path

    def on_epoch_end(self, epoch, logs=None):
        with open(self._path, "a") as file:
            print(json.dumps([epoch, logs["loss"]]), file=file)


class Stops(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


class NeedsAll(keras.callbacks.Callback):
    """Does in `on_epoch_end` what all workers must do, and notes the answers."""

    def __init__(self, folder):
        super().__init__()
        self._folder = folder
        self.answers = {}

    def on_epoch_end(self, epoch, logs=None):
        calls = {
            "evaluate": lambda: self.model.evaluate(X, Y, verbose=0),
            "predict": lambda: self.model.predict(X, verbose=0),
            "test_on_batch": lambda: self.model.test_on_batch(X, Y),
            "all_reduce": lambda: tfparallel.all_reduce(1.0),
            "barrier": lambda: tfparallel.barrier(),
            "save": lambda: self.model.save(self._folder / "callback.keras"),
            "get_weights": lambda: self.model.get_weights() and None,
        }
        for name, call in calls.items():
            try:
                self.answers[name] = str(call())
            except RuntimeError as error:
                self.answers[name] = str(error)


def needs_all(folder, **options):
    callback = NeedsAll(folder)
    _, losses = fit([ChiefOnly(callback)], **options)
    return {"answers": callback.answers, "losses": losses}


# --- The loggers of others --------------------------------------------------------------------


def of_wandb(folder):
    """Offline, as without an account: one folder for each run."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}

    def start():
        import wandb
        from wandb.integration.keras import WandbMetricsLogger

        wandb.init(project="two-workers")
        return WandbMetricsLogger()

    _, losses = fit([ChiefOnly(start)])
    if tfparallel.worker_index() == 0:
        import wandb

        summary = dict(wandb.run.summary)
        wandb.finish()
        return {"losses": losses, "logged": summary["epoch/loss"]}
    return {"losses": losses}


def of_mlflow(folder):
    """A store of files."""
    os.environ |= {"MLFLOW_TRACKING_URI": folder.as_uri(), "GIT_PYTHON_REFRESH": "quiet"}
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"

    def start():
        import mlflow
        from mlflow.keras import MlflowCallback

        mlflow.set_experiment("two-workers")
        mlflow.start_run()
        return MlflowCallback()

    _, losses = fit([ChiefOnly(start)])
    if tfparallel.worker_index() == 0:
        import mlflow

        mlflow.end_run()
        (run,) = mlflow.MlflowClient().search_runs(
            [mlflow.get_experiment_by_name("two-workers").experiment_id]
        )
        return {"losses": losses, "logged": run.data.metrics["loss"]}
    return {"losses": losses}


def of_tensorboard(folder):
    _, losses = fit([keras.callbacks.TensorBoard(folder)])
    return {"losses": losses}


LOGGERS = {"wandb": of_wandb, "mlflow": of_mlflow, "tensorboard": of_tensorboard}


def main(folder):
    tfparallel.init()
    folder = pathlib.Path(folder)
    results = {}
    _, results["lines"] = fit([ChiefOnly(Lines(folder / "lines.jsonl"))])
    results["stopped"] = fit([ChiefOnly(Stops())])[1]
    results["copies"] = needs_all(folder)
    results["shares"] = needs_all(folder, shard="parameters")
    for name, log in LOGGERS.items():
        if importlib.util.find_spec(name) is not None:
            (folder / name).mkdir(exist_ok=True)
            tfparallel.barrier()
            results[name] = log(folder / name)
    return results
