"""A task that a form cannot keep by itself: a layer adds a loss that compares examples."""

import keras
from blobs import compile_model, load_data

__all__ = ["build_model", "compile_model", "load_data"]


class Spread(keras.layers.Layer):
    """Rewards outputs that lie far from the mean of the batch."""

    def call(self, x):
        center = keras.ops.mean(x, axis=0, keepdims=True)
        self.add_loss(-keras.ops.mean(keras.ops.square(x - center)))
        return x


def build_model():
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu", name="hidden"),
            Spread(name="spread"),
            keras.layers.Dense(3, name="logits"),
        ]
    )
