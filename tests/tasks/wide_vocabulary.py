"""A task whose predictions are far larger than its gradients: the next of 32,768 words.

Of 16 rows of 64 words the logits take 128 MiB, the gradients of all weights 4 MiB.
"""

import re

import keras
import numpy as np

from models.transformer import documentation

VOCABULARY, LENGTH, WIDTH = 32_768, 64, 16


def build_model():
    return keras.Sequential([
        keras.Input((LENGTH,), dtype="int32"),
        keras.layers.Embedding(VOCABULARY, WIDTH),
        keras.layers.Conv1D(WIDTH, 4, padding="causal", activation="relu"),
        keras.layers.Dense(VOCABULARY),
    ])  # fmt: skip


def compile_model(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-4), loss, metrics=["accuracy"])


def load_data():
    words = re.findall(r"\w+|[^\w\s]", documentation())
    numbers = {word: index for index, word in enumerate(dict.fromkeys(words))}
    ids = np.array([numbers[word] % VOCABULARY for word in words], "int32")
    num_rows = (len(ids) - 1) // LENGTH
    length = num_rows * LENGTH
    return (ids[:length].reshape(-1, LENGTH), ids[1 : length + 1].reshape(-1, LENGTH)), None
