"""Small networks of every kind that is hard on a GPU, each with batches of different sizes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
_SIZES = (7, 5, 2)  # Which two devices do not divide, and divide.


class Network(NamedTuple):
    """A network and its data.

    Attributes:
        build: Returns the model, not compiled.
        batches: Returns the batches, `(x, y)` each.
        loss: What it is compiled with.
    """

    build: Callable[[], keras.Model]
    batches: Callable[[], list[tuple[Any, Any]]]
    loss: str = "mse"


def _batches_of(x: Callable[[np.random.Generator, int], Any], width: int = 2):
    draw = np.random.default_rng(5)
    return [(x(draw, size), draw.normal(size=(size, width)).astype("float32")) for size in _SIZES]


def _mlp():
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, activation="relu"),
            layers.Dropout(0.3),
            layers.Dense(2),
        ]
    )


def _cnn():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(8, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )


def _lstm(mask_zero):
    return keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(10, 8, mask_zero=mask_zero),
            layers.LSTM(8),
            layers.Dense(2),
        ]
    )


def _encoder():
    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(10, 16)(ids)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8, dropout=0.1)(x, x))
    x = layers.Dense(16)(layers.Dropout(0.1)(layers.Dense(32, activation="gelu")(x)))
    return keras.Model(ids, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def _words():
    words = keras.Input((3,), dtype="string")
    x = layers.StringLookup(vocabulary=list("abcd"))(words)
    return keras.Model(words, layers.Dense(2)(layers.Flatten()(layers.Embedding(6, 4)(x))))


def _of_sparse():
    counts = keras.Input((20,), sparse=True)
    return keras.Model(counts, layers.Dense(2)(layers.Dense(8, activation="relu")(counts)))


@keras.saving.register_keras_serializable("tfparallel")
class MeanOfRows(layers.Layer):
    """The mean over the steps of ragged rows, `(batch, None, width)` to `(batch, width)`."""

    def call(self, rows):
        return tf.reduce_mean(rows, 1)

    def compute_output_shape(self, shape):
        return (shape[0], shape[2])


def _of_ragged():
    ids = keras.Input((None,), dtype="int32", ragged=True)
    return keras.Model(ids, layers.Dense(2)(MeanOfRows()(layers.Embedding(10, 4)(ids))))


def _ids(draw, size):
    return draw.integers(0, 10, (size, 6)).astype("int32")


def _padded_ids(draw, size):
    """Zeros behind each row's words, of which it has some: on a GPU Keras refuses other masks."""
    ids = draw.integers(1, 10, (size, 6))
    return np.where(np.arange(6) < draw.integers(1, 7, (size, 1)), ids, 0).astype("int32")


def _ragged(draw, size):
    return tf.RaggedTensor.from_row_lengths(
        draw.integers(1, 10, 2 * size).astype("int32"), [1, 3] * (size // 2) + [2] * (size % 2)
    )


NETWORKS = {
    "MLP with dropout": Network(
        _mlp,
        lambda: _batches_of(lambda draw, size: draw.normal(size=(size, 6)).astype("float32")),
    ),
    "CNN with batch normalization": Network(
        _cnn,
        lambda: _batches_of(lambda draw, size: draw.normal(size=(size, 8, 8, 3)).astype("float32")),
    ),
    "LSTM": Network(functools.partial(_lstm, False), lambda: _batches_of(_ids)),
    "LSTM with masks": Network(functools.partial(_lstm, True), lambda: _batches_of(_padded_ids)),
    "transformer with dropout": Network(_encoder, lambda: _batches_of(_ids)),
    "strings": Network(
        _words, lambda: _batches_of(lambda draw, size: draw.choice(list("abcd"), (size, 3)))
    ),
    "sparse": Network(
        _of_sparse,
        lambda: _batches_of(
            lambda draw, size: tf.sparse.from_dense(
                draw.integers(0, 2, (size, 20)).astype("float32")
            )
        ),
    ),
    "ragged": Network(_of_ragged, lambda: _batches_of(_ragged)),
}


def resnet50(is_small: bool) -> tuple[keras.Model, Any, Any]:
    """Returns ResNet-50 (He et al., 2016), and a batch for each device."""
    size, rows = (32, 2) if is_small else (224, 64)
    model = keras.applications.ResNet50(
        weights=None, input_shape=(size, size, 3), classes=1000, classifier_activation=None
    )
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, size, size, 3)).astype("float32")
    return model, x, draw.integers(0, 1000, rows)


def transformer(is_small: bool) -> tuple[keras.Model, Any, Any]:
    """Returns an encoder (Vaswani et al., 2017) that predicts tokens, and a batch a device."""
    length, width, depth, rows = (8, 16, 1, 2) if is_small else (256, 768, 8, 16)
    vocabulary = 32_768 if not is_small else 64
    ids = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(ids)
    for _ in range(depth):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(width // 8, 8, dropout=0.1)(y, y)
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1)(layers.Dense(width)(y))
    model = keras.Model(ids, layers.Dense(vocabulary)(x))
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, vocabulary, (rows, length))
    return model, tokens.astype("int32"), tokens
