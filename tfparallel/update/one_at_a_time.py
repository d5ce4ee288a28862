"""Orders large updates: one at a time per device, each gradient computed when its turn comes.

```
   backward     ∂y₃ ───────► ∂y₂ ───────► ∂y₁            of the layers' outputs
                 │            │            │
   gradients     ∂W₃      ┌─► ∂W₂      ┌─► ∂W₁           each as large as its weight
                 │        │   │        │   │
   updates       W₃ ──────┘   W₂ ──────┘   W₁
```

TensorFlow starts every operation that can start. All gradients would exist at once, and with Adam
also the five temporary arrays, each as large as its weight, of every update: more than weights and
slots together. In this order, a device holds the arrays of one update besides weights and slots.

Relies on `tf.Operation._add_control_inputs`: a gradient is created before its update, so it cannot
wait for another update from the start.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator

import tensorflow as tf

from tfparallel.seams.tensorflow import add_control_inputs

LARGE = 2**18  # Elements: 1 MiB in float32.


@dataclasses.dataclass
class _Updates:
    """The large updates of one device so far.

    Attributes:
        last: Ends with the last of these updates.
        before: All operations that `last` depends on.
    """

    last: tf.Operation | None = None
    before: set[tf.Operation] = dataclasses.field(default_factory=set)


# By traced graph, then by device.
_updates: "weakref.WeakKeyDictionary[tf.Graph, dict]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def one_large_update_at_a_time(gradient: tf.Tensor, variable: tf.Variable) -> Iterator[None]:
    """Makes a large variable's update, and its gradient, wait for the device's last update."""
    if tf.executing_eagerly() or variable.shape.num_elements() < LARGE:
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    updates = _updates.setdefault(graph, {}).setdefault(variable.device, _Updates())
    if updates.last is None:
        yield
    else:
        # Not if the last update needs this gradient, as with shared weights.
        if isinstance(gradient, tf.Tensor) and gradient.graph is graph:
            if gradient.op not in updates.before:
                add_control_inputs(gradient.op, [updates.last])
        with tf.control_dependencies([updates.last]):
            yield
    updates.last = tf.group(*_writes(graph, variable))
    _add_ancestors(updates.last, updates.before)
    if isinstance(gradient, tf.Tensor):
        _add_ancestors(gradient.op, updates.before)  # A slot is read after it is written.


def _writes(graph, variable) -> list[tf.Operation]:
    """The operations so far that write a variable."""
    handle = graph.capture(variable.handle)
    return [op for op in handle.consumers() if op.type.startswith("Assign")]


def _add_ancestors(op: tf.Operation, ancestors: set[tf.Operation]) -> None:
    waiting = [op]
    while waiting:
        op = waiting.pop()
        if op not in ancestors:
            ancestors.add(op)
            waiting += [tensor.op for tensor in op.inputs]
            waiting += op.control_inputs
