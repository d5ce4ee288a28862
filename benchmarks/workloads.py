"""The models that `data_parallel.py` trains, and their data.

The data are prototypes of the classes under noise, so that there is something to learn and
nothing to download. How long a step takes does not depend on them.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np

SEED = 7
NUM_CLASSES = 10
NUM_BATCHES = 16
NOISE = 3.0


class Workload(NamedTuple):
    """A model and the data it is trained on.

    Attributes:
        description: What it is, for tables.
        build_model: Function that returns the Keras model; it puts out logits.
        input_shape: The shape of one example.
        global_batch_size: Examples of a step, over all replicas of a process.
    """

    description: str
    build_model: Callable[[], keras.Model]
    input_shape: tuple[int, ...]
    global_batch_size: int

    def batches(self, num_workers=1):
        """Returns inputs `(batches, global batch, …)` in float32 and labels in int32."""
        generator = np.random.default_rng(SEED)
        prototypes = generator.standard_normal((NUM_CLASSES, *self.input_shape))
        size = (NUM_BATCHES, self.global_batch_size * num_workers)
        labels = generator.integers(NUM_CLASSES, size=size)
        noise = generator.standard_normal((*labels.shape, *self.input_shape))
        return (prototypes[labels] + NOISE * noise).astype("float32"), labels.astype("int32")


def build_mlp():
    """Returns eight thin dense layers: next to no arithmetic, in hundreds of ops."""
    return keras.Sequential(
        [
            keras.Input((32,)),
            *[keras.layers.Dense(32, activation="relu") for _ in range(7)],
            keras.layers.Dense(NUM_CLASSES),
        ],
        name="mlp",
    )


def build_cnn(num_units=128, name="cnn"):
    """Returns the net of `models/digits_cnn.py` for 28 x 28 pixels, without padding.

    With 128 units it has 1.2 million parameters, with 1024 9.5 million.
    """
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(num_units, activation="relu"),
            keras.layers.Dense(NUM_CLASSES),
        ],
        name=name,
    )


WORKLOADS = {
    "dispatch_bound": Workload(
        "MLP of 8 thin dense layers", build_mlp, input_shape=(32,), global_batch_size=64
    ),
    # 128 examples for each of two replicas, so that two cores need over 100 ms a step.
    "compute_bound": Workload(
        "CNN of 2 convolutions", build_cnn, input_shape=(28, 28, 1), global_batch_size=256
    ),
    # For `scaling.py`: so many examples a worker.
    **{
        f"cnn_{number}": Workload(
            "CNN of 2 convolutions", build_cnn, input_shape=(28, 28, 1), global_batch_size=number
        )
        for number in (32, 128)
    },
    "wide_cnn_32": Workload(
        "CNN of 2 convolutions and 1024 units",
        functools.partial(build_cnn, 1024, "wide_cnn"),
        input_shape=(28, 28, 1),
        global_batch_size=32,
    ),
}
