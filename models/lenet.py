"""Classify handwritten digits with two convolutions of 20 filters and two dense layers, like LeNet.

Parallelism: `data`.
Why: the model is small, and there are many batches.

    tfparallel check models/lenet.py --parallel=data --num_devices=2
    tfparallel train models/lenet.py --parallel=data --num_devices=2 --epochs=6

By default it reads scikit-learn's digits, enlarged to 28x28, and downloads nothing.
Set `DIGITS_DATA=mnist` to use MNIST.

References:
    LeCun, Bottou, Bengio, Haffner. Gradient-based learning applied to document
    recognition. Proceedings of the IEEE 86(11), 1998.
"""

import keras

# Task files find each other: their folder is on the path while one is loaded.
from digits_cnn import load_digits

SIDE = 28


def build_model():
    """Returns a model that outputs logits, one for each digit."""
    return keras.Sequential(
        [
            keras.Input((SIDE, SIDE, 1), name="image"),
            keras.layers.Conv2D(20, 5, activation="relu", name="conv1"),
            keras.layers.Conv2D(20, 5, activation="relu", name="conv2"),
            keras.layers.MaxPooling2D(2, name="pool"),
            # 28 -> 24 -> 20 -> 10 pixels a side, 20 maps: 2,000 values.
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(50, activation="relu", name="dense1"),
            keras.layers.Dense(10, name="logits"),
        ],
        name="lenet",
    )


def compile_model(model):
    """Compiles the net with Adam and cross-entropy on the logits."""
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def load_data():
    """Returns (train, validation), each `(images, labels)` with images of 28x28."""
    return load_digits(SIDE)
