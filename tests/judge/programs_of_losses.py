"""Losses and metrics: of each example, and of several, which meet where they are computed."""

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.judge.program import (
    EITHER,
    EXACT,
    integers,
    net,
    program,
    targets,
)

PLAIN = net()


def of_each(y, outputs):
    return ops.mean(ops.abs(y - outputs) ** 1.5, axis=-1)


def of_all(y, outputs):
    return ops.mean((y - outputs) ** 2)


def root(y, outputs):
    return ops.sqrt(ops.mean((y - outputs) ** 2))


def summed(y, outputs):
    return 0.1 * ops.sum((y - outputs) ** 2)


def contrastive(y, outputs):
    near = outputs @ ops.transpose(outputs)
    return -ops.mean(ops.diagonal(ops.log_softmax(near)))


def contrastive_of_each(y, outputs):
    return -ops.diagonal(ops.log_softmax(outputs @ ops.transpose(outputs)))


def ranking(y, outputs):
    """Each pair of the batch in its order."""
    sign = ops.sign(y - ops.transpose(y))
    return ops.mean(ops.relu(1 - sign * (outputs - ops.transpose(outputs))))


def masked(y, outputs):
    mask = ops.cast(y > 0, outputs.dtype)
    return ops.sum(mask * (y - outputs) ** 2) / (ops.sum(mask) + 1e-3)


def masked_of_each(y, outputs):
    """A term for each example, divided by what all of them have."""
    mask = ops.cast(y > 0, outputs.dtype)
    return ops.sum(mask * (y - outputs) ** 2, axis=-1) / (ops.sum(mask) + 1e-3)


def dice(y, outputs):
    outputs, y = ops.sigmoid(outputs), ops.cast(y > 0, outputs.dtype)
    return 1 - 2 * ops.sum(y * outputs) / (ops.sum(y) + ops.sum(outputs))


def standardized(y, outputs):
    return ops.mean(((y - ops.mean(y)) / ops.std(y) - outputs) ** 2, axis=-1)


def hardest(y, outputs):
    """The two worst of the batch."""
    return ops.mean(ops.top_k(ops.mean((y - outputs) ** 2, axis=-1), 2)[0])


def correlation(y, outputs):
    y, outputs = y - ops.mean(y), outputs - ops.mean(outputs)
    return -ops.sum(y * outputs) / ops.sqrt(ops.sum(y**2) * ops.sum(outputs**2))


def largest(y, outputs):
    return ops.max(ops.abs(y - outputs))


def of_row_numbers(y, outputs):
    """Later rows of a batch count more."""
    number = ops.cast(ops.arange(ops.shape(y)[0]), outputs.dtype)[:, None]
    return ops.mean(number * (y - outputs) ** 2, axis=-1)


def by_number_of_rows(y, outputs):
    return ops.sum((y - outputs) ** 2) / ops.cast(ops.shape(y)[0], outputs.dtype)


def kept_as_rows(y, outputs):
    return (y - outputs) ** 2


class OfFunction(keras.losses.Loss):
    """A loss class whose `call` gives what a function gives."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self.function = function

    def call(self, y, outputs):
        return self.function(y, outputs)


class OwnReduction(keras.losses.Loss):
    """Reduces by itself, whatever Keras's reduction is."""

    def __call__(self, y, outputs, sample_weight=None):
        values = ops.sum(ops.abs(y - outputs), axis=-1)
        return ops.sqrt(ops.mean(values**2))

    def call(self, y, outputs):
        return ops.mean(ops.abs(y - outputs), axis=-1)


def with_loss(loss, **more):
    return lambda: {"loss": loss() if isinstance(loss, functools.partial) else loss, **more}


