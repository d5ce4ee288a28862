"""A program that the judge must decide: plain Keras, and what is right to do with it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

# What is right on several devices:
EXACT = "exact"  # The weights of one device.
REFUSED = "refused"  # A `ValueError` that says who mixes examples, before a weight changes.
EITHER = "either"  # One of the two, and never other weights.
DRAWN = "drawn"  # Trained; a layer's own draws differ from those of one device.

PROGRAMS: dict[str, "Program"] = {}

FEATURES = 4


def numbers(num_rows=7, *shape, seed=0, shift=0.0):
    """Rows of normal numbers, `(num_rows, 4)` if no shape is given."""
    shape = shape or (FEATURES,)
    return np.random.default_rng(seed).normal(size=(num_rows, *shape)) + shift


def positive(num_rows=7, *shape, seed=0):
    """Rows of numbers between 0.5 and 3."""
    return np.random.default_rng(seed).uniform(0.5, 3, (num_rows, *(shape or (FEATURES,))))


def integers(num_rows=7, length=5, high=9, seed=0):
    """Padded sequences of the ids 1 to `high` - 1, each of a length of its own."""
    ids = np.random.default_rng(seed).integers(1, high, (num_rows, length))
    lengths = 1 + np.arange(num_rows) * 2 % length
    return np.where(np.arange(length) < lengths[:, None], ids, 0)


def targets(num_rows=7, *shape):
    """Rows of targets, `(num_rows, 1)` if no shape is given."""
    return np.random.default_rng(1).normal(size=(num_rows, *(shape or (1,))))


@dataclasses.dataclass(frozen=True)
class Program:
    """A small Keras program.

    Args:
        verdict: What is right on several devices.
        build: Returns an uncompiled model.
        x: The rows; the default is of shape `(7, 4)`.
        y: The targets, `(7, 1)` if not given.
        compile: Returns the arguments of `compile`, but for the optimizer: mean squared error.
        batch_size: All rows if not given.
        sample_weight: As `fit` takes it.
        as_dataset: Whether `fit` is given a data set of one batch, as rows that are no arrays must.
        between: Called with the model after a first `fit`; a second `compile` and `fit` follow, and
            the verdict is theirs.
        then: Called with the model and the rows after `fit`; what it returns is compared, too.
        options: What `data_parallel` is given besides.
        num_devices: How many it is given.
        batch_on_one: The batch size that is the same step on one device, if it is another one.
    """

    verdict: str
    build: Callable[[], keras.Model]
    x: Any = None
    y: Any = None
    compile: Callable[[], dict[str, Any]] = lambda: {"loss": "mse"}
    batch_size: int | None = None
    sample_weight: Any = None
    as_dataset: bool = False
    between: Callable[[keras.Model], None] | None = None
    then: Callable[[keras.Model, Any], Any] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_devices: int = 2
    batch_on_one: int | None = None

    @property
    def rows(self):
        return numbers() if self.x is None else self.x

    @property
    def num_rows(self) -> int:
        return int(keras.tree.flatten(self.rows)[0].shape[0])

    @property
    def targets(self):
        return targets(self.num_rows) if self.y is None else self.y


def program(name: str, verdict: str, build: Callable[[], keras.Model], **more) -> None:
    """Adds a program to the table."""
    if name in PROGRAMS:
        raise ValueError(f"Two programs have one name. Received: {name}")
    PROGRAMS[name] = Program(verdict, build, **more)


class Of(layers.Layer):
    """A function of the rows."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, x):
        return self.function(x)


def net(*middle, inputs=(FEATURES,), first=True, tail=True, dtype=None, **options):
    """Returns a builder: Dense, what is in the middle, Dense; functions of rows become layers."""

    def build():
        ends = [layers.Dense(FEATURES, name="first")] if first else []
        middle_layers = [each() if isinstance(each, Make | type) else Of(each) for each in middle]
        ends += [*middle_layers, *([layers.Dense(1, name="last")] if tail else [])]
        return keras.Sequential([keras.Input(inputs, dtype=dtype, **options), *ends])

    return build


class Make:
    """Makes a layer anew for each model, of a class and its arguments, layers among them."""

    def __init__(self, cls, *args, **kwargs):
        self.how = cls, args, kwargs

    def __call__(self):
        cls, args, kwargs = self.how
        return cls(*map(built, args), **kwargs)


def built(argument):
    """A layer of what makes it; another argument as it is."""
    if isinstance(argument, list):
        return [built(each) for each in argument]
    return argument() if isinstance(argument, Make) else argument


def centred(x):
    """Subtracts the mean of the batch: what no part of the batch can do alone."""
    return x - keras.ops.mean(x, axis=0)


class TwoDense(keras.Model):
    """A subclassed model with two layers, `hidden` and `head`."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = layers.Dense(4), layers.Dense(1)

    def build(self, shape):
        self.hidden.build(shape)
        self.head.build((None, 4))

    def call(self, x):
        return self.head(self.hidden(x))
