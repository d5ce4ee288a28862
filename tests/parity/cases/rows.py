"""What belongs to no row, or to more than one: read once a batch, drawn for a weight, summed."""

from __future__ import annotations

import functools

import keras
import numpy as np
from keras import layers, ops, optimizers

from .. import data, refusals
from ..programs import case, compiled
from .layers import dense, row_digits, stack, text_digits
from .structures import fit_evaluate_predict

GROUP = "Rows"
ONCE = "an embedding that is read once a batch"
DROPPED = "dropout of what has no rows, or has them on another axis"
METRIC = "a metric that a layer holds"


class Positions(layers.Layer):
    """A position embedding whose indices are made in `call`."""

    def build(self, shape):
        self.table = layers.Embedding(shape[1], shape[2])
        self.table.build(None)

    def call(self, x):
        return x + self.table(ops.arange(x.shape[1]))


class HeldPositions(Positions):
    """The same, with indices that the layer holds, too many for TensorFlow to copy them."""

    def build(self, shape):
        self.table = layers.Embedding(500, shape[2])
        self.table.build(None)
        self.places = ops.convert_to_tensor(np.arange(500) % 7, "int32")

    def call(self, x):
        return x + ops.sum(self.table(self.places), axis=0) / 100


class PositionsOfEachRow(Positions):
    """The same, repeated for each row: the whole batch has a slice for each of them."""

    def call(self, x):
        places = ops.broadcast_to(ops.arange(x.shape[1])[None], ops.shape(x)[:2])
        return x + self.table(places)


class TiedTable(layers.Layer):
    """One table, read with tokens and with positions."""

    def build(self, shape):
        self.table = layers.Embedding(20, 8)
        self.table.build(None)

    def call(self, tokens):
        return self.table(tokens) + self.table(ops.arange(tokens.shape[1]) + 2)




class DroppedPositions(layers.Layer):
    """Drops parts of a position embedding, `(1, T, F)`: one mask for all examples."""

    def build(self, shape):
        self.positions = self.add_weight(shape=shape[1:], name="positions")
        self.drop = layers.Dropout(0.4, seed=3)

    def call(self, x, training=False):
        return x + self.drop(self.positions[None], training=training)


class DroppedKernel(layers.Layer):
    """DropConnect (Wan et al., 2013): a mask of the kernel."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8), name="kernel")
        self.drop = layers.Dropout(0.4, seed=3)

    def call(self, x, training=False):
        return ops.tanh(ops.matmul(x, self.drop(self.kernel, training=training)))


class TimeMajor(layers.Layer):
    """Drops parts of a tensor whose axis 0 is time, `(T, B, F)`."""

    def build(self, shape):
        self.drop = layers.Dropout(0.4, seed=3)

    def call(self, x, training=False):
        x = ops.transpose(x, (1, 0, 2))
        return ops.transpose(self.drop(ops.tanh(x), training=training), (1, 0, 2))


class ConcatenatedViews(layers.Layer):
    """Two views of each example, one after the other along axis 0, as in contrastive learning."""

    def build(self, shape):
        self.drop = layers.Dropout(0.4, seed=3)

    def call(self, x, training=False):
        both = self.drop(ops.concatenate([x, -x], axis=0), training=training)
        first, second = ops.split(both, 2, axis=0)
        return first * 2 + second


class HoldsMetrics(layers.Layer):
    """Counts rows, and means and sums over them, in metrics of its own."""

    def build(self, shape):
        self.rows = keras.metrics.Sum(name="rows")
        self.mean = keras.metrics.Mean(name="size")
        self.error = keras.metrics.MeanSquaredError(name="error")

    def call(self, x):
        self.rows.update_state(ops.ones((ops.shape(x)[0],)))
        self.mean.update_state(ops.sum(ops.abs(x), axis=-1))
        self.error.update_state(x, 2 * x)
        return x

def pooled(make):
    def build():
        inputs = keras.Input((8, 8))
        x = make()(layers.Dense(8)(inputs))
        return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))

    return build


def tied():
    inputs = keras.Input((12,), dtype="int64")
    x = layers.GlobalAveragePooling1D()(TiedTable()(inputs))
    return keras.Model(inputs, layers.Dense(10)(ops.tanh(x)))


def constant_input_positions():
    """Indices that the functional model itself holds."""
    inputs = keras.Input((8, 8))
    places = layers.Lambda(lambda x: ops.arange(8)[None])(inputs)
    x = layers.Dense(8)(inputs) + layers.Embedding(8, 8)(places)
    return keras.Model(inputs, layers.Dense(10)(layers.Flatten()(ops.tanh(x))))


def once(name, build=None, make=Positions, optimizer=lambda: optimizers.Adam(0.01), **fields):
    run_eagerly = fields.pop("run_eagerly", False)
    return case(
        GROUP,
        ONCE,
        f"positions {name}",
        build=build or pooled(make),
        compile=compiled(optimizer, run_eagerly=run_eagerly),
        **({"data": row_digits} | fields),
    )


CASES = [
    once("by arange"),
    once("by arange, RMSprop", optimizer=lambda: optimizers.RMSprop(0.01)),
    once("by arange, Adagrad", optimizer=lambda: optimizers.Adagrad(0.05)),
    once("by arange, clipped", optimizer=lambda: optimizers.Adam(0.01, global_clipnorm=0.1)),
    once(
        "by arange, accumulated",
        optimizer=lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3),
    ),
    once("by arange, eagerly", run_eagerly=True, fit={"epochs": 1}),
    once("held by the layer", make=HeldPositions),
    once("of each row", make=PositionsOfEachRow),
    once("in the graph of a functional model", build=constant_input_positions),
    once("and tokens in one table", build=tied, data=text_digits),
]

CASES += [
    case(
        GROUP,
        DROPPED,
        f"dropout of {name}" + ", eagerly" * eagerly,
        build=pooled(layer),
        data=row_digits,
        compile=compiled(run_eagerly=eagerly),
        fit={"epochs": 1 if eagerly else 4},
    )
    for eagerly in (False, True)
    for name, layer in [
        ("positions", DroppedPositions),
        ("a kernel", DroppedKernel),
        ("a time-major tensor", TimeMajor),
    ]
]
CASES += [
    case(
        GROUP,
        METRIC,
        "metrics that a layer holds",
        build=stack((64,), dense, HoldsMetrics),
        train=fit_evaluate_predict,
    ),
]


MIXED = "a layer that mixes examples"
STATEFUL = "a layer that keeps something of the rows"
VIEWS = "two views of each example, one after the other on axis 0"


class Centred(layers.Layer):
    """Subtracts the mean of the batch."""

    def call(self, x):
        return x - ops.mean(x, axis=0)


class KeepsState(layers.Layer):
    """Keeps something of the rows that it has seen."""

    def __init__(self, what, **kwargs):
        super().__init__(**kwargs)
        self.what = what

    def build(self, shape):
        self.state = self.add_weight(shape=(), initializer="zeros", trainable=False, name="kept")

    def call(self, x):
        new = {
            "maximum": lambda: ops.maximum(self.state, ops.max(x)),
            "sum": lambda: self.state + ops.sum(x),
            "count": lambda: self.state + ops.cast(ops.shape(x)[0], x.dtype),
            "mean": lambda: 0.9 * self.state + 0.1 * ops.mean(x),
        }[self.what]()
        self.state.assign(new)
        return x

    def get_config(self):
        return super().get_config() | {"what": self.what}


class AddsLoss(layers.Layer):
    """Adds a sum over the rows as a loss, where Keras's convention is a mean."""

    def call(self, x):
        self.add_loss(1e-3 * ops.sum(ops.square(x)))
        return x


