"""Whole models: operations between layers, nested and wrapped ones, masks, loops, further calls."""

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.judge.program import (
    EITHER,
    EXACT,
    REFUSED,
    Make,
    Of,
    TwoDense,
    centred,
    net,
    numbers,
    program,
    targets,
)


def functional(function, inputs=(4,), dtype=None):
    """A function of symbolic tensors: its operations stand in the model beside layers."""

    def build():
        x = keras.Input(inputs, dtype=dtype)
        hidden = x if dtype else layers.Dense(4)(x)
        return keras.Model(x, layers.Dense(1)(function(hidden)))

    return build


OPERATIONS = {
    "mean": (lambda x: x - ops.mean(x, axis=0), REFUSED),
    "mean of all": (lambda x: x - ops.mean(x), REFUSED),
    "mean, kept": (lambda x: x - ops.mean(x, axis=0, keepdims=True), REFUSED),
    "variance": (lambda x: x / ops.std(x, axis=0), REFUSED),
    "row 0": (lambda x: x - x[0], REFUSED),
    "last row": (lambda x: x - x[-1], REFUSED),
    "product with its transpose": (
        lambda x: ops.matmul(ops.matmul(x, ops.transpose(x)), x),
        REFUSED,
    ),
    "reverse": (lambda x: x + ops.flip(x, axis=0), REFUSED),
    "roll": (lambda x: x + ops.roll(x, 1, axis=0), REFUSED),
    "sort": (lambda x: ops.sort(x, axis=0), REFUSED),
    "cumsum": (lambda x: ops.cumsum(x, axis=0), REFUSED),
    "softmax": (lambda x: ops.softmax(x, axis=0), REFUSED),
    "moments": (lambda x: x - ops.moments(x, axes=0)[0], REFUSED),
    "normalize": (lambda x: ops.normalize(x, axis=0), REFUSED),
    "take": (lambda x: x - ops.take(x, [0], axis=0), REFUSED),
    "einsum": (lambda x: ops.matmul(x, ops.einsum("bi,bj->ij", x, x)), REFUSED),
    "row mean": (lambda x: x - ops.mean(x, axis=-1, keepdims=True), EXACT),
    "columns": (lambda x: ops.concatenate([x[:, :1], x[:, 2:]], axis=-1), EXACT),
    "own product": (lambda x: ops.sum(x[:, None, :] * x[:, :, None], axis=1), EXACT),
    "reshape": (
        lambda x: ops.reshape(ops.flip(ops.reshape(x, (-1, 2, 2)), axis=1), (-1, 4)),
        EXACT,
    ),
    "transpose and back": (lambda x: ops.transpose(ops.tanh(ops.transpose(x))), EXACT),
    "constant": (lambda x: x * np.array([1.0, 2.0, 3.0, 4.0]), EXACT),
    "activations": (lambda x: ops.gelu(x) + ops.silu(x) * ops.log_softmax(x), EXACT),
}
for name, (function, verdict) in OPERATIONS.items():
    program(f"operation: {name}", verdict, functional(function))


# Nested, shared, wrapped.
def nested(middle):
    def build():
        inner = keras.Sequential([keras.Input((4,)), layers.Dense(4), Of(middle)])
        outer = keras.Sequential([keras.Input((4,)), inner, layers.Dense(4)])
        inputs = keras.Input((4,))
        return keras.Model(inputs, layers.Dense(1)(outer(inputs) + inner(inputs)))

    return build


class Cell(layers.Layer):
    """A recurrent cell.

    Args:
        function: Takes the state.
    """

    def __init__(self, function):
        super().__init__()
        self.function, self.state_size = function, 4

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 4))

    def call(self, x, states):
        state = ops.tanh(self.function(ops.matmul(x, self.kernel) + states[0]))
        return state, [state]


class Masks(layers.Layer):
    """Hides places from the layers behind it.

    Args:
        mask: Takes the rows.
    """

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def compute_mask(self, x, previous=None):
        return self.mask(x)

    def call(self, x):
        return x


