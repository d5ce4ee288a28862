"""All-reduce between the devices of one process, by name.

Rests on `tensorflow.python.distribute`: a `tf.distribute.CrossDeviceOps` takes and returns
distributed values, which only `distribute_utils.regroup` makes; and TensorFlow's collective ring,
which its strategies take for themselves, has no public name.
"""

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.distribute import (
    collective_util,
    cross_device_ops,
    cross_device_utils,
    distribute_utils,
    values,
)

from tfparallel import devices as device_lib

# One for the process: two that count alike would give two collectives one key.
_keys = cross_device_utils.CollectiveKeys(group_key_start=2**21)


def _tf_ring(devices):
    return cross_device_ops.CollectiveAllReduce(
        [f"/device:{device}" for device in devices],
        len(devices),
        collective_util.Options(),
        _keys,
    )


_TENSORFLOW = {
    "tf_reduce_to_one": (
        lambda devices: tf.distribute.ReductionToOneDevice(),
        "tf.distribute.ReductionToOneDevice",
    ),
    "tf_hierarchical_copy": (
        lambda devices: tf.distribute.HierarchicalCopyAllReduce(),
        "tf.distribute.HierarchicalCopyAllReduce",
    ),
    "tf_ring": (_tf_ring, "TensorFlow CollectiveReduceV2 (RING)"),
    "nccl": (lambda devices: tf.distribute.NcclAllReduce(), "tf.distribute.NcclAllReduce"),
}
NAMES = tuple(_TENSORFLOW)


def refusals(devices: Sequence[str]) -> dict[str, str]:
    """Returns the algorithms that cannot run on these devices, and why."""
    refused = {}
    if not all(device_lib.canonical(device).startswith("GPU") for device in devices):
        found = len(device_lib.list_devices("GPU"))
        refused["nccl"] = f"NCCL joins GPUs, and TensorFlow lists {found or 'none'} here"
    return refused


def runnable(devices: Sequence[str]) -> list[str]:
    """Returns the algorithms that can run on these devices."""
    refused = refusals(devices)
    return [name for name in NAMES if name not in refused]


def make(name: str, devices: Sequence[str]) -> tf.distribute.CrossDeviceOps:
    """Makes an algorithm for these devices.

    Raises:
        ValueError: If there is none of that name, or it cannot run on these devices.
    """
    if name not in runnable(devices):
        raise ValueError(unknown([name], runnable(devices), refusals(devices)))
    return _TENSORFLOW[name][0](list(devices))


def implementation(name: str) -> str:
    """Returns what truly runs under a name, for tables."""
    return _TENSORFLOW[name][1]


def unknown(
    names: Sequence[str], runnable_names: Sequence[str], refused: dict[str, str]
) -> str:
    """Returns the text of an error: these cannot run, those can, and why the others cannot."""
    reasons = "".join(f" {name} cannot: {why}." for name, why in refused.items())
    return (
        "No such all-reduce algorithm, or none that can run here. Required is one of "
        f"{', '.join(runnable_names)}.{reasons} Received: {', '.join(names)}."
    )


def all_reduce(
    ops: tf.distribute.CrossDeviceOps, tensors: Sequence[Sequence[tf.Tensor]]
) -> list[list[tf.Tensor]]:
    """Sums each tensor over the devices.

    Args:
        ops: The algorithm.
        tensors: For each tensor, one term for each device, of one shape and type.

    Returns:
        For each tensor, the sum on each device.
    """
    terms = [
        distribute_utils.regroup(tuple(of_all), wrap_class=values.PerReplica, always_wrap=True)
        for of_all in tensors
    ]
    sums = ops.batch_reduce(tf.distribute.ReduceOp.SUM, [(term, term) for term in terms])
    return [list(total.values) for total in sums]
