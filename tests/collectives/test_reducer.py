"""Σ_k g_k over the replicas of a process, and over workers: `workers` stands for two."""

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.collectives import cross_device, indexed_slices, reducer
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
    gradients = [
        on_devices((3, 2)),
        [None] * 3,
        on_devices((), "float64", 1),
        on_devices((4,), seed=2),
    ]
    totals = Reducer(ops, None).totals(gradients, no_sparse_ones)[0]
    assert totals[1] is None
    for total, terms in zip(totals[:1] + totals[2:], gradients[:1] + gradients[2:], strict=True):
        assert total.dtype == terms[0].dtype and total.shape == terms[0].shape
        np.testing.assert_array_equal(total, sum(term.numpy() for term in terms))
    copies = reducer.on_each_device(totals[0])
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


def test_workers_sum_dense_gradients_and_what_is_beside(workers):
    def totals(group, scale):
        replicas = [[scale * tf.ones([2, 2]), tf.ones([2, 2])], [None] * 2, [tf.ones([3])] * 2]
        beside = [scale * tf.ones([]), tf.constant([1, int(scale)])]
        sums, others = Reducer(None, group).totals(replicas, no_sparse_ones, beside)
        assert sums[1] is None
        return [each.numpy() for each in (sums[0], sums[2], *others)], list(group._signatures)

    for (first, last, number, counts), collectives in workers(totals, [1.0, 3.0]):
        np.testing.assert_array_equal(first, np.full((2, 2), 6.0))  # 1 + 1 + 3 + 1
        np.testing.assert_array_equal(last, np.full(3, 4.0))
        assert number == 4.0
        assert counts.tolist() == [2, 4] and counts.dtype == np.int32
        # 4 + 3 elements of gradients and one beside them, in one collective; the whole numbers.
        assert sorted(size for *_, size in collectives) == [2, 8]


def test_extra_values_travel_in_the_first_bucket(workers):
    def totals(group, scale):
        group.bucket_bytes = 12
        gradients = [[scale * tf.ones([n])] for n in (5, 4, 2)]
        sums, others = Reducer(None, group).totals(gradients, no_sparse_ones, [scale * tf.ones([])])
        sizes = [size for *_, size in group._signatures]
        return [float(each[0]) for each in sums], float(others[0]), sizes

    # 12 bytes hold the last gradient and the one number; the next bucket ends with 4 elements.
    assert workers(totals, [1.0, 3.0]) == [([4.0] * 3, 4.0, [3, 4, 5])] * 2


def of_workers(group, terms, kind):
    ((total,), _) = Reducer(None, group).totals([terms], lambda: [[kind]])
    assert tuple(total.dense_shape) == (5, 2)
    return total.indices.numpy().tolist(), total.values[:, 0].numpy().tolist()


def test_workers_lay_slices_of_rows_end_to_end(workers):
    """Worker 0 has two replicas, worker 1 has one slice less."""
    gradients = [
        [slices([0, 3], [[1, 1], [2, 2]]), slices([3], [[3, 3]])],
        [slices([3], [[4, 4]]), slices([1], [[5, 5]])],
    ]
    totals = workers(lambda group, terms: of_workers(group, terms, indexed_slices.ROWS), gradients)
    assert totals == [([0, 3, 3, 3, 1], [1, 2, 3, 4, 5])] * 2


def test_workers_add_slices_of_the_same_indices_place_by_place(workers):
    gradients = [
        [slices([2, 0], [[k, k], [1, 1]]), slices([2, 0], [[1, 1], [k, k]])] for k in (2, 5)
    ]
    totals = workers(lambda group, terms: of_workers(group, terms, indexed_slices.ONCE), gradients)
    assert totals == [([2, 0], [9, 9])] * 2  # 2 + 1 + 5 + 1


def test_workers_add_the_slices_of_each_feature(workers):
    gradients = [
        [slices([4, 0], [[1, 1], [2, 2]]), slices([0], [[3, 3]])],
        [slices([3, 4], [[4, 4], [5, 5]]), slices([3], [[6, 6]])],
    ]
    totals = workers(
        lambda group, terms: of_workers(group, terms, indexed_slices.DISTINCT), gradients
    )
    assert totals == [([4, 0, 3], [6, 5, 10])] * 2


def test_sparse_gradients_keep_their_places_among_dense_ones(workers):
    """The kinds of readings are given by variable, dense ones and those without any included."""

    def totals(group, scale):
        sparse = [slices([1], [[scale, scale]])]
        gradients = [sparse, [tf.fill([2], scale)], [None], sparse]
        kinds = [[indexed_slices.ROWS], None, None, [indexed_slices.ONCE]]
        sums, _ = Reducer(None, group).totals(gradients, lambda: kinds)
        assert sums[2] is None
        return sums[0].indices.numpy().tolist(), sums[1].numpy().tolist(), sums[3].values.numpy()

    for rows, dense, once in workers(totals, [1.0, 3.0]):
        assert rows == [1, 1]
        assert dense == [4, 4]
        np.testing.assert_array_equal(once, [[4, 4]])


@pytest.mark.parametrize("kinds", [None, [indexed_slices.ROWS, indexed_slices.ONCE]])
def test_an_eager_gradient_of_two_kinds_is_refused(kinds):
    with pytest.raises(ValueError, match=r"weight of shape \(5, 2\), read (2 times|once or more)"):
        Reducer(None, None).totals([[slices([0], [[1, 1]])]], lambda: [kinds])
