"""The outer step of DiLoCo: `sync="diloco:8"` moves the weights past the average of the workers.

    Δ = θ₀ − Σ_w n_w θ_w / Σ_w n_w       how far H local steps went, as a gradient
    b ← μ b + Δ                          Nesterov's momentum, with μ = 0.9
    θ₀ ← θ₀ − α (Δ + μ b)                α = 0.7; all workers go on from here

References:
    Arthur Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    arXiv:2311.08105, 2023. Without momentum and with α = 1 it is local SGD; such outer steps are
    from Jianyu Wang et al., "SlowMo", arXiv:1910.00643, 2019.
"""

from typing import NamedTuple

import keras
import tensorflow as tf

from tfparallel.seams.tensorflow import ResourceVariable

LEARNING_RATE, MOMENTUM = 0.7, 0.9  # Of the paper.


class _State(NamedTuple):
    """What a trainable weight needs for the outer step.

    Attributes:
        weight: The weight.
        before: θ₀, its value before the local steps.
        momentum: b.
    """

    weight: keras.Variable
    before: tf.Variable
    momentum: tf.Variable


class OuterStep:
    """Keeps θ₀ and b of each trainable weight, on the host: they are read every H steps only."""

    def __init__(self):
        self._states: dict[int, _State] = {}  # By the id of the weight.

    def begin(self, weights: list[keras.Variable]) -> None:
        """Local steps start from the current values of these weights, equal on all workers."""
        self.prepare(weights)
        for weight in weights:
            self._states[id(weight)].before.assign(tf.convert_to_tensor(weight.value))

    def prepare(self, weights: list[keras.Variable]) -> None:
        """Creates the states of weights that have none, with their current values as θ₀."""
        for weight in weights:
            if id(weight) not in self._states:
                with tf.init_scope(), tf.device("CPU:0"):
                    value = tf.identity(tf.convert_to_tensor(weight.value))
                    self._states[id(weight)] = _State(
                        weight,
                        ResourceVariable(value, trainable=False),
                        ResourceVariable(tf.zeros_like(value), trainable=False),
                    )

    def step(self, weight: keras.Variable, mean: tf.Tensor) -> tf.Tensor:
        """Returns the new value of a trainable weight, given the average of the workers' values."""
        _, before, momentum = self._states[id(weight)]
        with tf.device(before.device):
            start = before.read_value()
            delta = start - mean
            moved = MOMENTUM * momentum.read_value() + delta
            value = start - LEARNING_RATE * (delta + MOMENTUM * moved)
            if weight.constraint is not None:
                value = weight.constraint(value)
            momentum.assign(moved)
            before.assign(value)
        return value

    def momentums(self, weights: list[keras.Variable]) -> dict[str, tf.Variable]:
        """The variables by name that a resumed run needs."""
        self.prepare(weights)
        return {
            f"outer momentum {index}": self._states[id(weight)].momentum
            for index, weight in enumerate(weights)
        }
