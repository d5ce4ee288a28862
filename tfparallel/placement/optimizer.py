"""Updates on the devices of what they update.

Keras updates all variables in one go, in whatever device scope it is called. Here each operation
of an update goes to the device of its first input: the gradient, the variable or its slot. So
clipping, decay, averages and accumulation follow too, whose loops over variables are Keras's own.
"""

import contextlib
import weakref
from collections.abc import Iterator

import keras
import tensorflow as tf

from tfparallel.extend import extend
from tfparallel.placement.audit import device_of, device_outside, noting

__all__ = ["place_updates"]

_LARGE = 2**18  # Elements: 1 MiB in float32.
# By the graph that is traced: the last update of each device.
_last_updates: "weakref.WeakKeyDictionary[tf.Graph, dict]" = weakref.WeakKeyDictionary()


class PlacedOptimizer:
    """Extends any optimizer."""

    def apply(self, grads, trainable_variables=None):
        """Applies gradients, each on its device."""
        with _following_inputs():
            return super().apply(grads, trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        """Updates one variable, constants and all, on its device."""
        held = variable.value if isinstance(variable, keras.Variable) else variable
        with (
            tf.device(held.device),
            noting("update", held.name, held.device),
            _one_large_update_at_a_time(held),
        ):
            return super().update_step(gradient, variable, learning_rate)


def place_updates(optimizer: keras.Optimizer) -> None:
    """Makes an optimizer update each variable on its device, in place."""
    extend(optimizer, PlacedOptimizer)
    inner = getattr(optimizer, "inner_optimizer", None)
    for wrapped in [inner] if inner is not None else getattr(optimizer, "optimizers", []):
        place_updates(wrapped)


@contextlib.contextmanager
def _one_large_update_at_a_time(variable: tf.Variable) -> Iterator[None]:
    """Has the update of a large variable wait for that of the last one on its device.

    Keras's Adam makes five arrays of the variable's size on its way. TensorFlow begins the updates
    of all variables before it ends any, so these arrays would be there for all of them at once:
    more than weights, gradients and slots together.
    """
    if tf.executing_eagerly() or variable.shape.num_elements() < _LARGE:
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    last_updates = _last_updates.setdefault(graph, {})
    with tf.control_dependencies([last_updates.get(variable.device, tf.no_op())]):
        yield
        last_updates[variable.device] = tf.group(*_writes(graph, variable))


def _writes(graph, variable) -> list[tf.Operation]:
    """The operations so far that write a variable."""
    handle = graph.capture(variable.handle)
    return [op for op in handle.consumers() if op.type.startswith("Assign")]


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
