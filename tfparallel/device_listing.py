"""Lists the logical devices of this process and of connected processes."""

import os
import re
from collections.abc import Sequence

from tfparallel import startup
from tfparallel.device_names import canonical

tf = startup.import_tensorflow()

if not startup.has_nvidia_gpu():
    # The first search for GPUs logs an error if there is none; search now,
    # with the log suppressed. On a machine with a GPU, the search waits until
    # it is needed, since CUDA_VISIBLE_DEVICES may still change.
    with startup.quiet_stderr():
        tf.config.list_physical_devices()

_connected: list[str] = []  # The devices of all processes, after `connect`.


def list_devices(device_type: str | None = None) -> list[str]:
    """Lists the logical devices, without starting TensorFlow's runtime.

    `tf.config.list_logical_devices` starts the runtime, after which devices
    cannot be split any more; you may call this function at any time.

    Args:
        device_type: `"CPU"` or `"GPU"` for only one type; by default all.

    Returns:
        Names such as `["CPU:0", "GPU:0"]`, by type and index; after
        `tfparallel.connect_to_cluster`, the names for all its processes, such as
        `["/job:worker/task:0/device:CPU:0", ...]`.

    Raises:
        ValueError: For another type.

    Example:
        >>> tfparallel.devices.list_devices("CPU")
        ['CPU:0', 'CPU:1', 'CPU:2', 'CPU:3']
    """
    if device_type is not None and str(device_type).upper() not in ("CPU", "GPU"):
        raise ValueError(
            "Unknown device type; it must be CPU or GPU, or None for both. Received: "
            f"device_type={device_type!r}. tfparallel supports no others."
        )
    if _connected:
        kind = f"/device:{device_type.upper()}:" if device_type is not None else ""
        return [name for name in _connected if kind in name]
    names = []
    for kind in ("CPU", "GPU"):
        if device_type is not None and device_type.upper() != kind:
            continue
        number = sum(map(num_logical, physical_devices(kind)))
        names.extend(f"{kind}:{index}" for index in range(number))
    return names


def resolve(name: str) -> str:
    """Converts a device name to its canonical form, without checking that it exists.

    Args:
        name: A device name in any form that `canonical` takes.

    Returns:
        The result of `canonical`; after `connect`, the full name even for a device of this process.

    Raises:
        ValueError: If `name` is not a device name.

    Example:
        >>> tfparallel.devices.resolve("/device:CPU:1")
        'CPU:1'
    """
    name = canonical(name)
    if _connected and not name.startswith("/"):
        return f"{_connected[0].partition('/device:')[0]}/device:{name}"
    return name


def reached_devices() -> set[str]:
    """The names of all devices that TensorFlow reaches in any process; starts its runtime."""
    return {canonical(device.name) for device in tf.config.list_logical_devices()}


def connect(addresses: Sequence[str]) -> list[str]:
    """Connects to the devices of other processes; this process is the first.

    Args:
        addresses: `"host:port"` of each process. All others run a `tf.distribute.Server`.

    Returns:
        The names of all devices, those of the first process first.

    Example:
        >>> tfparallel.devices.connect(["localhost:2222", "localhost:2223"])  # doctest: +SKIP
        ['/job:worker/task:0/device:CPU:0', '/job:worker/task:1/device:CPU:0']
    """
    cluster = tf.train.ClusterSpec({"worker": list(addresses)})
    tf.config.experimental_connect_to_cluster(cluster, job_name="worker", task_index=0)
    names = reached_devices()
    _connected[:] = sorted(names, key=lambda name: [int(n) for n in re.findall(r":(\d+)", name)])
    return list(_connected)


def physical_devices(kind: str) -> list[tf.config.PhysicalDevice]:
    """The devices of a type, except those that `tf.config.set_visible_devices` hides."""
    return tf.config.get_visible_devices(kind)


def num_logical(physical: tf.config.PhysicalDevice) -> int:
    """The number of logical devices of a physical one."""
    configuration = tf.config.get_logical_device_configuration(physical)
    return 1 if configuration is None else len(configuration)


def how_to_get_more(devices: Sequence[str]) -> str:
    """A hint on how to create the missing ones of these devices."""
    hints = []
    num_cpus = 1 + max((int(name[4:]) for name in devices if name.startswith("CPU:")), default=-1)
    if num_cpus > len(list_devices("CPU")):
        hints.append(f"To get more CPU devices: `tfparallel.devices.split_cpu({num_cpus})`.")
    num_gpus = 1 + max((int(name[4:]) for name in devices if name.startswith("GPU:")), default=-1)
    gpus = list_devices("GPU")
    if num_gpus > len(gpus):
        if gpus:
            hints.append(
                f"To get more GPU devices: `tfparallel.devices.split_gpu({num_gpus})`."
            )
        else:
            hints.append(why_no_gpu())
            hints.append("To try without a GPU: `tfparallel.devices.split_cpu(4)`.")
    return " ".join(hint for hint in hints if hint)


def why_no_gpu() -> str:
    """Why TensorFlow does not see the system's GPU; empty if it does, or there is none."""
    if not startup.has_nvidia_gpu() or tf.config.list_physical_devices("GPU"):
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"TensorFlow sees no GPU: CUDA_VISIBLE_DEVICES={visible!r} may hide it."
    return (
        "This machine has an NVIDIA GPU that TensorFlow cannot use, usually because the CUDA "
        "libraries are missing: `pip install 'tensorflow[and-cuda]'`."
    )
