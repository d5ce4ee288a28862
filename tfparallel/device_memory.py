"""The memory of each device, and its peak use as counted by TensorFlow's allocators."""

import os
from collections.abc import Sequence

from tfparallel import cuda_driver, startup
from tfparallel.device_names import canonical

tf = startup.import_tensorflow()


def peak_tensor_bytes(device: str = "CPU:0") -> int | None:
    """Returns the peak memory of tensors on a device of this process so far.

    TensorFlow's allocator counts it, and keeps freed memory, so a process's resident size is larger
    and less informative. CPUs have this allocator with oneDNN, for tensors of 256 KiB and more; the
    logical devices of a CPU share one.

    Args:
        device: The name of the device.

    Returns:
        Bytes, or None if nothing counts them.

    Example:
        >>> model.fit(x, y)
        >>> peak = tfparallel.devices.peak_tensor_bytes("GPU:0")
    """
    try:
        return tf.config.experimental.get_memory_info(device)["peak"]
    except ValueError:
        return None


def peak_bytes_of_gpus(devices: Sequence[str]) -> dict[str, int]:
    """Returns the peak memory of tensors on each of this process's GPUs among devices.

    Only a process itself knows the peaks of its GPUs.

    Args:
        devices: The names of devices.

    Returns:
        Bytes by the names passed.
    """
    peaks = {device: peak_tensor_bytes(gpu) for device, gpu in _own_gpus(devices)}
    return {device: peak for device, peak in peaks.items() if peak is not None}


def memory_bytes(device: str = "CPU:0") -> int | None:
    """Returns the memory of a device of this process.

    Args:
        device: The name of the device, with or without a job and a task. The CPU's devices share
            the host's memory.

    Returns:
        Bytes; for a part of a GPU, its limit; None if unknown.
    """
    kind, _, index = canonical(device).rpartition("/device:")[2].partition(":")
    if kind != "GPU":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = [
        (physical, part)
        for physical in tf.config.get_visible_devices("GPU")
        for part in tf.config.get_logical_device_configuration(physical) or [None]
    ]
    if int(index) >= len(parts):
        return None
    physical, part = parts[int(index)]
    size_mib = getattr(part, "memory_limit", None)
    if size_mib is None:
        size_mib = cuda_driver.memory_mib(int(physical.name.rpartition(":")[2]))
    return None if size_mib is None else int(size_mib) * 2**20


def _own_gpus(devices):
    """Pairs the names of this process's GPUs with those that its allocator uses."""
    for device in devices:
        # Only process 0 uses the devices of others, so names with a job belong to it.
        process, _, name = canonical(device).rpartition("/device:")
        if name.startswith("GPU") and (not process or process.endswith("/task:0")):
            yield device, name
