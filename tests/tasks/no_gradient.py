"""A task with a variable that has no true gradient: a bias before batch normalization."""

import keras
from blobs import compile_model, load_data

__all__ = ["build_model", "compile_model", "load_data"]


def build_model():
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, name="hidden"),
            keras.layers.BatchNormalization(name="normalized"),
            keras.layers.ReLU(),
            keras.layers.Dense(3, name="logits"),
        ]
    )
