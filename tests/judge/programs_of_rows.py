"""Functions of rows: of each row alone, and of several, which only the whole batch can compute."""

import itertools

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from tests.judge.program import (
    EITHER,
    EXACT,
    REFUSED,
    centred,
    net,
    numbers,
    positive,
    program,
)


def num_rows(x):
    return tf.shape(x)[0]


def row_numbers(x):
    return tf.range(num_rows(x))


def as_float(x):
    return tf.cast(x, keras.config.floatx())


def outer(x):
    """A matrix for each row, positive definite."""
    return x[:, :, None] * x[:, None, :] + tf.eye(4, dtype=x.dtype)


def over_time(x):
    """A loop over the places of a row."""
    state, index = tf.zeros_like(x[:, 0]), tf.constant(0)
    _, state = tf.while_loop(
        lambda i, s: i < 4, lambda i, s: (i + 1, tf.tanh(s + x[:, i])), [index, state]
    )
    return x + state[:, None]


def gradient_of_rows(x):
    """The gradient of each row's own energy, as in a gradient penalty."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        energy = tf.reduce_sum(tf.tanh(x) ** 2)
    return x + tape.gradient(energy, x)


def second_derivative(function, x):
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = function(x)
        slope = inner.gradient(y, x)
    return outer.gradient(slope, x)


def curvature_of_rows(x):
    """The second derivative of each row's own energy, some of whose factors are broadcast."""

    def energy(x):
        return tf.tanh(x * [1.0, 2.0, 3.0, 4.0]) ** 2 * tf.reduce_sum(x, 1, keepdims=True)

    return x + second_derivative(energy, x)


@tf.custom_gradient
def reversed_gradient(x):
    return tf.identity(x), lambda dy: -dy


@tf.custom_gradient
def clipped_gradient_of_each(x):
    return tf.identity(x), lambda dy: tf.clip_by_norm(dy, 0.1, axes=[1])


def several_views(x):
    """Three copies of each row, side by side along axis 0, and their mean."""
    return tf.reduce_mean(tf.reshape(tf.tanh(tf.repeat(x, 3, axis=0)), (-1, 3, 4)), axis=1)


def positions_as_rows(x):
    """Each place of each row is a row of its own, as a dense layer flattens them."""
    flat = tf.reshape(x, (-1, 2)) @ tf.constant([[1.0, 2.0], [0.5, -1.0]], x.dtype)
    return tf.reshape(flat, (-1, 4))


def concatenated_views(x):
    first, second = tf.split(tf.tanh(tf.concat([x, -2 * x], axis=0)), 2, axis=0)
    return first * 2 + second


