"""How a weight is cut into shares, and joined."""

import gc

import tensorflow as tf

from tfparallel.variables.sharded import apart


def held():
    return tf.config.experimental.get_memory_info("CPU:0")["current"]


def test_a_share_does_not_keep_the_whole_that_it_was_cut_from():
    """Story: rows of a tensor are a view of it, and a variable that is assigned a view keeps it."""
    share = tf.Variable(tf.zeros((1, 2**20)))
    gc.collect()  # Of other tests.
    before = held()
    for cut, kept in ((lambda rows: rows, 16), (apart, 4)):
        whole = tf.random.normal((4, 2**20))
        share.assign(cut(whole[:1]))
        del whole
        # TensorFlow's own way is what `apart` is for: when it copies, too, this can go.
        assert held() - before == (kept - 4) * 2**20