class Doubled(layers.Layer):
    """Puts out two rows for each example, the first ones of all before the second ones."""

    def call(self, x):
        return ops.concatenate([x, -x], axis=0)


class Constant(layers.Layer):
    """Puts out a weight, and no rows."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, shape[-1]), name="kernel")

    def call(self, x):
        return self.kernel + 0 * ops.mean(x)


def mixed(name, make, refused, feature=MIXED, **fields):
    return case(
        GROUP,
        feature,
        f"mixes examples: {name}",
        build=stack((64,), dense, make),
        refused=refused,
        **fields,
    )


def keeps(what):
    refused = refusals.MIXES_EXAMPLES if what != "mean" else refusals.STATE_OF_A_CALL
    return mixed(f"keeps the {what}", functools.partial(KeepsState, what), refused, STATEFUL)


CASES += [
    mixed("subtracts the batch's mean", Centred, refusals.MIXES_EXAMPLES),
    *map(keeps, ("maximum", "sum", "count", "mean")),
    mixed("adds a sum as a loss", AddsLoss, refusals.MIXES_EXAMPLES),
    case(
        GROUP,
        VIEWS,
        "dropout of two views",
        build=pooled(ConcatenatedViews),
        data=row_digits,
        refused=refusals.MIXES_EXAMPLES,
    ),
]

DECLARED = "a batch size that the model declares"
COUNTED = "values for a fixed number of rows"


class ScaledByPlace(layers.Layer):
    """Multiplies each row by its number, of as many rows as the static shape says."""

    def call(self, x):
        return x * ops.reshape(ops.cast(ops.arange(x.shape[0]), x.dtype), (-1, 1))


def declares_its_batch(middle):
    def build():
        inputs = keras.Input((64,), batch_size=17)
        return keras.Model(inputs, layers.Dense(10)(middle(layers.Dense(8)(inputs))))

    return build


def scaled_by_constant(x):
    return x * ops.reshape(ops.arange(17, dtype=x.dtype), (-1, 1))


def full_batches():
    x, y = data.flat(4 * 17)
    return {"x": x, "y": y}


def declared(name, middle, refused=None):
    return case(
        GROUP,
        COUNTED if refused else DECLARED,
        name,
        build=declares_its_batch(middle),
        data=full_batches,
        refused=refused or {},
    )


CASES += [
    declared("declares its batch size", lambda x: layers.Activation("relu")(x)),
    declared("scaled by a constant of its rows", scaled_by_constant, refusals.MIXES_EXAMPLES),
    declared("scaled by place", lambda x: ScaledByPlace()(x), refusals.MIXES_EXAMPLES),
]