class OwnNormalization(layers.BatchNormalization):
    """A subclass, which might be anything."""

    def call(self, x, training=None, mask=None):
        return super().call(x * 1.5, training=training, mask=mask)


class OwnMoments(layers.BatchNormalization):
    def _moments(self, inputs, mask):
        mean, variance = super()._moments(inputs, mask)
        return mean * 0.9, variance


def of_series(*middle):
    return net(*middle, layers.Flatten, inputs=(5, 4), first=False)


SERIES = numbers(7, 5, 4)
program("model: nested", EXACT, nested(ops.tanh))
program("model: nested, and a mean", REFUSED, nested(centred))
for name, function, verdict in (
    ("sin", ops.sin, EXACT),
    ("mean of the row", lambda x: x - ops.mean(x, axis=1, keepdims=True), EXACT),
    ("mean", centred, REFUSED),
    ("norm", lambda x: x / ops.sqrt(ops.sum(x**2)), REFUSED),
):
    program(
        f"model: own cell, {name}",
        verdict,
        lambda function=function: keras.Sequential(
            [keras.Input((5, 4)), layers.RNN(Cell(function)), layers.Dense(1)]
        ),
        x=SERIES,
    )
program(
    "model: TimeDistributed of a mean",
    REFUSED,
    lambda: keras.Sequential(
        [
            keras.Input((5, 4)),
            layers.TimeDistributed(Of(centred)),
            layers.Flatten(),
            layers.Dense(1),
        ]
    ),
    x=SERIES,
)
program(
    "model: mask of each row",
    EXACT,
    net(Make(Masks, lambda x: x[..., 0] > 0), layers.GlobalAveragePooling1D, inputs=(5, 4)),
    x=SERIES,
)
program(
    "model: mask of the batch",
    REFUSED,
    net(
        Make(Masks, lambda x: x[..., 0] > ops.mean(x[..., 0])),
        layers.GlobalAveragePooling1D,
        inputs=(5, 4),
    ),
    x=SERIES,
)
program(
    "model: mean behind a batch normalization", REFUSED, net(layers.BatchNormalization, centred)
)
program(
    "model: mean before a batch normalization", REFUSED, net(centred, layers.BatchNormalization)
)
program("model: own subclass of batch normalization", EITHER, net(OwnNormalization))
program("model: own moments", EITHER, net(OwnMoments))
program(
    "model: several batch normalizations",
    EXACT,
    net(layers.BatchNormalization, Make(layers.Dense, 3), layers.BatchNormalization),
)
program(
    "model: frozen batch normalization",
    EXACT,
    net(Make(layers.BatchNormalization, trainable=False)),
)
program(
    "model: batch normalization of another axis",
    EXACT,
    of_series(Make(layers.BatchNormalization, axis=1)),
    x=SERIES,
)


def shared_normalization():
    inputs = keras.Input((4,))
    shared = layers.BatchNormalization()
    x = shared(layers.Dense(4)(inputs))
    return keras.Model(inputs, layers.Dense(1)(shared(layers.Dense(4)(x))))


program("model: shared batch normalization", EXACT, shared_normalization)


# Inputs that point to other rows.
def of_edges(function, width):
    def build():
        x, edges = keras.Input((4,), name="x"), keras.Input((width,), name="edges", dtype="int64")
        hidden = layers.Dense(4)(x)
        return keras.Model({"x": x, "edges": edges}, layers.Dense(1)(Pair(function)(hidden, edges)))

    return build


class Pair(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x, other):
        return self.function(x, other)


