"""Σ_k g_k over the replicas of one process; `tests/workers` goes on from there."""

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.collectives import cross_device, indexed_slices, replica_sums
from tfparallel.collectives.reducer import Reducer

DEVICES = ["CPU:0", "CPU:1", "CPU:2"]


def on_devices(shape, dtype="float32", seed=0):
    random = np.random.default_rng(seed)
    terms = []
    for device in DEVICES:
        with tf.device(device):
            terms.append(tf.constant(random.integers(-9, 9, shape), dtype))
    return terms


def slices(rows, values):
    return tf.IndexedSlices(tf.constant(values, "float32"), tf.constant(rows), tf.constant([5, 2]))


def no_sparse_ones():
    raise AssertionError("There is no sparse gradient to ask for.")


@pytest.mark.parametrize("algorithm", [None, "ring", "recursive_doubling"])
def test_dense_gradients_are_summed_and_none_stays_none(algorithm):
    ops = algorithm and cross_device.make(algorithm, DEVICES)
    given = [on_devices((3, 2)), [None] * 3, on_devices((), "float64", 1), on_devices((4,), seed=2)]
    found = Reducer(ops, None).totals(given, no_sparse_ones)[0]
    assert found[1] is None
    for total, terms in zip(found[:1] + found[2:], given[:1] + given[2:], strict=True):
        assert total.dtype == terms[0].dtype and total.shape == terms[0].shape
        np.testing.assert_array_equal(total, sum(term.numpy() for term in terms))
    copies = replica_sums.on_each_device(found[0])
    assert isinstance(copies, tf.Tensor) == (algorithm is None)


def test_slices_of_rows_are_laid_end_to_end_and_those_of_one_reading_added():
    terms = [slices([0, 3], [[1, 1], [2, 2]]), slices([3, 1], [[3, 3], [4, 4]])]
    rows, once = [indexed_slices.ROWS], [indexed_slices.ONCE]
    ((total,), _) = Reducer(None, None).totals([terms], lambda: [rows])
    np.testing.assert_array_equal(total.indices, [0, 3, 3, 1])
    np.testing.assert_array_equal(total.values[:, 0], [1, 2, 3, 4])
    assert tuple(total.dense_shape) == (5, 2)
    same = [slices([0, 3], [[1, 1], [2, 2]]), slices([0, 3], [[3, 3], [4, 4]])]
    ((total,), _) = Reducer(None, None).totals([same], lambda: [once])
    np.testing.assert_array_equal(total.indices, [0, 3])
    np.testing.assert_array_equal(total.values[:, 0], [4, 6])


def test_a_weight_that_is_read_densely_too_has_a_dense_gradient():
    with tf.device("CPU:1"):
        dense = tf.ones([5, 2])
    ((total,), _) = Reducer(None, None).totals([[slices([0], [[1, 1]]), dense]], no_sparse_ones)
    np.testing.assert_array_equal(total[:, 0], [2, 1, 1, 1, 1])
