"""Padded text, its rows sorted by length, under a mask: a label for every token.

The sequences are the grey levels of the inked pixels of scikit-learn's digits, read row
by row; the model predicts the level that follows. Sorted by length, as text is batched
in practice, one replica gets many valid tokens and another few: a loss averaged replica
by replica weighs the tokens of the short rows more than those of the long.
"""

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

LENGTH = 24
NUM_EXAMPLES = 500


def build_model():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(17, 8, mask_zero=True, name="embed")(inputs)
    x = layers.GRU(16, return_sequences=True, name="gru")(x)
    return keras.Model(inputs, layers.Dense(17, name="logits")(x), name="padded_text")


def compile_model(model):
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )


def load_data():
    pixels, _ = load_digits(return_X_y=True)
    levels = pixels.astype("int32")[: NUM_EXAMPLES + 100]
    lengths = 2 + (np.arange(len(levels)) * 7) % (LENGTH - 2)
    x, y = np.zeros((2, len(levels), LENGTH), dtype="int32")
    for row, (image, length) in enumerate(zip(levels, lengths, strict=True)):
        inked = image[image > 0][: length + 1]
        x[row, : len(inked) - 1], y[row, : len(inked) - 1] = inked[:-1], inked[1:]
    return _by_length(x[:NUM_EXAMPLES], y[:NUM_EXAMPLES]), _by_length(
        x[NUM_EXAMPLES:], y[NUM_EXAMPLES:]
    )


def _by_length(x, y):
    order = np.argsort((x > 0).sum(axis=1), kind="stable")
    return x[order], y[order]
