"""What the workers of these tests train: the network of `benchmarks/elastic_worker.py`, shorter."""

import json
import os
import pathlib
import sys
import time

import keras

import tfparallel

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))
from elastic_worker import EVERY, ROWS, build, examples, of_label  # noqa: E402
from elastic_worker import data as all_data  # noqa: E402

STEPS, EPOCHS = 20, 3
SLOW_FROM = 8


def data():
    return tuple(part[: ROWS * STEPS] for part in all_data())


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
