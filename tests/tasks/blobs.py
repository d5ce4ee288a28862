"""Three clouds of points in eight dimensions: a task that trains in a second."""

import keras
import numpy as np


def build_model():
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu", name="hidden"),
            keras.layers.Dense(3, name="logits"),
        ],
        name="blobs",
    )


def compile_model(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"])


def load_data():
    generator = np.random.default_rng(0)
    y = np.arange(101) % 3
    x = generator.normal(size=(101, 8)) + 2.0 * np.eye(3, 8)[y]
    return (x[:80], y[:80]), (x[80:], y[80:])
