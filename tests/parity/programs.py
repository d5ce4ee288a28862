"""The plain program that most cases vary in one place: a small net on digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers

from . import data
from .case import Case


def mlp() -> keras.Model:
    """64 pixels -> 12 tanh units -> 10 logits."""
    return keras.Sequential(
        [keras.Input((64,)), layers.Dense(12, activation="tanh"), layers.Dense(10)]
    )


def digits() -> dict[str, Any]:
    x, y = data.flat()
    return {"x": x, "y": y}


def sgd() -> keras.optimizers.Optimizer:
    """SGD shows the scale of a gradient, which Adam would hide."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


def cross_entropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(
    optimizer: Callable = sgd, loss: Callable = cross_entropy, **arguments
) -> Callable[[keras.Model], None]:
    """A function that compiles a model. Callables among the arguments are called then.

    So every run gets an optimizer, a loss and metrics of its own, made under the
    form that it is run with.
    """

    def compile_model(model: keras.Model) -> None:
        model.compile(
            optimizer=optimizer(),
            loss=loss() if loss else None,
            **{key: value() if callable(value) else value for key, value in arguments.items()},
        )

    return compile_model


def case(group: str, feature: str, name: str, **fields) -> Case:
    """A case that is the plain program but for the fields given."""
    plain = {"build": mlp, "compile": compiled(), "data": digits}
    return Case(group, feature, name, **(plain | fields))
