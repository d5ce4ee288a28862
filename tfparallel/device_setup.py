"""Splits the CPU or a GPU into logical devices, before TensorFlow's runtime starts."""

import numbers

from tfparallel import cuda_driver, startup
from tfparallel.device_listing import (
    how_to_get_more,
    list_devices,
    num_logical,
    physical_devices,
)
from tfparallel.device_names import canonical
from tfparallel.texts import counted

tf = startup.import_tensorflow()

# TensorFlow and CUDA need some memory besides that of the logical devices.
_USABLE_GPU_MEMORY = 0.9


def split_cpu(num_devices: int) -> list[str]:
    """Splits the CPU into logical devices, to try parallel training without GPUs.

    They share the cores and the memory of the machine: the results are those
    of as many real devices, but not the speed. A second call with the same
    number does nothing.

    Args:
        num_devices: The number of logical CPU devices.

    Returns:
        The names `["CPU:0", …]`.

    Raises:
        ValueError: If `num_devices` is not a whole number of at least 1.
        RuntimeError: If TensorFlow's runtime has started with another number.

    Example:
        >>> tfparallel.devices.split_cpu(4)
        ['CPU:0', 'CPU:1', 'CPU:2', 'CPU:3']
    """
    check_count(num_devices)
    (cpu,) = physical_devices("CPU")
    _split(cpu, num_devices, memory_limit_mib=None, call=f"split_cpu({num_devices})")
    return list_devices("CPU")


def split_gpu(
    num_devices: int, memory_limit_mib: int | None = None, gpu: str = "GPU:0"
) -> list[str]:
    """Splits one GPU into logical devices, each with its own share of the memory.

    A second call with the same numbers does nothing. If several GPUs are
    split, the logical devices are numbered consecutively: GPU:0 and GPU:1 are
    the halves of the first.

    Args:
        num_devices: The number of logical devices.
        memory_limit_mib: The memory of each, in MiB; by default an equal share
            of 90% of the GPU's memory, since TensorFlow needs some besides.
        gpu: The GPU, by its name before any was split.

    Returns:
        The names of all logical GPU devices.

    Raises:
        ValueError: If a number is not a whole number of at least 1, or there is
            no such GPU.
        RuntimeError: If TensorFlow's runtime has started with other numbers, or
            the memory of the GPU is unknown.

    Example:
        >>> tfparallel.devices.split_gpu(2)  # doctest: +SKIP
        ['GPU:0', 'GPU:1']
    """
    check_count(num_devices)
    if memory_limit_mib is not None:
        check_count(memory_limit_mib, argument="memory_limit_mib")
    gpus = physical_devices("GPU")
    names = [f"GPU:{index}" for index in range(len(gpus))]
    if canonical(gpu) not in names:
        fix = f"Pick one of {', '.join(names)}." if names else how_to_get_more(["GPU:0"])
        raise ValueError(
            f"Cannot split {canonical(gpu)}: TensorFlow sees {counted(len(gpus), 'GPU')}. "
            f"Received: gpu={gpu!r}, num_devices={num_devices}. {fix}"
        )
    index = names.index(canonical(gpu))
    if memory_limit_mib is None:
        total_mib = cuda_driver.memory_mib(index)
        if total_mib is None:
            raise RuntimeError(_memory_unknown(index))
        memory_limit_mib = int(total_mib * _USABLE_GPU_MEMORY) // num_devices
    call = f"split_gpu({num_devices}, memory_limit_mib={memory_limit_mib}, gpu={gpu!r})"
    _split(gpus[index], num_devices, memory_limit_mib, call)
    return list_devices("GPU")


def set_memory_growth(enabled: bool = True) -> list[str]:
    """Lets TensorFlow allocate GPU memory as needed, instead of all of it at once.

    On a machine without a GPU it does nothing, so a program may call it
    anywhere. A second call with the same value does nothing.

    Args:
        enabled: Whether memory grows.

    Returns:
        The names of the GPUs.

    Raises:
        RuntimeError: If TensorFlow's runtime has started with the other setting.
        ValueError: If a GPU was split: its logical devices have fixed memory.

    Example:
        >>> tfparallel.devices.set_memory_growth()  # doctest: +SKIP
        ['GPU:0', 'GPU:1']
    """
    gpus = physical_devices("GPU")
    call = f"set_memory_growth({enabled})"
    for index, physical in enumerate(gpus):
        # An unset GPU reports None or False.
        if bool(tf.config.experimental.get_memory_growth(physical)) == enabled:
            continue
        if tf.config.get_logical_device_configuration(physical) is not None and enabled:
            raise ValueError(
                f"GPU:{index} was split into {counted(num_logical(physical), 'logical device')} of "
                f"fixed memory; memory growth needs the whole GPU. Received: {call}. Remove one of "
                "the two calls."
            )
        try:
            tf.config.experimental.set_memory_growth(physical, enabled)
        except RuntimeError as error:
            raise RuntimeError(too_late(f"set memory growth on GPU:{index}", call)) from error
    return list_devices("GPU")


def _split(physical, num_devices, memory_limit_mib, call):
    requested = [
        tf.config.LogicalDeviceConfiguration(memory_limit=memory_limit_mib)
        for _ in range(num_devices)
    ]
    present = tf.config.get_logical_device_configuration(physical)
    if present == requested or (present is None and num_devices == 1 and memory_limit_mib is None):
        return
    try:
        tf.config.set_logical_device_configuration(physical, requested)
    except RuntimeError as error:
        # The only public sign that the runtime has started.
        kind = physical.device_type
        what = (
            f"split the {kind} into {counted(num_devices, 'device')}: it has "
            f"{counted(num_logical(physical), 'device')}"
        )
        raise RuntimeError(too_late(what, call)) from error


def too_late(what: str, call: str) -> str:
    """The error message of a call after the runtime has started."""
    return (
        f"Cannot {what}, because TensorFlow's runtime has already started; devices must be set up "
        "before the first tensor, layer, or data set is created. Received: "
        f"tfparallel.devices.{call}. Move this call to the top of the program, directly below the "
        "imports. In a notebook, restart the kernel (Colab: Runtime > Restart session) and run "
        "this call in the first cell."
    )


def check_count(value: object, argument: str = "num_devices") -> None:
    """Raises unless a value is a whole number of at least 1, and not a boolean."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(
            f"{argument} must be a whole number of at least 1. Received: {argument}={value!r}."
        )


def _memory_unknown(index):
    return (
        f"Cannot read how much memory GPU:{index} has; its logical devices need a limit. "
        "Received: memory_limit_mib=None. Pass it, in MiB: "
        "`tfparallel.devices.split_gpu(2, memory_limit_mib=4096)`."
    )
