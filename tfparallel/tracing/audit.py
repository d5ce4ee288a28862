"""Records the layer and the device of each operation while a step is traced.

A layer's forward operations are those that its call adds to the graph. Gradient operations name
their forward operation as their colocation. Operations of an update are recorded like forward ones.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from tfparallel import devices as device_lib
from tfparallel.compute_context import context, within

# Arguments of the graph, and reads, which run on the device of the variable.
_WITHOUT_DEVICE = {"Placeholder", "NoOp", "ReadVariableOp"}


@dataclasses.dataclass(frozen=True)
class Noted:
    """An operation that belongs to a layer or to a variable's update.

    Attributes:
        kind: "forward", "backward" or "update".
        owner: The layer's name, or the variable's.
        operation: Its type and its name.
        expected: The device where it should be, such as "CPU:1".
        actual: The device where it is; "" for the default device.
    """

    kind: str
    owner: str
    operation: str
    expected: str
    actual: str


class Trace:
    """The record of one trace."""

    def __init__(self):
        self._owners: dict[tf.Graph, dict[str, tuple[str, str, str]]] = {}

    def note(self, kind: str, owner: str, device: str, operations) -> None:
        """Records new operations; the innermost layer that names them is their owner."""
        for op in operations:
            self._owners.setdefault(op.graph, {}).setdefault(op.name, (kind, owner, device))

    def owner(self, op: tf.Operation) -> str | None:
        """Returns the name of the layer that created an operation, or None."""
        entry = self._owners.get(op.graph, {}).get(op.name)
        return entry[1] if entry is not None else None

    def operations(self) -> list[Noted]:
        """Returns every operation that has an owner, including those of gradients."""
        operations = []
        for graph, owners in self._owners.items():
            for op in graph.get_operations():
                if op.type in _WITHOUT_DEVICE:
                    continue
                entry = owners.get(op.name)
                if entry is None:
                    forward = [owners[name] for name in _colocated(op) if name in owners]
                    if not forward:
                        continue
                    entry = ("backward", *forward[0][1:])
                kind, owner, device = entry
                where = short(device_of(op))
                operations.append(Noted(kind, owner, f"{op.type} {op.name}", short(device), where))
        return operations


@contextlib.contextmanager
def recording() -> Iterator[Trace]:
    """Records the traces of this thread."""
    trace = Trace()
    with within(trace=trace):
        yield trace


@contextlib.contextmanager
def noting(kind: str, owner: str, device: str) -> Iterator[None]:
    """Records the operations of the block, if a trace is recorded."""
    trace = context().trace
    if trace is None or tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    number = len(graph.get_operations())
    yield
    trace.note(kind, owner, device, graph.get_operations()[number:])


def device_of(op: tf.Operation) -> str:
    """The device of an operation: its own, or that of an input or colocated operation."""
    if op.device:
        return op.device
    for tensor in [*op.inputs, *op.outputs]:
        if tensor.dtype == tf.resource and (device := device_outside(tensor)):
            return device
    for name in _colocated(op):
        if name != op.name:
            return device_of(op.graph.get_operation_by_name(name))
    return ""


def device_outside(tensor: tf.Tensor) -> str:
    """The device of a captured variable, or of a captured tensor of the outer graph."""
    for outer, inner in getattr(tensor.graph, "captures", ()):
        if inner is tensor:
            return getattr(outer, "device", "")
    return ""


def _colocated(op) -> list[str]:
    return [group.decode().removeprefix("loc:@") for group in op.colocation_groups()]


def short(device: str) -> str:
    """The canonical name of a device; "" for none."""
    return device_lib.resolve(device) if device else ""
