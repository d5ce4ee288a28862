"""The order of large updates: one at a time on a device, each gradient made when its turn comes.

```
   backward     ∂y₃ ───────► ∂y₂ ───────► ∂y₁            of the layers' outputs
                 │            │            │
   gradients     ∂W₃      ┌─► ∂W₂      ┌─► ∂W₁           each as large as its weight
                 │        │   │        │   │
   updates       W₃ ──────┘   W₂ ──────┘   W₁
```

TensorFlow begins all that can begin. Left to it, all gradients are there at once, and with Adam the
five arrays of a weight's size that each update makes on its way: more than weights and slots
together. In this order a device holds, beside weights and slots, the arrays of one update.

Rests on `tf.Operation._add_control_inputs`: a gradient is made before its update is, so it cannot
be told to wait for another update when it is made.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator

import tensorflow as tf

from tfparallel.seams.tensorflow import add_control_inputs

__all__ = ["LARGE", "one_large_update_at_a_time"]

LARGE = 2**18  # Elements: 1 MiB in float32.


@dataclasses.dataclass
class _Updates:
    """The large updates of one device so far.

    Attributes:
        last: Ends when the last of them has ended.
        before: All operations that must have run for it.
    """

    last: tf.Operation | None = None
    before: set[tf.Operation] = dataclasses.field(default_factory=set)


# By the graph that is traced, then by device.
_updates: "weakref.WeakKeyDictionary[tf.Graph, dict]" = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def one_large_update_at_a_time(gradient: tf.Tensor, variable: tf.Variable) -> Iterator[None]:
    """Has the update of a large variable, and its gradient, wait for the last one on its device."""
    if tf.executing_eagerly() or variable.shape.num_elements() < LARGE:
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    updates = _updates.setdefault(graph, {}).setdefault(variable.device, _Updates())
    if updates.last is None:
        yield
    else:
        # Not where the last update needs this gradient, as it may where weights are shared.
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


def _add_ancestors(op: tf.Operation, found: set[tf.Operation]) -> None:
    waiting = [op]
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [tensor.op for tensor in op.inputs]
            waiting += op.control_inputs
