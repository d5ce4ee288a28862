"""Weights that no part divides, in layers of one's own, behind a layer that no stage takes."""

import keras
import numpy as np

WIDE, NARROW, NUM_PAIRS = 256, 64, 4


@keras.saving.register_keras_serializable(package="tests")
class Mix(keras.layers.Layer):
    """A matrix."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, shape):
        self.matrix = self.add_weight(shape=(shape[-1], self.units), name="matrix")

    def call(self, x):
        return keras.ops.tanh(x @ self.matrix)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def build_model():
    pairs = [Mix(units, name=f"{i}_{units}") for i in range(NUM_PAIRS) for units in (WIDE, NARROW)]
    ends = [keras.layers.BatchNormalization(name="norm"), *pairs]
    return keras.Sequential([keras.Input((NARROW,)), *ends], name="own_matrices")


def compile_model(model):
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mse")


def load_data():
    x = np.random.default_rng(0).normal(size=(64, NARROW)).astype("float32")
    return (x, np.tanh(x[:, ::-1])), None
