"""Programs that got past the judge once: side arguments, sizes, loops over rows, padded rows."""

import keras
import tensorflow as tf
from keras import ops

from tests.judge.program import EITHER, EXACT, REFUSED, Make, net, numbers, program, targets


def rows_of(x):
    return tf.shape(x)[0]


def share(x):
    """The number of rows, of the type of the rows."""
    return tf.cast(rows_of(x), x.dtype)


def table(x):
    return tf.linspace(tf.constant(0.1, x.dtype), 1.0, 84)


def cut_by_mean(x):
    first = tf.cast(tf.reduce_mean(tf.square(x)) * 2, tf.int32)
    return tf.reduce_sum(x[:, first:], axis=1, keepdims=True)


def split_by_mean(x):
    first = tf.cast(tf.reduce_mean(tf.square(x)), tf.int32)
    one, other = tf.split(x, tf.stack([first, 4 - first]), axis=1)
    return tf.reduce_sum(one, 1, keepdims=True) * 2 + tf.reduce_sum(other, 1, keepdims=True)


def contracted_with_rows(x):
    weights = tf.eye(4, dtype=x.dtype) * share(x)
    return x + tf.einsum("bki,ij->kj", x[:, None, :], weights) / share(x)


def even_rows(x):
    return x * (tf.cast(tf.cast(share(x) / 2, tf.int32) * 2, x.dtype) / share(x))


def looked_up_by_number(x):
    numbers = tf.expand_dims(tf.range(rows_of(x)), -1)
    return x * tf.expand_dims(tf.gather_nd(table(x), numbers), -1)


def first_row_for_some(x):
    return x + tf.gather(x, tf.where(x[:, 0] > 1, tf.range(rows_of(x)), 0))


def other_blocks(x):
    images = tf.reshape(x, (-1, 2, 2, 1))
    folded = tf.space_to_batch(images, [2, 2], [[0, 0], [0, 0]])
    return tf.reshape(tf.batch_to_space(folded, [1, 1], [[0, 0], [0, 0]]), (rows_of(x), 4))


def by_rows(start, of_row, carries=False):
    """A loop over the rows."""

    def function(x):
        rows = tf.TensorArray(x.dtype, size=rows_of(x)).unstack(x)
        array = tf.TensorArray(x.dtype, size=rows_of(x), element_shape=(4,))
        _, scale, array = tf.while_loop(
            lambda i, scale, array: i < rows_of(x),
            lambda i, scale, array: (i + 1, scale * 1.1, array.write(i, of_row(rows.read(i), i))),
            [start, tf.constant(1.0, x.dtype), array],
        )
        stacked = tf.ensure_shape(array.stack(), (None, 4))
        return stacked * scale if carries else stacked

    return function


def one_row_written(x):
    array = tf.TensorArray(x.dtype, size=rows_of(x), element_shape=(4,))
    return x + tf.ensure_shape(array.write(0, tf.ones((4,), x.dtype)).stack(), (None, 4))


def axis_that_moves(x):
    return tf.while_loop(
        lambda i, axis, y: i < 2,
        lambda i, axis, y: (i + 1, axis - 1, y + tf.reduce_mean(y, axis=axis, keepdims=True)),
        [0, tf.constant([1]), x],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([1]), tf.TensorShape([None, 4])],
    )[2]


def long_chain(x):
    def body(i, *chain):
        return (i + 1, *chain[1:], chain[-1] - tf.reduce_mean(x, axis=0))

    return tf.while_loop(lambda i, *chain: i < 14, body, [0, *[x] * 12])[1]


MORE = {
    "table at B": lambda x: x * table(x)[rows_of(x)],
    "table to B": lambda x: x * tf.reduce_sum(table(x)[: rows_of(x)]),
    "table in B rows": lambda x: x * tf.reduce_sum(tf.reshape(table(x), (rows_of(x), -1))[0]),
    "mean of B scattered": lambda x: (
        x * (1 + tf.reduce_mean(tf.scatter_nd([[0]], tf.constant([5.0], x.dtype), [rows_of(x)])))
    ),
    "padded with the mean": lambda x: tf.pad(
        x, [[0, 0], [0, 1]], constant_values=tf.reduce_mean(x)
    ),
    "cut by the mean": cut_by_mean,
    "split by the mean": split_by_mean,
    "truncated products with B": lambda x: (
        x * (1 + tf.cast(tf.cast(x * share(x), tf.int32), x.dtype) / share(x))
    ),
    "quantized by the range of all": lambda x: tf.quantization.quantize_and_dequantize_v2(
        x, -1.0, 1.0, range_given=False, num_bits=4
    ),
    "contracted with B": contracted_with_rows,
    "an even number of rows": even_rows,
    "looked up by number": looked_up_by_number,
    "first row for some": first_row_for_some,
    "other blocks": other_blocks,
    "rows from 1 on": by_rows(1, lambda row, i: tf.tanh(row)),
    "rows times their number": by_rows(0, lambda row, i: row * tf.cast(i, row.dtype)),
    "scaled for each row": by_rows(0, lambda row, i: tf.tanh(row), carries=True),
    "one row written": one_row_written,
    "axis that moves": axis_that_moves,
    "long chain": long_chain,
}
for name, function in MORE.items():
    program(f"more: {name}", EITHER, net(function))
