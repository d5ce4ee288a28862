"""What TensorFlow's allocators have counted on each device, and what a GPU is."""

import os
from collections.abc import Sequence

from tfparallel import cuda_driver, startup
from tfparallel.device_names import canonical

tf = startup.import_tensorflow()

__all__ = ["memory_bytes", "peak_bytes_of_gpus", "peak_tensor_bytes"]


def peak_tensor_bytes(device: str = "CPU:0") -> int | None:
    """Returns the most that tensors on a device of this process have taken so far.

    TensorFlow's own allocator counts, and keeps what is freed: a process's resident size is more,
    and tells less. On a CPU it is there where oneDNN is, for tensors of 256 KiB and more; the
    logical devices of a CPU have one together.

    Args:
        device: Its name.

    Returns:
        Bytes, or None where nothing counts them.

    Example:
        >>> model.fit(x, y)
        >>> peak = tfparallel.devices.peak_tensor_bytes("GPU:0")
    """
    try:
        return tf.config.experimental.get_memory_info(device)["peak"]
    except ValueError:
        return None


def peak_bytes_of_gpus(devices: Sequence[str]) -> dict[str, int]:
    """Returns the most that tensors have taken on each GPU of this process among devices.

    Another process's are known to that process alone.

    Args:
        devices: Their names.

    Returns:
        Bytes by name, as given.
    """
    peaks = {device: peak_tensor_bytes(gpu) for device, gpu in _own_gpus(devices)}
    return {device: peak for device, peak in peaks.items() if peak is not None}


def memory_bytes(device: str = "CPU:0") -> int | None:
    """Returns how much memory a device of this process has.

    Args:
        device: Its name, with or without a job and a task. The CPU's devices have the host's memory
            together.

    Returns:
        Bytes; of a part of a GPU its limit; or None where nothing tells.
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
    """Pairs the name of a GPU of this process with the one that its allocator has."""
    for device in devices:
        # Names with a job are process 0's, which alone holds the devices of others.
        process, _, name = canonical(device).rpartition("/device:")
        if name.startswith("GPU") and (not process or process.endswith("/task:0")):
            yield device, name
