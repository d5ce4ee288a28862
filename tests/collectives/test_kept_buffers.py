"""Buffers that are kept: nobody's memory is written while it is read."""

import gc

import numpy as np
import tensorflow as tf

from tfparallel.collectives.mpi.buffers import ALIGNMENT, KeptBuffers, layout


def test_memory_comes_back_with_its_last_reader():
    buffers = KeptBuffers()
    first = buffers.take(100_000)
    address = first.ctypes.data
    part = first.view(np.float32)[10:20].reshape(2, 5)
    del first
    second = buffers.take(100_000)
    assert second.ctypes.data != address  # `part` still reads.
    del part
    assert buffers.take(100_000).ctypes.data == address
    assert buffers.num_made == 2


def test_a_size_near_by_takes_the_same_memory():
    buffers = KeptBuffers()
    for size in (100_000, 131_072, 98_305):
        assert buffers.take(size).size == size
    assert buffers.num_made == 1


def test_parts_are_aligned_as_tensorflow_aligns():
    starts, end = layout([4, 0, 65, 64])
    assert (starts, end) == ([0, 64, 64, 192], 256)
    assert KeptBuffers().take(10).ctypes.data % ALIGNMENT == 0


def test_what_tensorflow_took_over_is_not_written_again():
    """Without the count of readers, the tensor and the variable would hold the last numbers."""
    buffers = KeptBuffers()
    addresses = []

    def fill(x):
        out = buffers.take(4 * 40_000).view(np.float32)
        out[:] = x
        addresses.append(out.ctypes.data)
        return out

    variable = tf.Variable(tf.zeros([40_000]))

    @tf.function
    def step(x):
        result = tf.ensure_shape(tf.numpy_function(fill, [x], tf.float32), [40_000])
        variable.assign(result)
        return result

    results = [step(tf.constant(float(k))) for k in range(4)]
    assert [float(y[0]) for y in results] == [0, 1, 2, 3]
    # The memory is TensorFlow's own by now: it aliases, and that is what saves the time.
    assert np.asarray(memoryview(results[3])).ctypes.data == addresses[3]
    del results
    gc.collect()
    for k in range(20):
        step(tf.constant(float(k)))
        assert float(variable[-1]) == k
    assert buffers.num_made <= 6