program("more: rows", EXACT, net(by_rows(0, lambda row, i: tf.tanh(row))))


# Those that a second reader found.
def in_views(x):
    views = tf.concat([x, 2 * x], 0)
    return x + tf.matmul(views, tf.reshape(x, (-1, 2)), transpose_a=True)[0, 0]


def pooled(views):
    return tf.reduce_mean(tf.expand_dims(tf.reshape(views, (-1, 4)), 2), 2)


@tf.function(autograph=False)
def drawn_loss(y, outputs):
    errors = tf.reduce_mean(tf.square(y - outputs), -1)
    return errors * tf.random.stateless_normal(tf.shape(errors), [1, 2], dtype=errors.dtype)


class Decays(keras.metrics.Metric):
    """Forgets half of what it was, in each step."""

    def __init__(self):
        super().__init__(name="decays")
        self.decayed = self.add_variable((), "zeros", name="kept")

    def update_state(self, y, outputs, sample_weight=None):
        added = ops.cast(ops.sum(ops.abs(y - outputs)), self.decayed.dtype)
        self.decayed.assign(0.5 * self.decayed + added)

    def result(self):
        return self.decayed


program(
    "more: rows over their number, one by one",
    EITHER,
    net(lambda x: tf.map_fn(lambda row: row * 2.0, x / share(x))),
)
program("more: views contracted", EITHER, net(in_views))
program(
    "more: views pooled, and apart again",
    EXACT,
    net(lambda x: tf.add_n(tf.split(pooled(tf.tanh(tf.concat([x, -2 * x], 0))), 2, axis=0))),
)
program(
    "more: first places by the rows' numbers",
    EITHER,
    net(lambda x: tf.gather(tf.reshape(x, (-1, 2)), tf.range(rows_of(x)))),
)
program(
    "more: a loss that draws in a function", EITHER, net(), compile=lambda: {"loss": drawn_loss}
)
program(
    "more: a metric that forgets",
    EITHER,
    net(),
    batch_size=3,
    compile=lambda: {"loss": "mse", "metrics": [Decays()]},
)
program("more: pictures of a batch in a batch", EXACT, net(lambda x: tf.reshape(x[None], (-1, 4))))