LOSSES = {
    "of each example": of_each,
    "kept as rows": kept_as_rows,
    "mean of all": of_all,
    "root of a mean": root,
    "sum": summed,
    "contrastive": contrastive,
    "contrastive of each": contrastive_of_each,
    "ranking": ranking,
    "masked": masked,
    "masked of each": masked_of_each,
    "dice": dice,
    "standardized targets": standardized,
    "hardest": hardest,
    "correlation": correlation,
    "largest": largest,
    "row numbers": of_row_numbers,
    "by the number of rows": by_number_of_rows,
    "class of each": functools.partial(OfFunction, of_each),
    "class of all": functools.partial(OfFunction, of_all),
    "class, sum": functools.partial(OfFunction, of_each, reduction="sum"),
    "class, no reduction": functools.partial(OfFunction, root, reduction=None),
    "class of its own reduction": OwnReduction(),
    "huber": "huber",
    "log_cosh": "log_cosh",
    "cosine": keras.losses.CosineSimilarity(axis=0),
}
for name, loss in LOSSES.items():
    verdict = EITHER if name in ("cosine",) else EXACT
    program(f"loss: {name}", verdict, PLAIN, compile=with_loss(loss), batch_size=5)

weights = np.linspace(0.1, 2, 7)
for name in ("of each example", "contrastive of each", "masked of each", "class of each"):
    program(
        f"loss: {name}, weighted",
        EXACT,
        PLAIN,
        compile=with_loss(LOSSES[name]),
        sample_weight=weights,
    )
program("loss: targets of rank 1", EXACT, PLAIN, y=targets(7)[:, 0])
program(
    "loss: targets of rank 1, own function",
    EXACT,
    PLAIN,
    y=targets(7)[:, 0],
    compile=with_loss(of_each),
)
program(
    "loss: targets of rank 1, broadcast",
    EXACT,
    PLAIN,
    y=targets(7)[:, 0],
    compile=with_loss(of_all),
)
program(
    "loss: outputs of rank 1",
    EXACT,
    net(lambda x: ops.sum(x, axis=1), tail=False),
    y=targets(7)[:, 0],
)
program(
    "loss: outputs of rank 1, targets of rank 2",
    EXACT,
    net(lambda x: ops.sum(x, axis=1), tail=False),
    compile=with_loss(of_all),
)
program("loss: one for all rows", EITHER, net(lambda x: ops.sum(x), tail=False), y=np.zeros((7,)))


def of_two():
    inputs = keras.Input((4,))
    x = layers.Dense(4)(inputs)
    return keras.Model(
        inputs, {"a": layers.Dense(1, name="a")(x), "b": layers.Dense(2, name="b")(x)}
    )


program(
    "loss: of two outputs",
    EXACT,
    of_two,
    y={"a": targets(), "b": targets(7, 2)},
    compile=lambda: {"loss": {"a": contrastive, "b": "mse"}, "loss_weights": {"a": 0.3, "b": 2.0}},
)
program(
    "loss: mostly zero weights",
    EXACT,
    PLAIN,
    compile=lambda: {"loss": "mse", "weighted_metrics": ["mae"]},
    sample_weight=np.array([1.0, 0, 0, 2, 0, 1, 0.5]),
)


def tagger():
    inputs = keras.Input((5,), dtype="int64")
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    return keras.Model(inputs, layers.Dense(3)(x))


