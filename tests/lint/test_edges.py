"""The graphs of one call are read, whatever ran before it."""

import pytest
import tensorflow as tf

from tests.lint import edges

X = tf.ones([3])


def on_devices(operation, devices):
    @tf.function
    def function(x):
        for device in devices:
            with tf.device(device):
                x = operation(x)
        return x

    return function


def test_what_runs_between_two_readings_is_not_read():
    def kinds(operation):
        return edges.graphs_of(lambda: on_devices(operation, ["CPU:1"])(X)).kinds()

    assert "Sin" in kinds(tf.sin)
    on_devices(tf.cos, ["CPU:1", "CPU:2", "CPU:3"])(X)
    assert {"Sin", "Cos", "Tan"} & kinds(tf.tan) == {"Tan"}


def test_what_a_failed_reading_leaves_is_not_read():
    def fails():
        on_devices(tf.cos, ["CPU:1", "CPU:2", "CPU:3"])(X)
        raise KeyError("a failure")

    with pytest.raises(KeyError):
        edges.graphs_of(fails)
    kinds = edges.graphs_of(lambda: on_devices(tf.tan, ["CPU:1"])(X)).kinds()
    assert {"Cos", "Tan"} & kinds == {"Tan"}


def test_a_function_that_has_run_before_leaves_nothing_to_read():
    function = on_devices(tf.sin, ["CPU:1"])
    function(X)
    with pytest.raises(ValueError, match="TensorFlow made no graph: the function has run before"):
        edges.graphs_of(lambda: function(X))
