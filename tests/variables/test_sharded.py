"""Tests of tfparallel.variables.sharded: what a share keeps in memory."""

from tests.forked import run_python
from tests.tensor_bytes import tensor_bytes

# In a process of its own, where nothing of other tests is freed between two counts.
COUNTS = """
import tensorflow as tf
from tfparallel.variables.sharded import apart

def current_bytes():
    return tf.config.experimental.get_memory_info("CPU:0")["current"]

share = tf.Variable(tf.zeros((1, 2**20)))
before = current_bytes()
for cut in (lambda rows: rows, apart):
    whole = tf.random.normal((4, 2**20))
    share.assign(cut(whole[:1]))
    del whole
    print((current_bytes() - before) // 2**20)
"""


def test_a_share_does_not_keep_the_whole_that_it_was_cut_from():
    """Story: rows of a tensor are a view of it, and a variable that is assigned a view keeps it.

    TensorFlow's own way is what `apart` is for: when it copies, too, this can go.
    """
    tensor_bytes("current")  # Skips the test where nothing counts them.
    done = run_python(["-c", COUNTS], timeout=60)
    assert done.stdout.split() == ["12", "0"], done.stderr
