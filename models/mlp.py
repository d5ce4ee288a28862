"""Classify tumours as malignant or benign with dense layers of 64, 32 and 16 units.

Parallelism: `data`.
Why: the model is small, and the rows of a table are independent.

    tfparallel check models/mlp.py --parallel=data --num_devices=2
    tfparallel train models/mlp.py --parallel=data --num_devices=2 --epochs=10

The data are the 569 cell samples of the Wisconsin breast cancer set that
scikit-learn ships: 30 measurements each, malignant or benign.
"""

import keras
import numpy as np

# Fixed, so that every run holds out the same examples whatever its own seed.
SPLIT_SEED = 0
VALIDATION_SHARE = 0.2
NUM_MEASUREMENTS = 30


def build_model():
    """Returns a model that outputs one logit, above zero for benign."""
    return keras.Sequential(
        [
            keras.Input((NUM_MEASUREMENTS,), name="measurements"),
            keras.layers.Dense(64, activation="relu", name="hidden1"),
            keras.layers.Dense(32, activation="relu", name="hidden2"),
            keras.layers.Dense(16, activation="relu", name="hidden3"),
            keras.layers.Dense(1, name="logit"),
        ],
        name="mlp",
    )


def compile_model(model):
    """Compiles the net with Adam and binary cross-entropy on the logit."""
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        # The threshold is on the logit: 0 is a probability of one half.
        metrics=[keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)],
    )


def load_data():
    """Returns (train, validation), each `(measurements, labels)`.

    Measurements `(examples, 30)` in float32, standardized by the mean and the
    deviation of the training rows alone; labels `(examples, 1)` in float32.
    """
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(table.target))
    num_validation = int(len(order) * VALIDATION_SHARE)
    validation, train = order[:num_validation], order[num_validation:]
    mean, deviation = table.data[train].mean(axis=0), table.data[train].std(axis=0)
    measurements = ((table.data - mean) / deviation).astype("float32")
    labels = table.target[:, np.newaxis].astype("float32")
    return (measurements[train], labels[train]), (measurements[validation], labels[validation])