OF_EACH_ROW = {
    "softmax": lambda x: tf.nn.softmax(x),
    "mean of the row": lambda x: x - tf.reduce_mean(x, axis=1, keepdims=True),
    "negative axis": lambda x: x - tf.reduce_max(x, axis=-1, keepdims=True),
    "axis by rank": lambda x: x - tf.reduce_mean(x, axis=tf.rank(x) - 1, keepdims=True),
    "cumsum": lambda x: tf.cumsum(x, axis=1),
    "sort": lambda x: tf.sort(x, axis=1),
    "top_k": lambda x: tf.concat([tf.math.top_k(x, 2).values, x[:, :2]], axis=1),
    "argmax": lambda x: x * tf.one_hot(tf.argmax(x, axis=1), 4, dtype=x.dtype),
    "reverse": lambda x: x[:, ::-1] + tf.reverse(x, axis=[-1]) * 0.5,
    "roll": lambda x: x + tf.roll(x, 1, axis=1),
    "columns": lambda x: tf.gather(x, [0, 2, 3, 1], axis=1) + tf.concat([x[:, :1]] * 4, axis=1),
    "gather of each": lambda x: x + tf.gather(x, tf.argsort(x, axis=1), axis=1, batch_dims=1),
    "transpose and back": lambda x: tf.transpose(tf.tanh(tf.transpose(x))),
    "softmax of the transpose": lambda x: tf.transpose(tf.nn.softmax(tf.transpose(x), axis=0)),
    "reshape and back": lambda x: tf.reshape(tf.tanh(tf.reshape(x, (-1, 2, 2))), (-1, 4)),
    "reshape by shape": lambda x: tf.reshape(
        tf.reverse(tf.reshape(x, (num_rows(x), 2, 2)), axis=[1]), (num_rows(x), 4)
    ),
    "places as rows": positions_as_rows,
    "time major": lambda x: tf.transpose(
        tf.cumsum(tf.transpose(tf.reshape(x, (-1, 2, 2)), (1, 0, 2)), axis=0), (1, 0, 2)
    )[:, 1],
    "own outer product": lambda x: tf.reduce_sum(x[:, :, None] @ x[:, None, :], axis=2),
    "einsum": lambda x: tf.einsum("bi,bj->bij", x, tf.tanh(x))[:, 1],
    "einsum of three": lambda x: tf.einsum("bi,bj,ij->bj", x, x, tf.ones((4, 4), x.dtype)),
    "inverse": lambda x: tf.linalg.inv(outer(x))[:, 0],
    "cholesky": lambda x: tf.linalg.cholesky(outer(x))[:, 3],
    "solve": lambda x: tf.linalg.solve(outer(x), x[:, :, None])[:, :, 0],
    "determinant": lambda x: x * tf.linalg.det(outer(x))[:, None],
    "eigenvalues": lambda x: tf.linalg.eigvalsh(outer(x * [1.0, 2.0, 3.0, 4.0])),
    "diagonals": lambda x: tf.linalg.diag_part(tf.linalg.diag(x) * 2),
    "fourier": lambda x: tf.math.real(tf.signal.ifft(tf.signal.fft(tf.complex(x, x * 2)))),
    "real fourier": lambda x: tf.math.abs(tf.signal.rfft(x)),
    "frames": lambda x: tf.reduce_max(tf.signal.frame(x, 2, 1), axis=2),
    "where": lambda x: tf.where(x > 0, x, 0.1 * x),
    "where of the row": lambda x: tf.where(tf.reduce_sum(x, 1, keepdims=True) > 0, x, -x),
    "ones of a row": lambda x: tf.concat([x, tf.ones((num_rows(x), 1), x.dtype)], axis=1),
    "zeros_like": lambda x: tf.zeros_like(x) + tf.tanh(x),
    "broadcast": lambda x: x * tf.broadcast_to(as_float([1, 2, 3, 4]), tf.shape(x)),
    "tile": lambda x: tf.tile(x, (1, 2)),
    "several views": several_views,
    "concatenated views": concatenated_views,
    "pad": lambda x: tf.pad(x, [[0, 0], [1, 1]]),
    "normalize": lambda x: tf.nn.l2_normalize(x, axis=-1),
    "clip by norm": lambda x: tf.clip_by_norm(x, 0.5, axes=[1]),
    "loop over time": over_time,
    "unstack": lambda x: tf.stack([tf.tanh(each) for each in tf.unstack(x, axis=1)], axis=1),
    "stop gradient": lambda x: x + tf.stop_gradient(tf.exp(x)),
    "reversed gradient": reversed_gradient,
    "clipped gradient of each": clipped_gradient_of_each,
    "gradient in the call": gradient_of_rows,
    "gradient of a gradient in the call": curvature_of_rows,
    "cond of a constant": lambda x: tf.cond(tf.constant(3) > 2, lambda: x * 2, lambda: x),
    "one of several": lambda x: tf.switch_case(tf.constant(1), [lambda: x, lambda: x * 3]),
    "number of features": lambda x: x / as_float(tf.shape(x)[1]),
    "bucketize": lambda x: x + as_float(tf.raw_ops.Bucketize(input=x, boundaries=[-1.0, 0.0, 1.0])),
    "cast and round": lambda x: x + as_float(tf.cast(x * 3, "int32")),
    "function": tf.function(lambda x: tf.tanh(x) * 2),
    "recomputed": tf.recompute_grad(lambda x: tf.tanh(x) * 2),
    "convolution": lambda x: tf.nn.conv1d(x[:, :, None], tf.ones((2, 1, 1), x.dtype), 1, "SAME")[
        :, :, 0
    ],
    "unused mean": lambda x: (tf.reduce_mean(x, axis=0), x * 2)[1],
}
for name, function in OF_EACH_ROW.items():
    program(f"rows: {name}", EXACT, net(function))


