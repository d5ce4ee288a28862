"""`models/digits_cnn.py`, whose steps wait, so that `faults.py` can hit a given one.

`faults.py` copies it into the folder of a run, and lets the steps wait longer while that has a file
`hold`.
"""

import pathlib
import runpy
import time

import keras

_TASK = runpy.run_path("models/digits_cnn.py")  # All processes run at the top of the project.
build_model, compile_model, load_data = (
    _TASK[name] for name in ("build_model", "compile_model", "load_data")
)
SECONDS, HELD_SECONDS = 0.02, 1.0


class Waits(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        is_held = pathlib.Path(__file__).with_name("hold").exists()
        time.sleep(HELD_SECONDS if is_held else SECONDS)


def callbacks():
    return [Waits()]
