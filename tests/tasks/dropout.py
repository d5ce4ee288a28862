"""The clouds of points under dropout: a task whose layers draw."""

import keras
from blobs import compile_model, load_data

__all__ = ["build_model", "compile_model", "load_data"]


def build_model():
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu", name="hidden"),
            keras.layers.Dropout(0.3, name="drop"),
            keras.layers.GaussianNoise(0.1, name="noise"),
            keras.layers.Dense(3, name="logits"),
        ]
    )