# Of each row too, by means that hide it.
def loop_over_rows(x):
    """Row after row into an array of tensors."""
    array = tf.TensorArray(x.dtype, num_rows(x), element_shape=(4,))
    _, array = tf.while_loop(
        lambda i, _: i < num_rows(x),
        lambda i, a: (i + 1, a.write(i, tf.tanh(x[i]))),
        [0, array],
    )
    return tf.reshape(array.stack(), (-1, 4))


def until_all_converge(x):
    """Newton's square roots, until the slowest row is near enough: others go on with it."""
    square = tf.abs(x) + 1

    def step(root, n):
        return (root + square / root) / 2, n + 1

    root, _ = tf.while_loop(
        lambda root, n: (tf.reduce_max(tf.abs(root**2 - square)) > 1e-2) & (n < 30),
        step,
        [square, 0],
        shape_invariants=[tf.TensorShape([None, 4]), tf.TensorShape([])],
    )
    return root


def frozen_when_converged(x):
    """The same, but a row that is near enough stays."""
    square = tf.abs(x) + 1

    def step(root):
        is_near = tf.abs(root**2 - square) <= 1e-2
        return tf.where(is_near, root, (root + square / root) / 2)

    return tf.while_loop(
        lambda root: tf.reduce_any(tf.abs(root**2 - square) > 1e-2),
        step,
        [square],
        shape_invariants=[tf.TensorShape([None, 4])],
    )[0]


def only_selected_rows(x):
    """Computes some rows and puts them back where they were."""
    places = tf.where(x[:, 0] > 0)
    return tf.tensor_scatter_nd_update(x, places, tf.tanh(tf.gather_nd(x, places)))


@tf.custom_gradient
def gradient_by_its_norm(x):
    return tf.identity(x), lambda dy: dy / (tf.norm(dy) + 1e-3)


@tf.custom_gradient
def gradient_less_its_mean(x):
    return tf.identity(x), lambda dy: dy - tf.reduce_mean(dy, axis=0)