EDGES = {
    "x": numbers(),
    "edges": np.array([[0, 1], [2, 0], [1, 1], [0, 2], [2, 2], [1, 0], [0, 0]]),
}
program(
    "model: rows named by an input",
    REFUSED,
    of_edges(lambda x, edges: tf.gather(x, edges[:, 0]) + x, 2),
    x=EDGES,
)
program(
    "model: columns named by an input",
    EXACT,
    of_edges(lambda x, edges: tf.gather(x, edges, axis=1, batch_dims=1), 2),
    x=EDGES,
)
program(
    "model: a table's rows, named by an input",
    EXACT,
    of_edges(lambda x, edges: x + tf.gather(tf.constant(numbers(3)), edges[:, 0]), 2),
    x=EDGES,
)
program(
    "model: sums by an input",
    REFUSED,
    of_edges(
        lambda x, edges: (
            x + tf.gather(tf.math.unsorted_segment_sum(x, edges[:, 0], 3), edges[:, 0])
        ),
        2,
    ),
    x=EDGES,
)
program(
    "model: adjacency of the rows",
    REFUSED,
    of_edges(lambda x, near: tf.matmul(tf.cast(near, x.dtype), x), 7),
    x={"x": numbers(), "edges": np.eye(7, k=1, dtype="int64") + np.eye(7, dtype="int64")},
)


# Outputs.
class Several(TwoDense):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        x = self.hidden(x)
        return {"out": self.head(x), "more": self.function(x)}


MORE_OUTPUTS = {
    "rows": (lambda x: x * 2, EXACT),
    "a mean": (lambda x: ops.mean(x, axis=0), EITHER),
    "a scalar": (lambda x: ops.sum(x), EITHER),
    "turned": (lambda x: ops.transpose(x), EITHER),
    "pairs": (lambda x: ops.matmul(x, ops.transpose(x)), EITHER),
    "a weight": (lambda x: ops.ones((3,)), EITHER),
}
for name, (function, verdict) in MORE_OUTPUTS.items():
    program(
        f"output: {name}",
        verdict,
        functools.partial(Several, function),
        compile=lambda: {"loss": {"out": "mse"}},
        y={"out": targets()},
        then=lambda model, x: model.predict(x, batch_size=7, verbose=0),
    )


# Experts, codebooks, and what else divides a batch by its values.
def both_experts(x):
    gate = tf.nn.softmax(x[:, :2])
    return gate[:, :1] * tf.tanh(x) + gate[:, 1:] * tf.nn.relu(x)


def divided_experts(x):
    chosen = tf.cast(x[:, 0] > 0, "int32")
    parts = tf.dynamic_partition(x, chosen, 2)
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), chosen, 2)
    return tf.reshape(
        tf.dynamic_stitch(places, [tf.tanh(parts[0]), tf.nn.relu(parts[1])]), tf.shape(x)
    )


def experts_of_capacity(x):
    """The first two rows of the batch that ask for an expert get it."""
    asks = tf.cast(x[:, :1] > 0, x.dtype)
    return x + asks * tf.cast(tf.cumsum(asks, axis=0) <= 2, x.dtype) * tf.tanh(x)


def experts_choose(x):
    """Each expert takes the three rows that suit it best."""
    _, places = tf.math.top_k(tf.transpose(x[:, :2]), 3)
    taken = tf.reduce_sum(tf.one_hot(places, tf.shape(x)[0], dtype=x.dtype), axis=[0, 1])
    return x * (1 + taken[:, None])


def nearest_code(x):
    codes = tf.constant(numbers(5, 4, seed=8))
    far = tf.reduce_sum((x[:, None] - codes[None]) ** 2, axis=-1)
    return x + tf.stop_gradient(tf.gather(codes, tf.argmin(far, axis=1)) - x)


def fake_quantized(x):
    x = tf.cast(x, "float32")
    return tf.quantization.fake_quant_with_min_max_vars(x, tf.reduce_min(x), tf.reduce_max(x))


def fused_moments(x):
    y, *_ = tf.compat.v1.nn.fused_batch_norm(
        tf.cast(x, "float32")[:, None, None], tf.ones(4), tf.zeros(4), is_training=True
    )
    return tf.cast(y[:, 0, 0], x.dtype)


