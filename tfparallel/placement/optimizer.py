"""Updates on the devices of what they update.

Keras updates all variables in one go, in whatever device scope it is called. Here each operation
of an update goes to the device of its first input: the gradient, the variable or its slot. So
clipping, decay, averages and accumulation follow too, whose loops over variables are Keras's own.
"""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfparallel.extend import extend
from tfparallel.placement.audit import device_of, device_outside, noting
from tfparallel.placement.update_order import one_large_update_at_a_time
from tfparallel.step.built_optimizer import wrapped_by

__all__ = ["PlacedOptimizer", "place_updates"]


class PlacedOptimizer:
    """Extends any optimizer."""

    def apply(self, grads, trainable_variables=None):
        """Applies gradients, each on its device."""
        with _following_inputs():
            return super().apply(grads, trainable_variables)

    def _all_reduce_sum_gradients(self, grads_and_vars):
        # No replicas are there to sum over, and Keras's sum would have each update wait for all
        # gradients. In the order in which the backward pass finds them: last layer first.
        return [pair for pair in grads_and_vars[::-1] if pair[0] is not None]

    def update_step(self, gradient, variable, learning_rate):
        """Updates one variable, constants and all, on its device."""
        held = variable.value if isinstance(variable, keras.Variable) else variable
        with (
            tf.device(held.device),
            noting("update", held.name, held.device),
            one_large_update_at_a_time(gradient, held),
        ):
            return super().update_step(gradient, variable, learning_rate)


def place_updates(optimizer: keras.Optimizer) -> None:
    """Makes an optimizer update each variable on its device, in place."""
    extend(optimizer, PlacedOptimizer)
    for wrapped in wrapped_by(optimizer):
        place_updates(wrapped)


@contextlib.contextmanager
def _following_inputs() -> Iterator[None]:
    if tf.executing_eagerly():
        yield
        return
    with tf.compat.v1.device(_device_of_inputs):
        yield


def _device_of_inputs(op: tf.Operation) -> str:
    if op.device:
        return op.device
    for tensor in op.inputs:
        device = device_of(tensor.op) or device_outside(tensor)
        if device:
            return device
    return ""
