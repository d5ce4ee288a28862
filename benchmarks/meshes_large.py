"""A task for meshes.py whose weights, gradients and optimizer state exceed a device's limit."""

import keras
import numpy as np

WIDTH, NUM_LAYERS, NUM_CLASSES = 1024, 8, 16


def build_model():
    layers = [
        keras.layers.Dense(WIDTH, activation="relu", name=f"hidden{i}") for i in range(NUM_LAYERS)
    ]
    logits = keras.layers.Dense(NUM_CLASSES, name="logits")
    return keras.Sequential([keras.Input((WIDTH,)), *layers, logits], name="large")


def compile_model(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(1e-4), loss=loss, metrics=["accuracy"])


def load_data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(1024, WIDTH)).astype("float32")
    return (x, np.argmax(x[:, :NUM_CLASSES], 1)), None
