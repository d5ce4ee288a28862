"""Loops, branches and lists: what the judge says of them is what they do, whole and in pieces."""

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.judge.placements import Mixed, Shard
from tfparallel.judge.propagation import Judge, judged_graph

X = np.random.default_rng(0).uniform(0.1, 2, (5, 4))
CUT = 2


def num_rows(x):
    return tf.shape(x)[0]


def as_float(x):
    return tf.cast(x, "float64")


def over_rows(turn, *, first=0, step=1, bound=num_rows, extra=None):
    """A loop that writes a row in each turn, of what is read by `turn(x, rows, i, extra)`."""

    def function(x):
        rows = tf.TensorArray("float64", num_rows(x)).unstack(x)
        array = tf.TensorArray("float64", num_rows(x)).unstack(tf.zeros_like(x))
        state = tf.constant(0.0 if extra is None else extra, "float64")

        def body(i, array, state):
            return i + step, array.write(i, turn(x, rows, i, state)), state * 2

        start = (tf.constant(first), array, state)
        return tf.while_loop(lambda i, *_: i < bound(x), body, start)[1].stack()

    return function


def after_loop(x):
    rows = tf.TensorArray("float64", num_rows(x)).unstack(x)
    array = tf.TensorArray("float64", num_rows(x))
    start = (tf.constant(0), array)
    i, array = tf.while_loop(
        lambda i, _: i < num_rows(x), lambda i, array: (i + 1, array.write(i, rows.read(i))), start
    )
    return array.stack() * as_float(i)


def recurrent(x):
    state = tf.zeros_like(x[:, 0])
    return tf.while_loop(
        lambda i, _: i < 4, lambda i, s: (i + 1, tf.tanh(s + x[:, i])), (tf.constant(0), state)
    )[1]


def gradient_of_map(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(tf.map_fn(tf.tanh, x))
    return tape.gradient(y, x)


def of_two_lengths(x):
    longer = tf.concat([x, x], 1)
    return tf.cond(tf.constant(2) > 1, lambda: x, lambda: longer[:, :4] * 2)


TABLE = tf.constant(np.arange(400.0).reshape(100, 4))
RIGHT = {
    "each row": over_rows(lambda x, rows, i, _: rows.read(i) * 2),
    "map_fn": lambda x: tf.map_fn(lambda row: tf.tanh(row) * tf.reduce_sum(row), x),
    "map_fn of two": lambda x: tf.map_fn(
        lambda pair: pair[0] * tf.reduce_max(pair[1]),
        (x, x[:, ::-1]),
        fn_output_signature="float64",
    ),
    "vectorized_map": lambda x: tf.vectorized_map(lambda row: tf.gather(row, tf.argsort(row)), x),
    "recurrent": recurrent,
    "scan over places": lambda x: tf.scan(lambda a, b: a + b, tf.transpose(x))[-1],
    "branches of other lengths": of_two_lengths,
}  # fmt: skip
MIXED = {
    "the row's number": over_rows(lambda x, rows, i, _: rows.read(i) * as_float(i)),
    "a table, by the row's number": over_rows(lambda x, rows, i, _: rows.read(i) + TABLE[i]),
    "a branch, by the row's number": over_rows(
        lambda x, rows, i, _: tf.cond(i < 2, lambda: rows.read(i), lambda: -rows.read(i))
    ),
    "turns, by the row's number": over_rows(
        lambda x, rows, i, _: tf.while_loop(
            lambda j, _: j < 7, lambda j, y: (j + 1, y * 2), (i, rows.read(i))
        )[1]
    ),
    "the next row": over_rows(lambda x, rows, i, _: rows.read((i + 1) % num_rows(x))),
    "a row, and the next": over_rows(
        lambda x, rows, i, _: tf.stack([rows.read(i), rows.read((i + 1) % num_rows(x))])[1]
    ),
    "handed on": over_rows(lambda x, rows, i, state: rows.read(i) * state, extra=1.0),
    "from the second row on": over_rows(lambda x, rows, i, _: rows.read(i), first=1),
    "every second row": over_rows(lambda x, rows, i, _: rows.read(i), step=2),
    "the first two rows": over_rows(lambda x, rows, i, _: rows.read(i), bound=lambda x: 2),
    "half of the rows": over_rows(
        lambda x, rows, i, _: rows.read(i), bound=lambda x: num_rows(x) // 2
    ),
    "as often as there are rows": over_rows(
        lambda x, rows, i, _: tf.reduce_sum(tf.tile(rows.read(i)[None], (num_rows(x), 1)), 0)
    ),
    "map_fn over the rows' numbers": lambda x: x
    + tf.map_fn(as_float, tf.range(num_rows(x)), fn_output_signature="float64")[:, None],
    "half of the number of rows": lambda x: x * as_float(as_int(as_float(num_rows(x)) / 2)),
    "a branch by the number of rows": lambda x: tf.cond(num_rows(x) > 3, lambda: x, lambda: -x),
    "a branch by the data": lambda x: tf.cond(tf.reduce_sum(x) > 9, lambda: x, lambda: -x),
    "as many doublings as rows": lambda x: x * tf.while_loop(
        lambda i, _: i < num_rows(x), lambda i, y: (i + 1, y * 2),
        (tf.constant(0), tf.constant(1.0, "float64")))[1],
    "scan over the rows": lambda x: tf.scan(lambda a, b: a + b, x),
    "numbers of some rows": lambda x: tf.gather(x, tf.where(x[:, 0] > 1, tf.range(num_rows(x)), 0)),
    "small numbers of rows": lambda x: tf.gather(x, as_int(tf.cast(tf.range(num_rows(x)), "int8"))),
    "gradient through a loop": gradient_of_map,
}  # fmt: skip


def as_int(x):
    return tf.cast(x, "int32")


def judged(function):
    graph = judged_graph("flow")
    with graph.as_default():
        x = tf.compat.v1.placeholder("float64", [None, 4])
        out = function(x)
    return Judge.of_rows(graph, [x]).of(out).placement


@pytest.mark.parametrize("name", RIGHT)
def test_pieces_are_what_the_judge_says(name):
    function = RIGHT[name]
    assert judged(function) == Shard(0)
    whole, one, other = (function(tf.constant(part)) for part in (X, X[:CUT], X[CUT:]))
    np.testing.assert_allclose(whole, np.concatenate([one, other]))


@pytest.mark.parametrize("name", MIXED)
def test_loops_that_pieces_cannot_run_are_mixed(name):
    assert isinstance(judged(MIXED[name]), Mixed)


def test_a_number_behind_a_loop_over_the_rows_is_the_number_of_rows():
    assert judged(after_loop) == Shard(0, 1)
