r"""Steer a car by the picture of the road ahead, like PilotNet.

Parallelism: `pipeline` (also checked: `data`).
Why: layers in a row can be cut into stages of about equal time.

    tfparallel check models/steering.py --parallel=pipeline --num_devices=2 \
        --num_micro_batches=4 --steps=5
    tfparallel check models/steering.py --parallel=data --num_devices=2 --steps=5
    tfparallel train models/steering.py --parallel=pipeline --num_devices=2 --num_micro_batches=4

No package ships drives, so the pictures are drawn: a road whose curvature, width, light and ground
vary, seen from a car beside its middle, with noise. The angle to learn follows a law, pure pursuit:
to reach the point of the road's middle that is D ahead and s beside its axis, a car of wheelbase L
turns its front wheels by atan(2 L s / D²).

References:
    Bojarski and others. End to end learning for self-driving cars. arXiv 1604.07316, 2016.
    Coulter. Implementation of the pure pursuit path tracking algorithm. CMU-RI-TR-92-01, 1992.
"""

import keras
import numpy as np

EPOCHS = 6
HEIGHT, WIDTH = 32, 64
NUM_TRAIN, NUM_VALIDATION = 2400, 400
WHEELBASE, LOOK_AHEAD = 2.7, 12.0  # Meters.
CAMERA_HEIGHT, FOCAL_LENGTH = 1.4, 40.0  # Meters, pixels.


def build_model():
    """Returns a model that outputs the angle of the front wheels, in degrees to the right."""
    layer = {"activation": "relu", "kernel_initializer": "he_normal"}
    return keras.Sequential(
        [
            keras.Input((HEIGHT, WIDTH, 3), name="picture"),
            keras.layers.Conv2D(12, 5, strides=2, name="conv1", **layer),
            keras.layers.Conv2D(18, 3, strides=2, name="conv2", **layer),
            keras.layers.Conv2D(24, 3, name="conv3", **layer),
            keras.layers.Conv2D(24, 3, name="conv4", **layer),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(64, name="dense1", **layer),
            keras.layers.Dense(16, name="dense2", **layer),
            keras.layers.Dense(1, name="angle"),
        ],
        name="steering",
    )


def compile_model(model):
    """Compiles the net with Adam, squared error, and the absolute error in degrees."""
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3, epsilon=1e-3),
        loss="mean_squared_error",
        metrics=[keras.metrics.MeanAbsoluteError(name="mae")],
    )


def load_data():
    """Returns (train, validation), each `(pictures, angles)` in float32.

    Pictures `(examples, 32, 64, 3)` from 0 to 1; angles `(examples, 1)` in degrees.
    """
    return drive(NUM_TRAIN, seed=0), drive(NUM_VALIDATION, seed=1)


def drive(num_pictures, seed):
    """Draws roads, and returns them with the angle that leads to the middle of each."""
    random = np.random.default_rng(seed)

    def uniform(low, high, *shape):
        return random.uniform(low, high, size=(num_pictures, *(shape or (1,))))

    curvature = uniform(-0.02, 0.02)  # 1/m, to the right.
    offset = uniform(-1.0, 1.0)  # Of the car, in meters to the right of the middle.
    half_width = uniform(2.5, 4.0)
    horizon = HEIGHT // 4
    below = np.arange(HEIGHT) - horizon + 0.5
    distance = CAMERA_HEIGHT * FOCAL_LENGTH / np.maximum(below, 0.5)  # Of each row, in meters.
    middle = 0.5 * curvature * distance**2 - offset  # (pictures, rows), to the right.
    columns = np.arange(WIDTH) - WIDTH / 2 + 0.5
    beside = columns * distance[:, np.newaxis] / FOCAL_LENGTH - middle[..., np.newaxis]
    on_road = np.abs(beside) < half_width[..., np.newaxis]
    on_line = np.abs(np.abs(beside) - 0.9 * half_width[..., np.newaxis]) < 0.15
    colour = {name: uniform(*of, 1, 1, 3) for name, of in COLOURS.items()}
    pictures = np.where(on_road[..., np.newaxis], colour["road"], colour["ground"])
    pictures = np.where(on_line[..., np.newaxis], colour["line"], pictures)
    is_sky = (np.arange(HEIGHT) < horizon)[:, np.newaxis, np.newaxis]
    pictures = np.where(is_sky, colour["sky"], pictures)
    pictures = pictures * uniform(0.6, 1.0, 1, 1, 1) + random.normal(0, 0.03, pictures.shape)
    target = 0.5 * curvature * LOOK_AHEAD**2 - offset
    angles = np.degrees(np.arctan(2 * WHEELBASE * target / LOOK_AHEAD**2))
    return np.clip(pictures, 0, 1).astype("float32"), angles.astype("float32")


COLOURS = {"road": (0.3, 0.5), "ground": (0.1, 0.6), "line": (0.8, 1.0), "sky": (0.6, 1.0)}
