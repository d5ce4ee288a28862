r"""Solve Burgers' equation with a physics-informed network.

Parallelism: `data` (also checked: `tensor`).
Why: points are independent rows, and there are many.

    tfparallel check models/burgers.py --parallel=data --num_devices=2 --steps=5
    tfparallel check models/burgers.py --parallel=tensor --num_devices=2 --steps=5
    tfparallel train models/burgers.py --parallel=data --num_devices=2

The net learns a function u(x, t) from the equation alone, u_t + u u_x = ν u_xx: at random points it
is trained on the square of the residual, that is, of what the two sides differ by. The gradient of
such a loss is a gradient of derivatives. What u is at the start and at both ends, -sin(π x) and 0,
is built into the output. The metric is the distance from the exact solution, which no loss sees.

References:
    Basdevant et al. Spectral and finite difference solutions of the Burgers equation. Computers &
    Fluids 14(1), 1986.
    Lagaris, Likas, Fotiadis. Artificial neural networks for solving ordinary and partial
    differential equations. IEEE Transactions on Neural Networks 9(5), 1998.
    Raissi, Perdikaris, Karniadakis. Physics-informed neural networks. Journal of Computational
    Physics 378, 2019.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import ops

EPOCHS = 60
VISCOSITY = 0.05
NUM_TRAIN, NUM_VALIDATION = 2000, 500
NUM_STEPS = EPOCHS * NUM_TRAIN // 64  # Until the learning rate has decayed.
NUM_NODES = 64  # Of the quadrature for the exact solution.


@keras.saving.register_keras_serializable(package="tfparallel_models")
class Equation(keras.layers.Layer):
    """Maps points (x, t), `(batch, 2)`, to the solution and to the residual of the equation.

    Args:
        net: A model of points, `(batch, 2)`, that returns `(batch, 1)`.
    """

    def __init__(self, net, **kwargs):
        super().__init__(**kwargs)
        self.net = net

    def call(self, points):
        """Returns `{"u": …, "residual": …}`, each `(batch, 1)`."""
        with tf.GradientTape() as outer:
            outer.watch(points)
            with tf.GradientTape() as inner:
                inner.watch(points)
                u = self.solution(points)
            slopes = inner.gradient(u, points)
            u_x, u_t = slopes[:, :1], slopes[:, 1:]
        u_xx = outer.gradient(u_x, points)[:, :1]
        return {"u": u, "residual": u_t + u * u_x - VISCOSITY * u_xx}

    def solution(self, points):
        """Returns u, which has the right values at the start and at both ends, whatever the net."""
        x, t = points[:, :1], points[:, 1:]
        return t * (1 - ops.square(x)) * self.net(points) - ops.sin(np.pi * x)

    def get_config(self):
        """Returns the arguments of the constructor."""
        return {**super().get_config(), "net": keras.saving.serialize_keras_object(self.net)}

    @classmethod
    def from_config(cls, config):
        """Returns a layer with these arguments."""
        return cls(**{**config, "net": keras.saving.deserialize_keras_object(config["net"])})


def build_model():
    """Returns a model that outputs the solution and the residual at points."""
    hidden = [
        keras.layers.Dense(32, activation="tanh", name=f"hidden{number}") for number in (1, 2, 3)
    ]
    layers = [keras.Input((2,)), *hidden, keras.layers.Dense(1, name="correction")]
    points = keras.Input((2,), name="points")
    outputs = Equation(keras.Sequential(layers, name="net"), name="equation")(points)
    return keras.Model(points, outputs, name="burgers")


def compile_model(model):
    """Compiles the net with Adam, the squared residual, and the absolute error of u."""
    decay = keras.optimizers.schedules.CosineDecay(1e-2, NUM_STEPS)
    model.compile(
        optimizer=keras.optimizers.Adam(decay, epsilon=1e-4),
        loss={"u": None, "residual": "mean_squared_error"},
        metrics={"u": [keras.metrics.MeanAbsoluteError(name="mae")]},
    )


def load_data():
    """Returns (train, validation), each `(points, {"u": …, "residual": …})` in float32.

    Points `(examples, 2)`: x from -1 to 1, t from 0 to 1; the solution and zeros `(examples, 1)`.
    """
    random = np.random.default_rng(0)
    return drawn(NUM_TRAIN, random), drawn(NUM_VALIDATION, random)


def drawn(num, random):
    """Draws points, and returns them with what the model should output there."""
    x, t = random.uniform(-1, 1, num), random.uniform(0, 1, num)
    u = exact(x, t)[:, np.newaxis].astype("float32")
    return np.stack([x, t], axis=1).astype("float32"), {"u": u, "residual": np.zeros_like(u)}


def exact(x, t):
    """Returns the solution, `(points,)`: by Cole and Hopf it is a quotient of two integrals."""
    nodes, weights = np.polynomial.hermite.hermgauss(NUM_NODES)
    y = x[:, np.newaxis] - np.sqrt(4 * VISCOSITY * t)[:, np.newaxis] * nodes
    kernel = weights * np.exp(-np.cos(np.pi * y) / (2 * np.pi * VISCOSITY))
    return -np.sum(np.sin(np.pi * y) * kernel, axis=1) / np.sum(kernel, axis=1)