program(
    "loss: masked by an embedding",
    EXACT,
    tagger,
    x=integers(),
    y=integers() % 3,
    compile=lambda: {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
)
program(
    "loss: a class is ignored",
    EXACT,
    tagger,
    x=integers(),
    y=integers() % 3,
    compile=lambda: {
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    },
)
program(
    "loss: mean with sample weight",
    EXACT,
    PLAIN,
    sample_weight=weights,
    compile=lambda: {"loss": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")},
)


class Scaled(OfFunction):
    """Reads a variable that Keras does not know."""

    def __init__(self):
        super().__init__(of_each)
        self.scale = tf.Variable(tf.ones((), "float64"))

    def call(self, y, outputs):
        return super().call(y, outputs) * tf.cast(self.scale, outputs.dtype)


class Counting(OfFunction):
    """Counts its calls in a variable."""

    def __init__(self):
        super().__init__(of_each)
        self.calls = keras.Variable(0.0)

    def call(self, y, outputs):
        self.calls.assign_add(1.0)
        return super().call(y, outputs) * (1 + 0.1 * ops.cast(self.calls, outputs.dtype))


class Moving(OfFunction):
    """Divides by a mean of what it has seen."""

    def __init__(self):
        super().__init__(of_each)
        self.size = keras.Variable(1.0)

    def call(self, y, outputs):
        values = super().call(y, outputs)
        size = 0.9 * ops.cast(self.size, values.dtype) + 0.1 * ops.mean(values)
        self.size.assign(ops.stop_gradient(size))
        return values / ops.stop_gradient(size)


program("loss: reads a variable", EXACT, PLAIN, compile=lambda: {"loss": Scaled()})
program("loss: writes a counter", EITHER, PLAIN, compile=lambda: {"loss": Counting()})
program("loss: moving mean", EITHER, PLAIN, compile=lambda: {"loss": Moving()})
program(
    "loss: noisy targets",
    EITHER,
    PLAIN,
    compile=with_loss(
        lambda y, out: of_each(
            y + tf.random.stateless_normal(tf.shape(y), (1, 2), dtype=y.dtype), out
        )
    ),
)


# Metrics.
class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign(ops.maximum(self.value, ops.cast(largest(y, outputs), self.value.dtype)))

    def result(self):
        return self.value


class Total(Largest):
    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign_add(ops.cast(ops.sum(ops.abs(y - outputs)), self.value.dtype))


class Updates(Largest):
    """How often it was told something."""

    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign_add(1.0)


class LastBatch(Largest):
    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign(ops.cast(root(y, outputs), self.value.dtype))


class MeanOfRoots(Largest):
    def __init__(self):
        super().__init__()
        self.number = self.add_variable((), "zeros", name="number")

    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign_add(ops.cast(root(y, outputs), self.value.dtype))
        self.number.assign_add(1.0)

    def result(self):
        return self.value / self.number


class Decaying(Largest):
    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign(0.5 * self.value + 0.5 * ops.cast(ops.mean(outputs), self.value.dtype))


class Sampled(Largest):
    def update_state(self, y, outputs, sample_weight=None):
        some = ops.abs(y - outputs)[::2]
        self.value.assign_add(ops.cast(ops.sum(some), self.value.dtype))


class Correlation(keras.metrics.Metric):
    """Keeps all rows in Python, as a metric of another library needs them."""

    def __init__(self):
        super().__init__(name="correlation")
        self.rows = []

    def update_state(self, y, outputs, sample_weight=None):
        self.rows.append((y, outputs))

    def result(self):
        if not self.rows:
            return ops.zeros(())
        pairs = [ops.concatenate(each)[:, 0] for each in zip(*self.rows, strict=True)]
        y, outputs = (each - ops.mean(each) for each in pairs)
        return ops.sum(y * outputs) / ops.sqrt(ops.sum(y**2) * ops.sum(outputs**2))

    def reset_state(self):
        self.rows.clear()


METRICS = {
    "largest": Largest,
    "total": Total,
    "number of updates": Updates,
    "last batch": LastBatch,
    "mean of roots": MeanOfRoots,
    "decaying": Decaying,
    "every second row": Sampled,
    "root": keras.metrics.RootMeanSquaredError,
    "r2": keras.metrics.R2Score,
    "auc": lambda: keras.metrics.AUC(num_thresholds=5, from_logits=True),
    "f1": lambda: keras.metrics.F1Score(threshold=0.5),
    "function of each": lambda: of_each,
    "function of all": lambda: root,
    "correlation": lambda: correlation,
    "MeanMetricWrapper": lambda: keras.metrics.MeanMetricWrapper(of_each, name="wrapped"),
    "mean absolute error": keras.metrics.MeanAbsoluteError,
}
for name, metric in METRICS.items():
    more = {"y": (targets() > 0).astype(float)} if name in ("auc", "f1") else {}
    program(
        f"metric: {name}",
        EXACT,
        PLAIN,
        compile=lambda metric=metric: {"loss": "mse", "metrics": [metric()]},
        batch_size=5,
        **more,
    )
for others in ([], ["mae"]):
    program(
        f"metric: kept in Python, beside {others}",
        EXACT,
        PLAIN,
        compile=lambda others=others: {
            "loss": "mse", "metrics": [Correlation(), *others], "run_eagerly": True,
        },
        batch_size=3,
    )  # fmt: skip
program(
    "metric: beside a loss of pairs",
    EXACT,
    net(lambda x: x * 2),
    compile=lambda: {"loss": contrastive, "metrics": [Largest(), root]},
)
