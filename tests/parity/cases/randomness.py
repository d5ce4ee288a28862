"""Layers that draw random numbers: each piece draws those of its rows."""

from __future__ import annotations

import keras
from keras import layers

from .. import data
from ..programs import case
from .layers import dense, row_digits, stack
from .optimizers import image_digits

GROUP = "Random layers"


class OwnDropout(layers.Layer):
    """A user's layer with its own seed generator."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        return keras.random.dropout(x, 0.3, seed=self.seed_generator) if training else x


class GlobalNoise(layers.Layer):
    """A user's layer that draws by Keras's global seed, once for each example and once for all."""

    def call(self, x, training=False):
        rows, width = keras.ops.shape(x)
        if not training:
            return x
        return x + 0.1 * keras.random.normal((rows, 1)) * keras.random.uniform((width,))


def attention_dropout():
    inputs = keras.Input((8, 8))
    x = layers.MultiHeadAttention(2, 4, dropout=0.3, seed=1)(inputs, inputs)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


PIXELS = {
    "Dropout": stack((64,), dense, lambda: layers.Dropout(0.3)),
    "Dropout with a seed": stack((64,), dense, lambda: layers.Dropout(0.3, seed=5)),
    "Dropout with a noise shape": stack(
        (64,), dense, lambda: layers.Dropout(0.3, noise_shape=(None, 1), seed=5)
    ),
    "GaussianNoise": stack((64,), dense, lambda: layers.GaussianNoise(0.2)),
    "GaussianDropout": stack((64,), dense, lambda: layers.GaussianDropout(0.3)),
    "AlphaDropout": stack((64,), dense, lambda: layers.AlphaDropout(0.3)),
    "a user's layer with a `SeedGenerator`": stack((64,), dense, OwnDropout),
    "a user's layer that draws by the global seed": stack((64,), dense, GlobalNoise),
}
ROWS = {
    "SpatialDropout1D": stack((8, 8), lambda: layers.SpatialDropout1D(0.3)),
    "LSTM with dropout": stack((8, 8), lambda: layers.LSTM(6, dropout=0.2, recurrent_dropout=0.2)),
    "GRU with dropout": stack((8, 8), lambda: layers.GRU(6, dropout=0.3, seed=2)),
    "MultiHeadAttention with dropout": attention_dropout,
}
IMAGES = {
    "SpatialDropout2D": stack(
        (8, 8, 1), lambda: layers.Conv2D(6, 3), lambda: layers.SpatialDropout2D(0.3)
    ),
    "RandomFlip": stack((8, 8, 1), lambda: layers.RandomFlip(seed=3)),
    "RandomZoom": stack((8, 8, 1), lambda: layers.RandomZoom(0.2, seed=3)),
    "RandomContrast": stack((8, 8, 1), lambda: layers.RandomContrast(0.2, seed=3)),
    "RandomRotation": stack((8, 8, 1), lambda: layers.RandomRotation(0.1, seed=3)),
    "RandomTranslation": stack((8, 8, 1), lambda: layers.RandomTranslation(0.1, 0.1, seed=3)),
}


def called_with_training():
    """A layer is told not to draw; up to Keras 3.15 the model tells it otherwise."""
    inputs = keras.Input((64,))
    x = layers.Dropout(0.3, seed=1)(inputs, training=False)
    x = layers.Dense(12, activation="tanh")(x)
    return keras.Model(inputs, layers.Dense(10)(layers.Dropout(0.3, seed=2)(x)))


def row_of(name: str) -> str:
    if name.startswith("a user"):
        return name
    first, _, rest = name.partition(" with ")
    return f"`{first}` with {rest}" if rest == "dropout" else f"`{first}`"


CASES = [
    case(
        GROUP,
        row_of(name),
        f"random {name}",
        build=build,
        data=load,
        # Keras's random image layers compute in float32.
        dtype="float32" if load is image_digits and name.startswith("Random") else "float64",
    )
    for table, load in [
        (PIXELS, lambda: dict(zip(("x", "y"), data.flat(), strict=True))),
        (ROWS, row_digits),
        (IMAGES, image_digits),
    ]
    for name, build in table.items()
]
CASES.append(
    case(
        GROUP,
        "`Dropout`",
        "random Dropout called with training=False",
        build=called_with_training,
    )
)
