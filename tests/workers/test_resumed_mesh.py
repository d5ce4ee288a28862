"""A mesh of two workers that goes on in the middle of an epoch."""

import pytest

from .jobs import run_workers

PROGRAM = """
import os

import keras
import numpy as np

import tfparallel
from tfparallel.callbacks import Checkpoint


class StopsAt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            raise InterruptedError


def build():
    keras.utils.set_random_seed(1)
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def fitted(folder, *callbacks):
    x = np.random.default_rng(0).normal(size=(48, 3)).astype("float32")
    mesh = tfparallel.Mesh(data=2, pipeline=2)
    model = tfparallel.hybrid_parallel(build, mesh, num_micro_batches=2)
    callbacks = [Checkpoint(folder, every_steps=2), *callbacks]
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(x, x.sum(1, keepdims=True), callbacks=callbacks, **options).history


def main(folder):
    whole = fitted(os.path.join(folder, "whole"))
    try:
        fitted(os.path.join(folder, "cut"), StopsAt())
    except InterruptedError:
        pass
    return {"whole": whole, "resumed": fitted(os.path.join(folder, "cut"))}
"""


@pytest.mark.slow
def test_a_mesh_goes_on_in_the_middle_of_an_epoch(tmp_path):
    for seen in run_workers(PROGRAM, 2, num_devices=2, arguments=[str(tmp_path)]):
        assert seen["resumed"] == seen["whole"]
