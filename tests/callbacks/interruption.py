"""A `fit` that ends within an epoch, and its data: 50 examples, 7 batches of 8."""

import keras
import numpy as np

X = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


class Interruption(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """Ends `fit` before the given step of an epoch."""

    def __init__(self, epoch, step):
        super().__init__()
        self._at = (epoch, step)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self._epoch, batch) == self._at:
            raise Interruption