def jacobian_of_each(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.tanh(x)
    return tape.batch_jacobian(y, x)[:, :, 0] + x


def row_wise_python(x):
    y = tf.numpy_function(lambda a: np.tanh(a), [tf.stop_gradient(x)], x.dtype)
    return x + tf.ensure_shape(y, x.shape)


def unique_and_back(x):
    values = tf.unique(tf.reshape(tf.stop_gradient(x), [-1]))
    return x + tf.reshape(tf.gather(values.y * 2, values.idx), (-1, 4))


HIDDEN = {
    "map_fn": lambda x: tf.map_fn(tf.tanh, x),
    "vectorized_map": lambda x: tf.vectorized_map(lambda row: tf.tanh(row) * row[0], x),
    "loop over rows": loop_over_rows,
    "until all converge": until_all_converge,
    "frozen when converged": frozen_when_converged,
    "only selected rows": only_selected_rows,
    "gradient by its norm": gradient_by_its_norm,
    "gradient less its mean": gradient_less_its_mean,
    "jacobian of each": jacobian_of_each,
    "python": row_wise_python,
    "python that has no state": lambda x: (
        x * tf.ensure_shape(tf.numpy_function(lambda: 2.0, [], tf.float64, stateful=False), ())
    ),
    "identity matrix": lambda x: tf.eye(num_rows(x), dtype=x.dtype) @ x * 2,
    "sort and back": lambda x: tf.gather(
        tf.tanh(tf.gather(x, tf.argsort(x[:, 0]))), tf.argsort(tf.argsort(x[:, 0]))
    ),
    "reverse and back": lambda x: tf.tanh(x[::-1])[::-1],
    "times zero": lambda x: x + 0.0 * tf.reduce_mean(x, axis=0),
    "mean and back": lambda x: (x - tf.reduce_mean(x, 0)) + tf.reduce_mean(x, 0),
    "count over count": lambda x: x * as_float(num_rows(x)) / as_float(num_rows(x)),
    "any row": lambda x: tf.cond(tf.reduce_any(x > 1e9), lambda: x - 1, lambda: tf.tanh(x)),
    "unique and back": unique_and_back,
}
for name, function in HIDDEN.items():
    program(f"hidden: {name}", EITHER, net(function))


# What mixes rows.
def scan(x):
    return tf.scan(lambda state, row: tf.tanh(state + row), x)


def loop_that_sums(x):
    total = tf.zeros((4,), x.dtype)
    _, total = tf.while_loop(
        lambda i, _: i < num_rows(x), lambda i, t: (i + 1, t + x[i]), [0, total]
    )
    return x + total


def counts_of_values(x):
    values = tf.unique_with_counts(tf.cast(x[:, 0] > 0, "int32"))
    return x * as_float(tf.gather(values.count, values.idx))[:, None]


def mean_of_its_class(x):
    classes = tf.cast(x[:, 0] > 0, "int32")
    return x - tf.gather(tf.math.unsorted_segment_mean(x, classes, 2), classes)


def mean_of_python(x):
    y = tf.numpy_function(lambda a: a.mean(0), [tf.stop_gradient(x)], x.dtype)
    return x + tf.ensure_shape(y, (4,))


def count_of_calls(function, *inputs):
    """Python counts its calls: one per step on one device."""
    numbers = itertools.count(1)

    def called(x):
        count = function(lambda *_: np.float64(next(numbers)), list(inputs), tf.float64)
        return x * tf.ensure_shape(tf.cast(count, x.dtype), ())

    return called


def contrast(x):
    """Attention of the rows to each other."""
    near = tf.nn.l2_normalize(x, axis=1)
    return tf.nn.softmax(near @ tf.transpose(near)) @ x


def moved_mean(x):
    """Statistics with a gradient of their own."""

    @tf.custom_gradient
    def centred_rows(x):
        return x - tf.reduce_mean(x, axis=0), lambda dy: dy

    return centred_rows(x)


def gradient_of_the_mean(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        energy = tf.reduce_mean(tf.tanh(x) ** 2)
    return x + tape.gradient(energy, x)


def gradient_through_the_mean(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        energy = tf.reduce_sum((x - tf.reduce_mean(x, axis=0)) ** 4)
    return x + tape.gradient(energy, x)


MIXING = {
    "mean": centred,
    "mean of all": lambda x: x - tf.reduce_mean(x),
    "mean, no gradient": lambda x: x - tf.stop_gradient(tf.reduce_mean(x, axis=0)),
    "mean in a function": tf.function(lambda x: x - tf.reduce_mean(x, axis=0)),
    "mean, recomputed": tf.recompute_grad(centred),
    "mean, own gradient": moved_mean,
    "mean by einsum": lambda x: x - tf.einsum("bi->i", x) / 7,
    "mean by a product": lambda x: (
        x - tf.matmul(tf.ones((1, num_rows(x)), x.dtype), x) / as_float(num_rows(x))
    ),
    "mean by a convolution": lambda x: x - tf.nn.avg_pool1d(x[None], 2, 1, "SAME")[0],
    "mean of a float32": lambda x: x - as_float(tf.reduce_mean(tf.cast(x, "float32"), axis=0)),
    "max": lambda x: x / tf.reduce_max(tf.abs(x), axis=0),
    "min": lambda x: x - tf.reduce_min(x, axis=0),
    "std": lambda x: x / tf.math.reduce_std(x, axis=0),
    "moments": lambda x: x - tf.nn.moments(x, [0])[0],
    "sum": lambda x: x + tf.reduce_sum(x, axis=0),
    "product": lambda x: x * tf.reduce_prod(tf.tanh(x), axis=0),
    "logsumexp": lambda x: x - tf.reduce_logsumexp(x, axis=0),
    "norm": lambda x: x / tf.norm(x),
    "norm of all": lambda x: tf.nn.l2_normalize(x),
    "clip by norm": lambda x: tf.clip_by_norm(x, 0.5),
    "clip by global norm": lambda x: tf.clip_by_global_norm([x], 0.5)[0][0],
    "softmax": lambda x: tf.nn.softmax(x, axis=0),
    "softmax, axis -2": lambda x: ops.softmax(x, axis=-2),
    "softmax of the transpose": lambda x: tf.transpose(tf.nn.softmax(tf.transpose(x))),
    "reshape in two": lambda x: tf.reshape(tf.nn.softmax(tf.reshape(x, (4, -1)), axis=0), (-1, 4)),
    "reshape by columns": lambda x: tf.reshape(tf.transpose(x), (-1, 4)),
    "reverse": lambda x: tf.reverse(x, axis=[0]),
    "reversed slice": lambda x: x + x[::-1],
    "reverse sequence": lambda x: tf.transpose(
        tf.reverse_sequence(tf.transpose(x), [num_rows(x)] * 4, seq_axis=1)
    ),
    "roll": lambda x: x + tf.roll(x, 1, axis=0),
    "sort": lambda x: tf.sort(x, axis=0),
    "argsort": lambda x: tf.gather(x, tf.argsort(x[:, 0])),
    "top_k": lambda x: x + tf.math.top_k(tf.transpose(x), 2).values[:, 0],
    "median": lambda x: x - tf.sort(x, axis=0)[num_rows(x) // 2],
    "cumsum": lambda x: tf.cumsum(x, axis=0),
    "cumprod": lambda x: tf.math.cumprod(tf.tanh(x), axis=0),
    "argmax": lambda x: x * as_float(tf.argmax(x, axis=0)),
    "first row": lambda x: x - x[0],
    "first rows": lambda x: x - x[:1],
    "last row": lambda x: x - x[-1],
    "every second row": lambda x: x - tf.reduce_max(x[::2], axis=0),
    "neighbours": lambda x: x - tf.concat([x[:1], x[:-1]], axis=0),
    "gather of row 0": lambda x: x - tf.gather(x, [0]),
    "product with its transpose": lambda x: x @ tf.transpose(x) @ x,
    "tensordot": lambda x: x @ tf.tensordot(x, x, axes=[[0], [0]]),
    "einsum": lambda x: x @ tf.einsum("bi,bj->ij", x, x),
    "einsum of pairs": lambda x: tf.einsum("bi,ci->bc", x, x) @ x,
    "pairs by broadcasting": lambda x: tf.reduce_sum(tf.tanh(x[:, None] - x[None]), axis=1),
    "attention of rows": contrast,
    "covariance": lambda x: x @ tf.linalg.inv(tf.eye(4, dtype=x.dtype) + tf.transpose(x) @ x),
    "counts of values": counts_of_values,
    "boolean mask": lambda x: x + tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > 0), axis=0),
    "where and gather": lambda x: x + tf.reduce_sum(tf.gather_nd(x, tf.where(x[:, 0] > 0)), axis=0),
    "number of hits": lambda x: x * as_float(tf.shape(tf.where(x[:, 0] > 0))[0]),
    "count_nonzero": lambda x: x * as_float(tf.math.count_nonzero(x > 0)),
    "segment_sum": lambda x: tf.gather(
        tf.math.segment_sum(x, row_numbers(x) // 2), row_numbers(x) // 2
    ),
    "mean of its class": mean_of_its_class,
    "scatter": lambda x: x + tf.scatter_nd(row_numbers(x)[:, None] * 0, x, (1, 4)),
    "histogram": lambda x: x * as_float(tf.histogram_fixed_width(x, [-1.0, 1.0], 4)),
    "bincount": lambda x: (
        x * as_float(tf.math.bincount(tf.cast(x[:, 0] > 0, "int32"), minlength=4, maxlength=4))
    ),
    "one over the number of rows": lambda x: x / as_float(num_rows(x)),
    "number of rows by size": lambda x: x * as_float(tf.size(x)),
    "number of rows by a sum": lambda x: x * tf.reduce_sum(tf.ones_like(x[:, 0])),
    "sum over the number of rows": lambda x: x - tf.reduce_sum(x, axis=0) / as_float(num_rows(x)),
    "row numbers": lambda x: x * as_float(row_numbers(x))[:, None],
    "row numbers by cumsum": lambda x: x * tf.cumsum(tf.ones_like(x), axis=0),
    "row numbers by where": lambda x: x * as_float(tf.where(tf.ones_like(x[:, 0]) > 0)),
    "one-hot of row numbers": lambda x: x + tf.one_hot(row_numbers(x), 4, dtype=x.dtype),
    "identity matrix": lambda x: x + tf.eye(num_rows(x), 4, dtype=x.dtype),
    "linspace": lambda x: x * tf.linspace(as_float(0.0), as_float(1.0), num_rows(x))[:, None],
    "lower triangle": lambda x: (
        tf.linalg.band_part(tf.ones((num_rows(x), num_rows(x)), x.dtype), -1, 0) @ x
    ),
    "diagonal": lambda x: x * tf.linalg.trace(x),
    "scan": scan,
    "foldl": lambda x: x + tf.foldl(lambda a, row: tf.tanh(a + row), x),
    "loop that sums": loop_that_sums,
    "map_fn over the batch": lambda x: tf.map_fn(lambda row: row - tf.reduce_mean(x, 0), x),
    "python": mean_of_python,
    "count of calls": count_of_calls(tf.numpy_function),
    "count of calls of an eager function": count_of_calls(tf.py_function),
    "count of calls with an argument": count_of_calls(tf.numpy_function, 2.0),
    "gradient of the mean": gradient_of_the_mean,
    "gradient through the mean": gradient_through_the_mean,
    "gradient of a gradient through a sum": lambda x: (
        x + second_derivative(lambda x: tf.tanh(x) * tf.reduce_sum(x**2, axis=0), x)
    ),
    "unstacked features": lambda x: tf.stack(
        [each - tf.reduce_mean(each) for each in tf.unstack(x, axis=1)], axis=1
    ),
    "fourier": lambda x: tf.math.abs(tf.signal.fft2d(tf.complex(x, x))),
    "random order": lambda x: tf.gather(
        x, tf.argsort(tf.random.stateless_uniform((num_rows(x),), (1, 2)))
    ),
}
for name, function in MIXING.items():
    program(f"mixes: {name}", REFUSED, net(function))

program(
    "mixes: reshape in pairs",
    REFUSED,
    net(lambda x: tf.reshape(tf.nn.softmax(tf.reshape(x, (-1, 8))), (-1, 4))),
    x=numbers(6),
)
program(
    "mixes: reshape in pairs, which pieces hold",
    EITHER,
    net(lambda x: tf.reshape(tf.nn.softmax(tf.reshape(x, (-1, 8))), (-1, 4))),
    x=numbers(8),
)
program(
    "mixes: interleaved rows",
    REFUSED,
    net(lambda x: tf.reshape(tf.transpose(tf.reshape(x, (2, -1, 4)), (1, 0, 2)), (-1, 4))),
    x=numbers(6),
)


# Inputs on which made-up numbers fail, alone and beside what mixes.
FAILING = {
    "log": tf.math.log,
    "sqrt": tf.sqrt,
    "power": lambda x: x**1.5,
    "asin": lambda x: tf.asin(x / 4),
    "lgamma of a log": lambda x: tf.math.lgamma(tf.math.log(x + 1)),
    "cholesky": lambda x: tf.linalg.cholesky(tf.linalg.diag(x) + 0.1 * tf.ones((4, 4), x.dtype))[
        :, :, 0
    ],
    "assert": lambda x: (tf.debugging.assert_positive(x), x)[1],
    "check_numerics": lambda x: tf.debugging.check_numerics(tf.math.log(x), "a logarithm"),
    "assert of a range": lambda x: (tf.debugging.assert_less(x, as_float(3.5)), x)[1],
}
for name, function in FAILING.items():
    program(f"fails on some: {name}", EXACT, net(function, first=False), x=positive())
    program(
        f"fails on some: {name}, and a mean",
        REFUSED,
        net(function, centred, first=False),
        x=positive(),
    )
program(
    "fails on some: integers of a table, and a mean",
    REFUSED,
    net(
        lambda ids: tf.gather(tf.constant(numbers(5, 4)), tf.cast(ids, "int32") - 100)[:, 0],
        centred,
        first=False,
        inputs=(2,),
        dtype="int64",
    ),
    x=100 + np.arange(14).reshape(7, 2) % 5,
)
program(
    "fails on some: mean in the place of what is missing",
    REFUSED,
    net(
        lambda x: tf.where(
            tf.math.is_nan(x),
            tf.reduce_mean(tf.where(tf.math.is_nan(x), tf.zeros_like(x), x), axis=0),
            x,
        ),
        first=False,
    ),
    x=np.where(numbers() > 1, np.nan, numbers()),
)


# Mixing that made-up numbers may not meet.
def above(threshold, mixed):
    return lambda x: tf.where(tf.reduce_mean(x) > threshold, mixed(x), x)


def in_branch(threshold, mixed):
    return lambda x: tf.cond(tf.reduce_mean(x) > threshold, lambda: mixed(x), lambda: x)


def more_rows_than(number):
    return lambda x: tf.cond(num_rows(x) > number, lambda: centred(x), lambda: x)


def of_rows_from(number):
    def function(x):
        is_late = (row_numbers(x) >= number)[:, None]
        return tf.where(is_late, x - tf.reduce_mean(x, axis=0), x)

    return function


MET_SELDOM = {
    "where above a threshold": above(1000.0, centred),
    "branch above a threshold": in_branch(1000.0, centred),
    "relu of a mean": lambda x: x - tf.nn.relu(tf.reduce_mean(x, axis=0) - 1000),
    "rows above a threshold": lambda x: (
        x + tf.reduce_sum(tf.where(x > 1000, x - 2000, tf.zeros_like(x)), axis=0)
    ),
}
for name, function in MET_SELDOM.items():
    program(
        f"seldom: {name}",
        REFUSED,
        net(function, lambda x: x / 1000, first=False),
        x=numbers(shift=2000.0),
    )
program(
    "seldom: branch of a mean, rows alone",
    REFUSED,
    net(in_branch(2000.0, lambda x: x * 2), lambda x: x / 1000, first=False),
    x=np.sort(numbers(), axis=0) + 2000,
)
program("seldom: more than 90 rows", REFUSED, net(more_rows_than(90)), x=numbers(101))
program(
    "seldom: exactly 7 rows",
    REFUSED,
    net(lambda x: tf.cond(tf.equal(num_rows(x), 7), lambda: centred(x), lambda: x)),
)
program("seldom: rows from 60 on", REFUSED, net(of_rows_from(60)), x=numbers(101))
program("seldom: never met", EITHER, net(more_rows_than(10**6)))
program(
    "seldom: one id of many",
    REFUSED,
    net(
        lambda ids: tf.where(
            tf.reduce_any(ids == 12345),
            centred(as_float(ids) / 10000),
            as_float(ids) / 10000,
        ),
        first=False,
        dtype="int64",
    ),
    x=np.arange(28).reshape(7, 4) + 12340,
)
program(
    "seldom: odd number of rows",
    REFUSED,
    net(lambda x: tf.cond(tf.equal(num_rows(x) % 7, 0), lambda: x[::-1], lambda: x)),
)