def shifted_by_a_pad(x):
    return x + tf.pad(x, [[1, 0], [0, 0]])[:-1]


def space_and_back(x):
    y = tf.reshape(x, (-1, 2, 2, 1))
    blocks = tf.tanh(tf.space_to_batch_nd(y, [2, 2], [[0, 0], [0, 0]]))
    return tf.reshape(tf.batch_to_space(blocks, [2, 2], [[0, 0], [0, 0]]), (-1, 4))


def cropped(of_rows):
    def function(x):
        images = tf.cast(tf.reshape(x, (-1, 2, 2, 1)), "float32")
        number = tf.shape(x)[0]
        places = tf.range(number) if of_rows else tf.zeros((number,), "int32")
        boxes = tf.tile([[0.0, 0.0, 1.0, 1.0]], (number, 1))
        crops = tf.image.crop_and_resize(images, boxes, places, (2, 2))
        return tf.cast(tf.reshape(crops, (-1, 4)), x.dtype)

    return function


def seeded_by_rows(x):
    seed = tf.cast(tf.reshape(x, [-1])[:2] * 1000, "int32")
    return x + tf.random.stateless_uniform(tf.shape(x), seed, dtype=x.dtype)


def drawn_pairs(x):
    number = tf.shape(x)[0]
    return tf.random.stateless_uniform((number, number), (1, 2), dtype=x.dtype) @ x


def segments_of_places(x):
    """The mean of each row's places, by the number of their row."""
    rows = tf.range(tf.size(x)) // 4
    return x - tf.math.segment_mean(tf.reshape(x, [-1]), rows)[:, None]


def checked_mean(x):
    tf.debugging.assert_less(tf.reduce_mean(x), tf.cast(1e9, x.dtype))
    return x * 2


def printed_mean(x):
    tf.print(tf.reduce_mean(x), output_stream="file:///dev/null")
    return x * 2


def as_kernel(x):
    """The rows are the filter of a convolution."""
    return x * tf.nn.conv1d(x[None], x[:, :, None], 1, "SAME")[0]


def indexed_by_the_mean(x):
    index = tf.cast(tf.abs(tf.reduce_mean(x)) * 100, "int32") % 5
    return x + tf.gather(tf.constant(numbers(5)), index)


