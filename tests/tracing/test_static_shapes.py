"""Shape operations that add nothing to a graph if they change nothing."""

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.tracing.static_shapes import (
    as_matrix,
    concatenated,
    reshaped,
    size_along,
    split,
)


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def placeholder(*shape):
    return tf.compat.v1.placeholder(tf.float32, shape)


def test_what_changes_nothing_returns_the_same_tensor(graph):
    tensor = placeholder(4, 3)
    number = len(graph.get_operations())
    assert reshaped(tensor, [4, 3]) is tensor
    assert concatenated([tensor], 0) is tensor
    for sizes, axis in ((1, 0), ([3], 1)):
        (part,) = split(tensor, sizes, axis)
        assert part is tensor
    assert (size_along(tensor, 0), size_along(tensor, 1)) == (4, 3)
    assert len(graph.get_operations()) == number


@pytest.mark.parametrize("shape", [(None, 3), (4, None), (None, None)])
def test_a_shape_that_is_not_static_is_computed(graph, shape):
    tensor = placeholder(*shape)
    assert reshaped(tensor, [4, 3]) is not tensor
    assert tf.is_tensor(size_along(tensor, shape.index(None)))


@pytest.mark.parametrize(
    ("shape", "matrix"), [((0, 4), [0, 4]), ((2, 3, 0), [2, 0]), ((3,), [3, 1])]
)
def test_the_width_of_a_matrix_is_known_without_rows(graph, shape, matrix):
    """TensorFlow infers no width of zero rows: worker by worker the collective would differ."""
    assert as_matrix(placeholder(*shape)).shape.as_list() == matrix


def test_values_are_those_of_tensorflow():
    rows = tf.constant(np.arange(12.0).reshape(4, 3))
    np.testing.assert_array_equal(reshaped(rows, [2, 6]), tf.reshape(rows, [2, 6]))
    np.testing.assert_array_equal(concatenated([rows, rows], 1), tf.concat([rows, rows], 1))
    for sizes, axis in ((2, 0), ([1, 3], 0), ([1, 2], 1)):
        expected = tf.split(rows, sizes, axis)
        for part, other in zip(split(rows, sizes, axis), expected, strict=True):
            np.testing.assert_array_equal(part, other)
