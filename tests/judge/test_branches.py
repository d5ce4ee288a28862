"""A branch of several devices is divided into programs, and computes what it did."""

import pytest
import tensorflow as tf

from tfparallel.xla.compiled_step import in_programs

FIRST, SECOND = "CPU:0", "CPU:1"


class Counted:
    """A step of two variables on two devices, in a branch; one depends on the other."""

    def __init__(self):
        with tf.device(FIRST):
            self.first = tf.Variable(1.0)
        with tf.device(SECOND):
            self.second = tf.Variable([1.0, 2.0])

    def step(self, x):
        def positive():
            with tf.device(FIRST):
                total = tf.reduce_sum(tf.tanh(x))
                self.first.assign_add(total)
            with tf.device(SECOND):
                self.second.assign_add(tf.tanh(x[:2]) * total)
                doubled = self.second * 2.0
            with tf.device(FIRST):
                self.first.assign_add(tf.reduce_sum(doubled))
                text = tf.strings.as_string(self.first)
            return doubled * self.first, tf.strings.length(text) > 0

        def negative():
            with tf.device(SECOND):
                self.second.assign(tf.exp(x[:2]))
            return tf.concat([self.second, x], 0), tf.constant(False)

        values, said = tf.cond(tf.reduce_sum(x) > 0.0, positive, negative)
        return values - 1.0, said, self.first + tf.reduce_sum(self.second)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [None, 3])
def test_a_divided_branch_computes_and_writes_what_it_did(rows):
    batches = [[1.0, 2.0, -0.5], [-1.0, -2.0, 0.5], [0.25, 1.0, 1.0], [-3.0, 1.0, 1.0]]
    divided, plain = Counted(), Counted()

    @tf.function(input_signature=[tf.TensorSpec([rows])], autograph=False)
    def step(x):
        return in_programs(divided.step, [FIRST, SECOND], x)

    for batch in map(tf.constant, batches):
        for ours, expected in zip(step(batch), plain.step(batch), strict=True):
            tf.debugging.assert_near(tf.cast(ours, tf.float32), tf.cast(expected, tf.float32))
        tf.debugging.assert_near(divided.first, plain.first)
        tf.debugging.assert_near(divided.second, plain.second)
    functions = step.get_concrete_function().graph.as_graph_def().library.function
    compiled = [node for each in functions for node in each.node_def]
    assert sum(node.attr["_XlaMustCompile"].b for node in compiled) >= 4