DIVIDED = {
    "both experts": (both_experts, EXACT),
    "divided experts": (divided_experts, EITHER),
    "experts of a capacity": (experts_of_capacity, REFUSED),
    "experts choose": (experts_choose, REFUSED),
    "nearest code": (nearest_code, EXACT),
    "quantized by its range": (lambda x: tf.cast(fake_quantized(x), x.dtype), REFUSED),
    "fused moments": (fused_moments, REFUSED),
    "shifted by a pad": (shifted_by_a_pad, REFUSED),
    "space to batch and back": (space_and_back, EITHER),
    "cropped, each its own": (cropped(True), EITHER),
    "cropped, all of the first": (cropped(False), REFUSED),
    "seeded by the rows": (seeded_by_rows, REFUSED),
    "drawn pairs": (drawn_pairs, REFUSED),
    "segments of places": (segments_of_places, EITHER),
    "checked mean": (checked_mean, EITHER),
    "printed mean": (printed_mean, EITHER),
    "flat and back": (lambda x: tf.reshape(tf.tanh(tf.reshape(x, [-1])), tf.shape(x)), EXACT),
    "flat cumsum": (lambda x: tf.reshape(tf.cumsum(tf.reshape(x, [-1])), tf.shape(x)), REFUSED),
    "flat reverse": (lambda x: tf.reshape(tf.reshape(x, [-1])[::-1], tf.shape(x)), REFUSED),
    "flat roll": (lambda x: tf.reshape(tf.roll(tf.reshape(x, [-1]), 1, 0), tf.shape(x)), REFUSED),
    "flat sort": (lambda x: tf.reshape(tf.sort(tf.reshape(x, [-1])), tf.shape(x)), REFUSED),
    "flat softmax": (lambda x: tf.reshape(tf.nn.softmax(tf.reshape(x, [-1])), (-1, 4)), REFUSED),
    "one flat row": (lambda x: tf.reshape(tf.nn.softmax(tf.reshape(x, (1, -1))), (-1, 4)), REFUSED),
    "rows of two": (lambda x: tf.reshape(tf.nn.softmax(tf.reshape(x, (-1, 2))), (-1, 4)), EXACT),
    "rows of two, mean of those": (
        lambda x: tf.reshape(
            tf.reshape(x, (-1, 2)) - tf.reduce_mean(tf.reshape(x, (-1, 2)), axis=0), (-1, 4)
        ),
        REFUSED,
    ),
    "beside a constant row": (
        lambda x: tf.tanh(tf.concat([x, tf.zeros((1, 4), x.dtype)], axis=0))[:-1],
        EITHER,
    ),
    "behind a constant row": (
        lambda x: tf.tanh(tf.concat([tf.zeros((1, 4), x.dtype), x], axis=0))[:-1],
        REFUSED,
    ),
    "as many as the first column says": (
        lambda x: (
            x * tf.reduce_sum(tf.cast(x[:, :1] > tf.transpose(x[:, :1]), x.dtype), axis=1)[:, None]
        ),
        REFUSED,
    ),
    "sum of a square of a sum": (lambda x: x + tf.reduce_sum(x, axis=0) ** 2, REFUSED),
    "linear in a mean": (lambda x: x + 3 * tf.reduce_mean(x, axis=0) - 1, REFUSED),
    "index from a mean": (indexed_by_the_mean, REFUSED),
    "index from a count": (
        lambda x: x + tf.gather(tf.constant(numbers(101)), tf.shape(x)[0]),
        REFUSED,
    ),
    "size of a loop": (
        lambda x: tf.while_loop(
            lambda i, y: i < tf.shape(x)[0], lambda i, y: (i + 1, tf.tanh(y) * 1.1), [0, x]
        )[1],
        REFUSED,
    ),
    "condition of one row": (
        lambda x: tf.cond(x[0, 0] > 0, lambda: tf.tanh(x), lambda: x * 2),
        REFUSED,
    ),
    "filters of rows": (as_kernel, REFUSED),
    "exactly the batch": (lambda x: x * tf.reduce_sum(tf.nn.softmax(x)), REFUSED),
    "cancelled": (lambda x: x + tf.reduce_sum(x - x, axis=0), EITHER),
    "first of each group": (lambda x: tf.repeat(x[::2], 2, axis=0)[: tf.shape(x)[0]], REFUSED),
    "strided": (lambda x: tf.concat([x[::2], x[1::2]], axis=0), REFUSED),
    "halves exchanged": (
        lambda x: tf.concat([x[tf.shape(x)[0] // 2 :], x[: tf.shape(x)[0] // 2]], axis=0),
        REFUSED,
    ),
    "halves joined": (
        lambda x: tf.concat([x[: tf.shape(x)[0] // 2], x[tf.shape(x)[0] // 2 :]], axis=0),
        EITHER,
    ),
    "stacked with its reverse": (
        lambda x: tf.reduce_max(tf.stack([x, x[::-1]], axis=0), axis=0),
        REFUSED,
    ),
    "stacked with itself": (lambda x: tf.reduce_max(tf.stack([x, -x], axis=0), axis=0), EXACT),
    "mean of stacked": (
        lambda x: tf.reduce_mean(tf.stack([x, x * 2, tf.tanh(x)], axis=0), axis=0),
        EXACT,
    ),
    "tiled and split": (
        lambda x: tf.add_n(tf.split(tf.tanh(tf.tile(x, (2, 1))), 2, axis=0)),
        EXACT,
    ),
    "tiled, rows of other copies": (
        lambda x: tf.reshape(
            tf.reduce_mean(tf.reshape(tf.tile(x, (2, 1)), (-1, 2, 4)), 1), (-1, 4)
        ),
        REFUSED,
    ),
    "repeated, as if tiled": (
        lambda x: tf.add_n(tf.split(tf.repeat(x, 2, axis=0), 2, axis=0)),
        REFUSED,
    ),
    "reshaped, as if transposed": (
        lambda x: (
            tf.reshape(tf.reshape(x, (4, -1)), (-1, 4)) + tf.transpose(tf.reshape(x, (4, -1)))
        ),
        REFUSED,
    ),
}
for name, (function, verdict) in DIVIDED.items():
    program(f"divided: {name}", verdict, net(function))


class Balanced(layers.Layer):
    """The auxiliary loss of a switch transformer: a product of two means over the batch."""

    def call(self, x):
        gate = ops.softmax(x)
        chosen = ops.one_hot(ops.argmax(gate, axis=-1), 4, dtype=x.dtype)
        self.add_loss(0.1 * ops.sum(ops.mean(gate, axis=0) * ops.mean(chosen, axis=0)))
        return x * gate


class Codes(layers.Layer):
    """A codebook that follows the rows by moving means."""

    def build(self, shape):
        self.codes = self.add_weight(shape=(3, 4), trainable=False, initializer="normal")

    def call(self, x):
        far = ops.sum((x[:, None] - self.codes[None]) ** 2, axis=-1)
        chosen = ops.one_hot(ops.argmin(far, axis=1), 3, dtype=x.dtype)
        sums = ops.matmul(ops.transpose(chosen), x)
        counts = ops.sum(chosen, axis=0)[:, None]
        self.codes.assign(0.9 * self.codes + 0.1 * sums / (counts + 1))
        return x + ops.matmul(chosen, self.codes)


program("divided: balanced experts", EITHER, net(Balanced))
program("divided: codes that follow", EITHER, net(Codes))


# Other ways into the step.
def evaluated(model, x):
    return model.evaluate(x, targets(), batch_size=7, verbose=0)


def predicted(model, x):
    return model.predict(x, batch_size=7, verbose=0)


def on_batch(model, x):
    return model.train_on_batch(x, targets()), *model.get_weights()


class MixesInInference(layers.Layer):
    def call(self, x, training=False):
        return x if training else centred(x)


class MixesLongRows(layers.Layer):
    """Mixes what is longer than 5 places, once Keras traces that."""

    def call(self, x):
        x = ops.sum(x, axis=2)
        if x.shape[1] is not None and x.shape[1] > 5:
            x = centred(x)
        return ops.sum(x, axis=1, keepdims=True)


def longer(model, x):
    """Compiles anew: Keras's old trace would hold for rows of any length."""
    model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(numbers(7, 6, 4), targets(), batch_size=7, verbose=0, shuffle=False)
    return model.get_weights()


def longer_predicted(model, x):
    return predicted(model, numbers(7, 6, 4))


def trained_on(model, x):
    return model.fit(x, targets(), batch_size=7, verbose=0, shuffle=False).history["loss"]


program("then: evaluates, mixes in inference", REFUSED, net(MixesInInference), then=evaluated)
program("then: predicts, mixes in inference", REFUSED, net(MixesInInference), then=predicted)
program("then: evaluates", EXACT, net(layers.BatchNormalization), then=evaluated)
program("then: predicts", EXACT, net(layers.BatchNormalization), then=predicted)
program("then: trains on a batch", EXACT, net(layers.BatchNormalization), then=on_batch)
program("then: trains again", EXACT, net(ops.tanh), then=trained_on)
program(
    "then: longer rows",
    REFUSED,
    net(Make(layers.Dense, 4), MixesLongRows, inputs=(None, 4), first=False),
    x=numbers(7, 5, 4),
    then=longer,
)
program(
    "then: predicts longer rows",
    REFUSED,
    net(Make(layers.Dense, 4), MixesLongRows, inputs=(None, 4), first=False),
    x=numbers(7, 5, 4),
    then=longer_predicted,
)
program(
    "then: another number of rows",
    EXACT,
    net(ops.tanh),
    then=lambda model, x: trained_on_more(model),
)
program(
    "then: more rows, and mixes those",
    REFUSED,
    net(lambda x: tf.cond(tf.shape(x)[0] > 30, lambda: centred(x), lambda: x)),
    then=lambda model, x: trained_on_more(model),
)


def trained_on_more(model):
    history = model.fit(numbers(40), targets(40), batch_size=40, verbose=0, shuffle=False)
    return history.history["loss"], *model.get_weights()


# Eagerly, and by XLA.
for name, function, verdict in (("rows", ops.tanh, EXACT), ("mean", centred, REFUSED)):
    program(
        f"eagerly: {name}",
        verdict,
        net(function),
        compile=lambda: {"loss": "mse", "run_eagerly": True},
    )
program("xla: rows", EXACT, net(ops.tanh), compile=lambda: {"loss": "mse", "jit_compile": True})
program("xla: mean", REFUSED, net(centred), compile=lambda: {"loss": "mse", "jit_compile": True})
program(
    "several steps in one call",
    EXACT,
    net(layers.BatchNormalization),
    batch_size=2,
    compile=lambda: {"loss": "mse", "steps_per_execution": 2},
)


class AddsSum(layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.sum(x**2))
        return x


class AddsMean(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(x**2))
        return x


# Steps that are of several batches: of the whole of them on one device.
ACCUMULATED = {
    "rows": (net(ops.tanh), EXACT),
    "mean": (net(centred), REFUSED),
    "loss of pairs": (net(), EITHER),
    "a sum that is added": (net(AddsSum), EITHER),
    "a mean that is added": (net(AddsMean), EXACT),
    "batch normalization": (net(layers.BatchNormalization), EITHER),
    "behind a draw": (net(Make(layers.GaussianNoise, 0.2), centred), REFUSED),
}


def pairs(y, outputs):
    return -ops.mean(ops.diagonal(ops.log_softmax(outputs @ ops.transpose(outputs))))


for number in (1, 2):
    for name, (build, verdict) in ACCUMULATED.items():
        program(
            f"accumulated on {number}: {name}",
            verdict,
            build,
            x=numbers(14),
            batch_size=7,
            batch_on_one=14,
            num_devices=number,
            options={"sync": "accumulate:2"},
            compile=(lambda: {"loss": pairs}) if "pairs" in name else (lambda: {"loss": "mse"}),
        )

# Strings and tables.
TABLE = ["a", "bb", "ccc"]


def of_strings(function):
    return net(
        lambda x: tf.ensure_shape(function(x), (None, 2)), first=False, inputs=(2,), dtype="string"
    )


def float_of(x):
    return tf.cast(x, keras.config.floatx())


OF_STRINGS = {
    "lengths": (lambda x: float_of(tf.strings.length(x)), EXACT),
    "hashes": (lambda x: float_of(tf.strings.to_hash_bucket_fast(x, 5)), EXACT),
    "upper case": (lambda x: float_of(tf.strings.length(tf.strings.upper(x))), EXACT),
    "joined rows": (
        lambda x: float_of(tf.strings.length(x) + tf.strings.length(tf.strings.reduce_join(x))),
        REFUSED,
    ),
    "equal to the first": (lambda x: float_of(x == x[0]), REFUSED),
    "mean of lengths": (lambda x: centred(float_of(tf.strings.length(x))), REFUSED),
    "split into letters": (
        lambda x: float_of(
            tf.reshape(tf.strings.bytes_split(tf.reshape(x, [-1])).row_lengths(), tf.shape(x))
        ),
        EITHER,
    ),
}
for name, (function, verdict) in OF_STRINGS.items():
    program(
        f"strings: {name}",
        verdict,
        of_strings(function),
        x=tf.constant(np.array(TABLE)[np.arange(14).reshape(7, 2) * 5 % 3]),
        as_dataset=True,
    )