class CountsInFunction(keras.layers.Layer):
    """Its function is traced once before there are replicas, and again after."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    @tf.function
    def counted(self, x):
        self.count.assign(self.count.value + 1)
        return x * (1 + 0.1 * self.count.value)

    def call(self, x):
        return self.counted(x)


program("more: a state that a function changes", REFUSED, net(CountsInFunction))


# What is a number in one turn of a loop, and made of the rows in the next.
def counts_in_turns(count):
    def function(x):
        def body(i, number, total):
            total = total + tf.cast(number + 1, x.dtype)
            return i + 1, count(x), total

        return 0.1 * x * tf.while_loop(lambda i, *_: i < 3, body, [0, 0, tf.zeros([], x.dtype)])[2]

    return function


def active(x):
    return tf.reduce_sum(tf.cast(x > 0, tf.int32))


def through_keras(x):
    def body(i, state):
        number, total = state
        return active(x), total + ops.cast(number + 1, x.dtype)

    return 0.1 * x * ops.fori_loop(0, 3, body, (0, ops.zeros((), x.dtype)))[1]


def as_long_as_its_number(row, i):
    return row * tf.cast(1 + tf.reduce_sum(tf.ones_like(tf.range(i))), row.dtype)


program("more: a count of rows in a loop", EITHER, net(counts_in_turns(active)))
program("more: a count that rows do not change", EXACT, net(counts_in_turns(lambda x: 7)))
program("more: a count of rows in Keras's loop", EITHER, net(through_keras))
program("more: a range of a row's number", EITHER, net(by_rows(0, as_long_as_its_number)))
TWO_ROWS = {"x": numbers(2), "batch_size": 2}  # A replica has one.
program(
    "more: two rows of ones", EITHER, net(lambda x: tf.ones((2, 1), x.dtype) * x), **TWO_ROWS
)
program(
    "more: two rows of ones, summed",
    EITHER,
    net(lambda x: x + tf.reduce_sum(tf.ones((2, 1), x.dtype) * x, 0)),
    **TWO_ROWS,
)
program(
    "more: B rows of ones", EXACT, net(lambda x: tf.ones((rows_of(x), 1), x.dtype) * x), **TWO_ROWS
)


class CountsCalls(keras.layers.Layer):
    """Keeps a count in Python; it is another one in each trace."""

    def __init__(self, count):
        super().__init__()
        self.count, self.counts = 0, {"calls": 0, "all": [0]}
        self.how = count

    def call(self, x):
        return x * (1 + 0.3 * self.how(self))


def of_an_attribute(layer):
    layer.count += 1
    return layer.count


def of_a_dictionary(layer):
    layer.counts["calls"] += 1
    return layer.counts["calls"]


def of_a_list(layer):
    layer.counts["all"].append(1)
    return len(layer.counts["all"])


for count in (of_an_attribute, of_a_dictionary, of_a_list):
    program(f"more: a count {count.__name__}", EITHER, net(Make(CountsCalls, count)))


class SetsOnce(keras.layers.Layer):
    """What a call finds out and keeps in Python is the same in each."""

    def __init__(self):
        super().__init__()
        self.width, self.shapes = None, {}

    def call(self, x):
        self.width = self.shapes["x"] = x.shape[-1]
        return x / self.width


program("more: a width that a call keeps", EXACT, net(SetsOnce))


# Losses without a row for each example, and such as remember.
def flattened(y, outputs):
    return tf.reshape((y - outputs) ** 2, (-1,))


def of_columns(y, outputs):
    return tf.reduce_sum((y - outputs) ** 2, 0)


class Remembers(keras.losses.Loss):
    """Divides by a running mean of the loss."""

    def __init__(self):
        super().__init__()
        self.mean = tf.Variable(1.0, trainable=False, dtype="float64")

    def call(self, y, outputs):
        loss = tf.reduce_mean((y - outputs) ** 2, -1)
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(tf.stop_gradient(loss)))
        return loss / tf.cast(self.mean, loss.dtype)


STORING = {}


class KeepsRows(keras.layers.Layer):
    def call(self, x):
        self.rows = tf.tanh(x)
        return self.rows


def reading_kept():
    """A model, whose loss reads what a layer keeps."""
    STORING["layer"] = KeepsRows()
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(4), STORING["layer"], keras.layers.Dense(1)]
    )


class ReadsKept(keras.losses.Loss):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, y, outputs):
        return tf.reduce_mean((y - outputs) ** 2, -1) + tf.reduce_sum(self.layer.rows[0])


def by_closure(layer):
    return lambda y, outputs: (
        tf.reduce_mean((y - outputs) ** 2, -1) + tf.reduce_sum(layer.rows[0])
    )


for how in (ReadsKept, by_closure):
    program(
        f"more: a loss that reads what a layer keeps, {how.__name__}",
        EITHER,
        reading_kept,
        batch_size=3,
        compile=lambda how=how: {"loss": how(STORING["layer"])},
    )



class KeepsMean(keras.layers.Layer):
    """Has the mean of the batch in a weight and, of all batches, in a metric."""

    def build(self, shape):
        self.state = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.metric = keras.metrics.Mean(name="kept")

    def call(self, x):
        size = tf.reduce_mean(tf.stop_gradient(x) ** 2, 1)
        self.state.assign(tf.reduce_mean(size))
        self.metric.update_state(size)
        return x


def keeping_mean():
    STORING["layer"] = KeepsMean()
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(4), STORING["layer"], keras.layers.Dense(1)]
    )


def by_the_weight():
    return tf.convert_to_tensor(STORING["layer"].state)


def by_the_metric():
    return tf.cast(STORING["layer"].metric.result(), keras.config.floatx())


for read in (by_the_weight, by_the_metric):
    program(
        f"more: a loss that reads what a layer wrote, {read.__name__}",
        EXACT,
        keeping_mean,
        batch_size=3,
        compile=lambda read=read: {
            "loss": lambda y, outputs: tf.reduce_mean((y - outputs) ** 2, -1) / (1 + read())
        },
    )

WIDE = net(tail=False)
for loss in (flattened, of_columns):
    more = {"y": targets(7, 4), "compile": lambda loss=loss: {"loss": loss}, "batch_size": 3}
    program(f"more: a loss, {loss.__name__}", EXACT, WIDE, **more)
program("more: a loss that remembers", EXACT, net(), compile=lambda: {"loss": Remembers()})


class Remembered(keras.metrics.Metric):
    """What it adds depends on what it has."""

    def __init__(self, dtype="float64"):
        super().__init__(name="remembered")
        self.total = self.add_weight(shape=(), initializer="ones", dtype=dtype, name="total")

    def update_state(self, y, outputs, sample_weight=None):
        error = tf.reduce_sum(tf.abs(y - outputs))
        if self.total.dtype == "float64":
            self.total.assign_add(0.1 * error * self.total)
        else:
            self.total.assign(
                tf.cast(tf.cast(self.total.value, error.dtype) + error, self.total.dtype)
            )

    def result(self):
        return tf.cast(self.total, "float64")


for dtype in ("float64", "int32"):
    program(
        f"more: a metric that depends on what it was, {dtype}",
        EXACT,
        net(),
        batch_size=3,
        compile=lambda dtype=dtype: {"loss": "mse", "metrics": [Remembered(dtype)]},
    )
