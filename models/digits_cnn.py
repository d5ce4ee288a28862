"""Classify handwritten digits with two convolutions of 32 and 64 filters and two dense layers.

Parallelism: `data`.
Why: the model fits on any device, and each device computes its share of a batch.

    tfparallel check models/digits_cnn.py --parallel=data --num_devices=2
    tfparallel train models/digits_cnn.py --parallel=data --num_devices=2 --epochs=6
    DIGITS_DATA=mnist tfparallel train models/digits_cnn.py --parallel=data --epochs=3

By default it reads the 1,797 digits of 8x8 pixels that scikit-learn ships and downloads nothing.
Set `DIGITS_DATA=mnist` to use MNIST (28x28).
"""

import os

import keras
import numpy as np

EPOCHS = 12

# Fixed, so that every run holds out the same examples whatever its own seed.
SPLIT_SEED = 0
VALIDATION_SHARE = 0.2


def build_model():
    """Returns a model that outputs logits, one for each digit."""
    side = 28 if data_source() == "mnist" else 8
    # Drawn to suit ReLU: training starts faster than from Keras's default.
    layer = {"activation": "relu", "kernel_initializer": "he_normal"}
    return keras.Sequential(
        [
            keras.Input((side, side, 1), name="image"),
            keras.layers.Conv2D(32, 3, padding="same", name="conv1", **layer),
            keras.layers.Conv2D(64, 3, padding="same", name="conv2", **layer),
            keras.layers.MaxPooling2D(2, name="pool"),
            # 4 pixels a side are left of 8, 64 maps: 1,024 values. (MNIST: 12,544.)
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(128, name="dense1", **layer),
            keras.layers.Dense(10, name="logits"),
        ],
        name="digits_cnn",
    )


def compile_model(model):
    """Compiles the net with Adam and cross-entropy on the logits."""
    model.compile(
        # With Adam's default epsilon, 1e-7, a weight whose gradient is next to zero moves by the
        # rounding of that gradient; 1e-3 keeps float32 runs together.
        optimizer=keras.optimizers.Adam(3e-3, epsilon=1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def load_data():
    """Returns (train, validation), each `(images, labels)`."""
    return load_digits(28 if data_source() == "mnist" else 8)


def data_source():
    """Returns what the environment variable DIGITS_DATA asks for."""
    source = os.environ.get("DIGITS_DATA", "sklearn").lower()
    if source not in ("sklearn", "mnist"):
        raise ValueError(
            "The data must be one of sklearn, mnist. "
            f"Received: DIGITS_DATA={source!r}. Unset it for scikit-learn's digits."
        )
    return source


def load_digits(side):
    """Loads the digits that DIGITS_DATA names, as squares of `side` pixels.

    Returns (train, validation): images `(examples, side, side, 1)` in float32
    from 0 to 1, labels `(examples,)` in int32.
    """
    if data_source() == "mnist":
        train, validation = _load_mnist()
    else:
        train, validation = _load_sklearn_digits()
    return tuple(
        (_resize(images, side)[..., np.newaxis].astype("float32"), labels.astype("int32"))
        for images, labels in (train, validation)
    )


def _load_sklearn_digits():
    from sklearn.datasets import load_digits as sklearn_digits

    digits = sklearn_digits()
    images, labels = digits.images / 16.0, digits.target
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    num_validation = int(len(labels) * VALIDATION_SHARE)
    validation, train = order[:num_validation], order[num_validation:]
    return (images[train], labels[train]), (images[validation], labels[validation])


def _load_mnist():
    try:
        train, validation = keras.datasets.mnist.load_data()
    except Exception as error:
        raise RuntimeError(
            "MNIST could not be downloaded; it needs the internet once. "
            f"Received: {error}. Put mnist.npz into ~/.keras/datasets/ by hand, "
            "or unset DIGITS_DATA to train on the digits that scikit-learn carries."
        ) from error
    return tuple((images / 255.0, labels) for images, labels in (train, validation))


def _resize(images, side):
    """Resizes `(examples, height, width)` bilinearly; NumPy alone, before TensorFlow starts."""
    if images.shape[1] == side:
        return images
    weights = _bilinear_weights(images.shape[1], side)
    return weights @ images @ weights.T


def _bilinear_weights(num_in, num_out):
    """Returns the matrix `(num_out, num_in)` that resizes one axis.

    The centre of output pixel i lies at (i + 1/2) * num_in / num_out - 1/2; its
    two neighbours share the weight by their distance to it.
    """
    centres = (np.arange(num_out) + 0.5) * num_in / num_out - 0.5
    centres = np.clip(centres, 0, num_in - 1)
    distance = np.abs(centres[:, np.newaxis] - np.arange(num_in))
    return np.maximum(0.0, 1.0 - distance)
