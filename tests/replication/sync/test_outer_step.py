"""The outer step of DiLoCo."""

import keras
import numpy as np
import tensorflow as tf

from tfparallel.replication.sync.outer_step import OuterStep


def test_a_constraint_holds_after_it():
    """Story: it moves further than the average, and left weights below zero."""
    weight = keras.Variable([1.0, 0.1])
    weight.constraint = keras.constraints.NonNeg()
    outer = OuterStep()
    outer.begin([weight])
    moved = outer.step(weight, tf.constant([1.0, 0.0]))
    np.testing.assert_array_equal(moved, [1.0, 0.0])
