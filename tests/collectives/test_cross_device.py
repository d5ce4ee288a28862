"""All algorithms between logical devices, as `tf.distribute.CrossDeviceOps`."""

import numpy as np
import pytest
import tensorflow as tf

from tfparallel.collectives import cross_device
from tfparallel.collectives.algorithms import ALGORITHMS

DEVICES = [f"CPU:{index}" for index in range(4)]


def terms(shape, dtype, devices):
    tensors = []
    for rank, device in enumerate(devices):
        with tf.device(device):
            numbers = tf.reshape(tf.range(np.prod(shape, dtype=int)), shape)
            tensors.append(tf.cast(numbers + 5 * rank, dtype))
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_the_sum_of_any_shape_and_type(num_devices):
    devices = DEVICES[:num_devices]
    for name in cross_device.runnable(devices):  # Not parameters: what follows a test takes longer.
        check_sums(name, devices)


def check_sums(name, devices):
    ops = cross_device.make(name, devices)
    # Fewer elements than ranks; none; two types, one of them twice.
    specs = [((), "float32"), ((3, 2), "float32"), ((1,), "float64"), ((0, 2), "float64")]
    specs += [((5,), "float16"), ((2, 3), "bfloat16")]
    inputs = [terms(shape, dtype, devices) for shape, dtype in specs]
    sums = tf.function(lambda: cross_device.all_reduce(ops, inputs), autograph=False)()
    for (shape, dtype), of_all, term in zip(specs, sums, inputs, strict=True):
        expected = sum(np.asarray(one, np.float64) for one in term)
        assert len(of_all) == len(devices), name
        for total in of_all:
            assert total.dtype == dtype and total.shape == shape
            np.testing.assert_array_equal(np.asarray(total, np.float64), expected, name)


def test_all_devices_hold_the_same_bits():
    random = np.random.default_rng(0).standard_normal((4, 1003)).astype(np.float32)
    values = []
    for device, row in zip(DEVICES, random, strict=True):
        with tf.device(device):
            values.append(tf.constant(row))
    for name in ALGORITHMS:
        ((first, *others),) = cross_device.all_reduce(cross_device.make(name, DEVICES), [values])
        np.testing.assert_allclose(first, random.sum(0), rtol=0, atol=1e-5)
        for index, other in enumerate(others, 1):
            assert other.numpy().tobytes() == first.numpy().tobytes(), name
            assert other.device.endswith(f"CPU:{index}")


def test_a_strategy_of_tensorflows_takes_them_for_means_and_sparse_values():
    ops = cross_device.make("ring", DEVICES)
    strategy = tf.distribute.MirroredStrategy(DEVICES, cross_device_ops=ops)

    @tf.function
    def step():
        def on_replica():
            context = tf.distribute.get_replica_context()
            rank = tf.cast(context.replica_id_in_sync_group, tf.float32)
            dense = context.all_reduce("mean", tf.fill([6], rank))
            rows = tf.IndexedSlices(tf.fill([1, 2], rank), tf.constant([1]), tf.constant([3, 2]))
            return dense, tf.convert_to_tensor(context.all_reduce("sum", rows))

        return strategy.run(on_replica)

    dense, sparse = step()
    for one in strategy.experimental_local_results(dense):
        np.testing.assert_array_equal(one, np.full(6, 1.5))
    for one in strategy.experimental_local_results(sparse):
        np.testing.assert_array_equal(one, [[0, 0], [6, 6], [0, 0]])
    total = strategy.reduce("SUM", strategy.run(lambda: tf.constant(2.0)), axis=None)
    assert float(total) == 8.0


def test_a_size_that_is_known_only_when_it_runs():
    ops = cross_device.make("halving_doubling", DEVICES)

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(vector):
        (sums,) = cross_device.all_reduce(ops, [[tf.identity(vector) for _ in DEVICES]])
        return sums[3]

    for count in (0, 3, 17):
        np.testing.assert_array_equal(step(tf.range(float(count))), 4 * np.arange(count))


def test_an_algorithm_that_cannot_run_is_an_error_that_lists_those_that_can():
    with pytest.raises(ValueError) as error:
        cross_device.make("nccl", DEVICES)
    for text in ("halving_doubling", "tf_ring", " nccl needs GPUs; ", "Received: nccl"):
        assert text in str(error.value)


def test_tensorflows_hierarchical_copy_forgets_a_device_of_three():
    ops, devices = tf.distribute.HierarchicalCopyAllReduce(), DEVICES[:3]
    ((total, *_),) = cross_device.all_reduce(ops, [terms((), "float32", devices)])
    assert float(total) != 15.0
    with pytest.raises(ValueError, match=r"omits one device if their number is odd \(3\)"):
        cross_device.make("tf_hierarchical_copy", devices)
