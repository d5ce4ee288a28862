"""The program of each worker of `ray_elastic.py`: 200 steps with checkpoints, which the chief logs.

A unique number follows the label of each example. Their mean over a batch is recorded: it shows
which examples the batch had.
"""

import json
import pathlib
import sys
import time

import keras
import numpy as np
from sklearn.datasets import load_digits

import tfparallel

ROWS, STEPS, EPOCHS, EVERY = 60, 25, 8, 5


def data():
    digits = load_digits()
    x = digits.data[: ROWS * STEPS].astype("float64") / 16.0
    numbers = np.arange(len(x), dtype="int64") * 2654435761 % 2**32
    return x, np.stack([digits.target[: len(x)], numbers], 1).astype("float64")


def build():
    keras.utils.set_random_seed(7)
    dense, dropout = keras.layers.Dense, keras.layers.Dropout
    return keras.Sequential(
        [keras.Input((64,)), dense(64, "relu"), dropout(0.2, seed=1), dense(10)]
    )


@keras.saving.register_keras_serializable()
def of_label(y, logits):
    return keras.losses.sparse_categorical_crossentropy(y[:, 0], logits, from_logits=True)


@keras.saving.register_keras_serializable()
def examples(y, logits):
    return y[:, 1]


class Keeps(keras.callbacks.Callback):
    """Records each step: when it ended, its loss, and the examples that it had."""

    def __init__(self, path, checkpoint, seconds):
        super().__init__()
        self._path, self._checkpoint, self._seconds = path, checkpoint, seconds
        self._epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self._checkpoint.is_passing:
            return
        time.sleep(self._seconds)
        seen = [float(logs["loss"]), float(logs["examples"])]
        line = json.dumps([self._epoch * STEPS + batch, time.time(), *seen])
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def main(folder, seconds):
    keras.config.set_floatx("float64")
    folder = pathlib.Path(folder)
    model = tfparallel.data_parallel(build)
    model.compile(keras.optimizers.Adam(0.003), of_label, metrics=[examples])
    batches = tfparallel.data.EpochBatches(data(), global_batch_size=ROWS, seed=3)
    checkpoint = tfparallel.callbacks.Checkpoint(
        folder / "checkpoints", every_steps=EVERY, batches=batches
    )
    callbacks = [batches, checkpoint]
    if tfparallel.worker_index() == 0:
        callbacks.append(Keeps(folder / "steps", checkpoint, float(seconds)))
    with tfparallel.callbacks.Preemption(checkpoint) as preemption:
        model.fit(
            batches.dataset,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks, preemption],
        )
    if tfparallel.worker_index() == 0:
        np.savez(folder / "weights.npz", *model.get_weights())


if __name__ == "__main__":
    main(*sys.argv[1:])
