"""Determines which operations XLA may compile as part of a program."""

import functools
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfparallel.devices import list_devices, resolve
from tfparallel.seams.tensorflow import registered_kernels
from tfparallel.tracing.graphs import called_by, calls_unknown, with_inner

CALLS = ("PartitionedCall", "StatefulPartitionedCall")
BRANCHES = ("If", "StatelessIf")

# XLA would drop these.
CHECKS = {"Assert", "CheckNumerics", "CheckNumericsV2"}
# XLA drops these, cannot return their results, or cannot handle their dynamic sizes.
_NEVER = CHECKS | {
    "NoOp",
    "OptionalFromValue",
    "Placeholder",
    "Print",
    "PrintV2",
    "Timestamp",
    "Unique",
    "UniqueV2",
    "Where",
}
_OF_GROUPS = ("Collective", "Nccl")


def is_compilable(operation: tf.Operation) -> bool:
    """Whether XLA can compile an operation, with everything it calls, on one device."""
    if operation.type in _NEVER or operation.type.startswith(_OF_GROUPS):
        return False
    if operation.type not in CALLS and not _has_kernel(operation):
        return False
    if calls_unknown(operation):
        return False
    called = _operations(called_by(operation))
    return all(_is_compilable_within(each, operation) for each in called)


def holds_loop(operation: tf.Operation) -> bool:
    """Whether the operation is a loop or calls one."""
    return any(each.type in ("While", "StatelessWhile") for each in with_inner([operation]))


def has_list_of_any_size(operation: tf.Operation) -> bool:
    """Whether the operation creates a list of dynamic size, or calls a function that does."""
    if operation.type in ("EmptyTensorList", "TensorListReserve"):
        return operation.inputs[1].op.type != "Const"
    return operation.type in CALLS and any(
        map(has_list_of_any_size, _operations(called_by(operation)))
    )


def _operations(graphs) -> Iterator[tf.Operation]:
    for graph in graphs:
        yield from graph.get_operations()


def _is_compilable_within(inner, outer) -> bool:
    if inner.type in ("Placeholder", "NoOp"):
        return True
    devices = {_name_of(each.device) for each in (inner, outer) if each.device}
    return len(devices) < 2 and is_compilable(inner)


def ranks_of(devices: Sequence[str]) -> Callable[[str], int | None]:
    """Returns a function from a device name to its rank in `devices`, which may be short names."""
    ranks = {resolve(device): rank for rank, device in enumerate(devices)}

    def rank(device):
        name = _name_of(device) or ""
        return ranks.get(name, ranks.get(name.rpartition("device:")[2]))

    return rank


def _name_of(device: str) -> str | None:
    """Returns the canonical name of a device; None if it names no specific device."""
    try:
        return resolve(device)
    except ValueError:
        return None


def _has_kernel(operation) -> bool:
    return any(
        all(_allows(constraint, operation) for constraint in kernel.constraint)
        for kernel in _kernels_of(operation.type)
    )


@functools.cache
def _kernels_of(kind: str) -> list:
    _have_kernels_registered()
    device = "XLA_GPU_JIT" if list_devices("GPU") else "XLA_CPU_JIT"
    return [each for each in registered_kernels(kind) if each.device_type == device]


@functools.cache
def _have_kernels_registered() -> None:
    # TensorFlow registers the XLA kernels at the first compilation.
    with tf.init_scope():
        tf.function(lambda x: x + 1, jit_compile=True, autograph=False)(tf.constant(1.0))


def _allows(constraint, operation) -> bool:
    allowed, value = constraint.allowed_values.list.type, operation.node_def.attr[constraint.name]
    types = value.list.type if value.HasField("list") else [value.type]
    return not allowed or all(each in allowed for each in types)


def is_draw(operation: tf.Operation) -> bool:
    """Whether the operation draws random numbers, rather than only deriving a key from a seed."""
    return "Random" in operation.type and "KeyCounter" not in operation.type


def refuse_draw(operation: tf.Operation, within) -> None:
    """Rejects random draws that XLA compiles on one device, but would not compile here.

    Args:
        operation: An operation outside of all programs.
        within: The operation and everything it calls.

    Raises:
        ValueError: If one of these draws random numbers.
    """
    for each in within:
        if is_draw(each):
            raise ValueError(
                "A layer draws random numbers in a place that XLA compiles on one device, but not "
                "on several, where it would draw different ones. Draws that XLA can compile in "
                f"full, or `jit_compile=False`, are required. Received: '{each.name}' in "
                f"'{operation.name}', and `jit_compile=True`. Draw in the layer's `call`, with a "
                "`keras.random.SeedGenerator`, or compile with `jit_compile=False`."
            )
