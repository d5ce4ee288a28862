"""The rows of a call's arguments, and the masks beside them."""

import numpy as np
import tensorflow as tf

from tfparallel.data.shard import Shard
from tfparallel.replication.inputs import BatchInputs


def masked():
    x = tf.ones((4, 3, 2))
    x._keras_mask = tf.constant([[True, True, False]] * 4)
    return x


def split(inputs, num_rows):
    return inputs.split([Shard(k, 2, k * num_rows // 2, num_rows // 2, num_rows) for k in (0, 1)])


def test_a_mask_that_a_call_takes_off_its_rows_is_off_the_batch():
    """As Keras's attention does: what is called later finds none, as on one device."""
    x, kept = masked(), masked()
    inputs = BatchInputs((x, x, kept), {})
    parts = split(inputs, 4)
    for rows in parts[0][:2]:
        rows._keras_mask = None
    inputs.take_off_masks(parts[0])
    assert x._keras_mask is None and kept._keras_mask is not None


def test_the_row_that_stands_for_none_has_a_mask():
    x = masked()[:0]
    x._keras_mask = tf.zeros((0, 3), tf.bool)
    (rows,), _ = BatchInputs((x,), {}, may_be_empty=True).structure
    np.testing.assert_array_equal(rows._keras_mask, [[True] * 3])
