"""Which operation belongs to which layer, noted while a step is traced, and where it stands.

Forward operations are those that the graph has more of after a layer's call; those of the gradient
name, as colocation, the forward operation that they belong to; those of the update are noted as the
forward ones.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from tfparallel import devices as device_lib
from tfparallel.compute_context import context, within

__all__ = ["Noted", "Trace", "device_of", "device_outside", "noting", "recording", "short"]

# Arguments of the graph, and reads, which are where the variable is.
_WITHOUT_DEVICE = {"Placeholder", "NoOp", "ReadVariableOp"}


@dataclasses.dataclass(frozen=True)
class Noted:
    """An operation that belongs to a layer or to a variable's update.

    Attributes:
        kind: "forward", "backward" or "update".
        owner: The layer's name, or the variable's.
        operation: Its type and its name.
        expected: The device where it should be, such as "CPU:1".
        found: Where it is; "" for the default device.
    """

    kind: str
    owner: str
    operation: str
    expected: str
    found: str


class Trace:
    """What one trace notes."""

    def __init__(self):
        self._owners: dict[tf.Graph, dict[str, tuple[str, str, str]]] = {}

    def note(self, kind: str, owner: str, device: str, operations) -> None:
        """Keeps new operations; the innermost layer to name them is their owner."""
        for op in operations:
            self._owners.setdefault(op.graph, {}).setdefault(op.name, (kind, owner, device))

    def owner(self, op: tf.Operation) -> str | None:
        """Returns the name of the layer that made an operation, or None."""
        own = self._owners.get(op.graph, {}).get(op.name)
        return own[1] if own is not None else None

    def operations(self) -> list[Noted]:
        """Returns every operation that belongs to somebody, those of the gradients included."""
        found = []
        for graph, owners in self._owners.items():
            for op in graph.get_operations():
                if op.type in _WITHOUT_DEVICE:
                    continue
                own = owners.get(op.name)
                if own is None:
                    forward = [owners[name] for name in _colocated(op) if name in owners]
                    if not forward:
                        continue
                    own = ("backward", *forward[0][1:])
                kind, owner, device = own
                where = short(device_of(op))
                found.append(Noted(kind, owner, f"{op.type} {op.name}", short(device), where))
        return found


@contextlib.contextmanager
def recording() -> Iterator[Trace]:
    """Has what is traced in this thread be noted."""
    trace = Trace()
    with within(trace=trace):
        yield trace


@contextlib.contextmanager
def noting(kind: str, owner: str, device: str) -> Iterator[None]:
    """Notes, while a trace is recorded, the operations that the block makes."""
    trace = context().trace
    if trace is None or tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    number = len(graph.get_operations())
    yield
    trace.note(kind, owner, device, graph.get_operations()[number:])


def device_of(op: tf.Operation) -> str:
    """The device of an operation: asked for, or that of what it reads or is colocated with."""
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
    """The device of what a graph captured: a variable, or a tensor of the graph around it."""
    for outer, inner in getattr(tensor.graph, "captures", ()):
        if inner is tensor:
            return getattr(outer, "device", "")
    return ""


def _colocated(op) -> list[str]:
    return [group.decode().removeprefix("loc:@") for group in op.colocation_groups()]


def short(device: str) -> str:
    """The device's one spelling; "" for none."""
    return device_lib.resolve(device) if device else ""
