"""Programs that got past the judge once: side arguments, sizes, loops over rows, padded rows."""

import keras
import tensorflow as tf
from keras import ops

from tests.engine.program import EITHER, EXACT, REFUSED, net, program


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
        found = tf.TensorArray(x.dtype, size=rows_of(x), element_shape=(4,))
        _, scale, found = tf.while_loop(
            lambda i, scale, found: i < rows_of(x),
            lambda i, scale, found: (i + 1, scale * 1.1, found.write(i, of_row(rows.read(i), i))),
            [start, tf.constant(1.0, x.dtype), found],
        )
        stacked = tf.ensure_shape(found.stack(), (None, 4))
        return stacked * scale if carries else stacked

    return function


def one_row_written(x):
    found = tf.TensorArray(x.dtype, size=rows_of(x), element_shape=(4,))
    return x + tf.ensure_shape(found.write(0, tf.ones((4,), x.dtype)).stack(), (None, 4))


def axis_that_moves(x):
    return tf.while_loop(
        lambda i, axis, y: i < 2,
        lambda i, axis, y: (i + 1, axis - 1, y + tf.reduce_mean(y, axis=axis, keepdims=True)),
        [0, tf.constant([1]), x],
        shape_invariants=[tf.TensorShape([]), tf.TensorShape([1]), tf.TensorShape([None, 4])],
    )[2]


def long_chain(x):
    def body(i, *own):
        return (i + 1, *own[1:], own[-1] - tf.reduce_mean(x, axis=0))

    return tf.while_loop(lambda i, *own: i < 14, body, [0, *[x] * 12])[1]


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
        self.kept = self.add_variable((), "zeros", name="kept")

    def update_state(self, y, outputs, sample_weight=None):
        added = ops.cast(ops.sum(ops.abs(y - outputs)), self.kept.dtype)
        self.kept.assign(0.5 * self.kept + added)

    def result(self):
        return self.kept


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
