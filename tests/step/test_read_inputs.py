"""Which inputs of a batch a functional model reads, and what is one for all rows."""

import keras
import numpy as np
import pytest
from keras import layers

from tfparallel.step.read_inputs import read_inputs
from tfparallel.step.row_counts import why_unaligned

ROWS, SCALAR = np.ones((4, 2)), np.float64(1)


def single():
    x = keras.Input((2,), name="b")
    return keras.Model(x, layers.Dense(1)(x))


def by_name():
    x = keras.Input((2,), name="b")
    return keras.Model({"b": x}, layers.Dense(1)(x))


class OwnNames(keras.Model):
    """May read any key."""

    def call(self, inputs):
        return inputs["b"] + inputs["c"]


@pytest.mark.parametrize(
    ("build", "keys", "expected"),
    [
        (single, "abc", "b"),
        (by_name, "bc", "b"),
        (by_name, "b", "b"),
        # Keras would take "a" for "b": that is its own to say, and not mended by the way.
        (by_name, "ab", "ab"),
        (by_name, "ac", "ac"),
        (OwnNames, "abc", "abc"),
    ],
)
def test_what_is_read_of_a_dictionary(build, keys, expected):
    assert "".join(read_inputs(build(), dict.fromkeys(keys, ROWS))) == expected


def test_what_is_no_dictionary_is_left_as_it_is():
    assert read_inputs(single(), ROWS) is ROWS


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (({"a": ROWS, "b": SCALAR}, ROWS, ROWS), None),  # Goes to each replica as it is.
        ((ROWS, ROWS, None), None),
        ((ROWS,), None),
        ((ROWS, SCALAR), "of shape () applies to all rows"),
        ((ROWS, {"p": ROWS, "q": ROWS}, SCALAR), "of shape () applies to all rows"),
        ((ROWS, ROWS[:3]), "[3, 4] rows"),
    ],
)
def test_a_scalar_has_no_rows(batch, said):
    """Story: `bool(tf.TensorShape([]))` is True, so the first axis was asked for."""
    reason = why_unaligned(batch)
    assert reason is None if said is None else said in reason
