"""What the workers of these tests train: digits in float64, with a record of each step.

A unique number follows the label of each example. Its mean over a batch shows which examples the
batch had.
"""

import json
import os
import pathlib
import time

import keras
import numpy as np
from sklearn.datasets import load_digits

import tfparallel

ROWS, STEPS, EPOCHS, EVERY = 60, 20, 3, 5
SLOW_FROM = 8


def data():
    digits = load_digits()
    x = digits.data[: ROWS * STEPS].astype("float64") / 16.0
    numbers = np.arange(len(x), dtype="int64") * 2654435761 % 2**32
    return x, np.stack([digits.target[: len(x)], numbers], 1).astype("float64")


def build():
    keras.utils.set_random_seed(7)
    dense, dropout = keras.layers.Dense, keras.layers.Dropout
    return keras.Sequential(
        [keras.Input((64,)), dense(32, "relu"), dropout(0.2, seed=1), dense(10)]
    )


@keras.saving.register_keras_serializable()
def of_label(y, logits):
    return keras.losses.sparse_categorical_crossentropy(y[:, 0], logits, from_logits=True)


@keras.saving.register_keras_serializable()
def examples(y, logits):
    return y[:, 1]


class Keeps(keras.callbacks.Callback):
    """Records each step: its number, its examples, and the number of workers.

    From step SLOW_FROM on it slows the training down, until there is a file "hurry".
    """

    def __init__(self, folder, checkpoint, seconds):
        super().__init__()
        self._folder, self._checkpoint, self._seconds = folder, checkpoint, seconds
        self._epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self._checkpoint.is_passing:
            return
        step = self._epoch * STEPS + batch
        with open(self._folder / "steps", "a", encoding="utf-8") as file:
            line = [step, float(logs["examples"]), tfparallel.num_workers()]
            file.write(json.dumps(line) + "\n")
        if step >= SLOW_FROM and not (self._folder / "hurry").exists():
            time.sleep(self._seconds)


def train(folder, seconds=0.0):
    """Trains, and returns the weights; `seconds` slow each step down."""
    keras.config.set_floatx("float64")
    folder = pathlib.Path(folder)
    model = tfparallel.data_parallel(build)
    attempt, index = os.environ.get("TFPARALLEL_RESTART_COUNT", 0), tfparallel.worker_index()
    (folder / f"pid_{attempt}_{index}").write_text(str(os.getpid()))
    model.compile(keras.optimizers.Adam(0.003), of_label, metrics=[examples])
    batches = tfparallel.data.EpochBatches(data(), global_batch_size=ROWS, seed=3)
    checkpoint = tfparallel.callbacks.Checkpoint(
        folder / "checkpoints", every_steps=EVERY, batches=batches
    )
    callbacks = [batches, checkpoint]
    if tfparallel.worker_index() == 0:
        callbacks.append(Keeps(folder, checkpoint, seconds))
    with tfparallel.callbacks.Preemption(checkpoint) as preemption:
        model.fit(
            batches.dataset,
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks, preemption],
        )
    return model.get_weights()


def alone():
    """The weights of one device, undisturbed, in plain Keras."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        model = build()
        model.compile(keras.optimizers.Adam(0.003), of_label, metrics=[examples])
        batches = tfparallel.data.EpochBatches(data(), global_batch_size=ROWS, seed=3)
        model.fit(batches.dataset, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[batches])
        return model.get_weights()
    finally:
        keras.config.set_floatx(before)
