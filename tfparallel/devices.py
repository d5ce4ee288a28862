"""Logical devices: list them, check names against them, split the CPU or a GPU.

A device is named `"CPU:0"` or `"GPU:1"`. If a device does not exist, TensorFlow
silently places the operation on the CPU; the functions here raise instead.
`device_listing.py` lists devices, also those of other processes;
`device_setup.py` splits the CPU and GPUs.

```python
import tfparallel

tfparallel.devices.split_cpu(4)          # first, before any model or tensor
tfparallel.devices.list_devices()        # ['CPU:0', 'CPU:1', 'CPU:2', 'CPU:3']
tfparallel.devices.check_devices(["/device:CPU:1"])  # ['CPU:1']
```
"""

import warnings
from collections.abc import Sequence

from tfparallel import startup
from tfparallel.device_listing import (
    connect,
    how_to_get_more,
    list_devices,
    num_logical,
    physical_devices,
    resolve,
    why_no_gpu,
)
from tfparallel.device_memory import peak_tensor_bytes
from tfparallel.device_names import canonical, to_tensorflow_name
from tfparallel.device_setup import (
    check_count,
    set_memory_growth,
    split_cpu,
    split_gpu,
    too_late,
)
from tfparallel.texts import counted

tf = startup.import_tensorflow()

__all__ = [
    "canonical",
    "check_devices",
    "choose_devices",
    "connect",
    "hide_gpus",
    "hide_other_gpus",
    "list_devices",
    "peak_tensor_bytes",
    "resolve",
    "set_memory_growth",
    "split_cpu",
    "split_gpu",
    "to_tensorflow_name",
    "whole_gpu",
]

_DEVICE_TYPES = ("auto", "cpu", "gpu")


def check_devices(names: Sequence[str] | int) -> list[str]:
    """Checks that the named devices exist.

    Args:
        names: Device names, in any form that `canonical` takes; or a number of devices, as for
            `choose_devices`.

    Returns:
        The names as `"GPU:0"`, in the order given.

    Raises:
        ValueError: If the list is empty, or a name is malformed, unknown, or
            given twice; one message reports all of them.

    Example:
        >>> tfparallel.devices.check_devices(["/device:CPU:1", "cpu:0"])
        ['CPU:1', 'CPU:0']
    """
    if isinstance(names, int):
        return choose_devices(num_devices=names)
    if isinstance(names, str):
        fix = names if names.isdecimal() else [name.strip() for name in names.split(",")]
        raise ValueError(
            "devices must be a number, or a list of names, one for each device. "
            f"Received: {names!r}. Pass {fix}."
        )
    names = list(names)
    existing = list_devices()
    problems = []
    checked = []
    if not names:
        problems.append("the list is empty")
    for name in names:
        try:
            device = resolve(name)
        except ValueError:
            fix = f"; pass 'GPU:{name}'" if str(name).isdecimal() else ""
            problems.append(f"{name!r} is not a device name such as 'GPU:0'{fix}")
            continue
        checked.append(device)
    for device in dict.fromkeys(checked):
        if device not in existing:
            fix = f"; pass '{device.replace('CUDA', 'GPU')}'" if device.startswith("CUDA") else ""
            problems.append(f"{device} does not exist{fix}")
        if checked.count(device) > 1:
            problems.append(f"{device} is listed {checked.count(device)} times")
    if problems:
        raise ValueError(
            f"Cannot use these devices: {'; '.join(problems)}. Each must be listed once and be one "
            f"of these devices: {', '.join(existing)}. Received: devices={names}. "
            f"{how_to_get_more(checked)}".rstrip()
        )
    return checked


def hide_other_gpus(names: Sequence[str]) -> None:
    """Hides all GPUs but the named ones, which are renumbered from GPU:0.

    Args:
        names: Names of GPUs, none of them split.

    Raises:
        ValueError: As `check_devices`.
        RuntimeError: If TensorFlow's runtime has started with other GPUs.

    Example:
        >>> tfparallel.devices.hide_other_gpus(["GPU:1"])  # doctest: +SKIP
    """
    gpus = physical_devices("GPU")
    visible = [gpus[int(name.partition(":")[2])] for name in check_devices(names)]
    try:
        tf.config.set_visible_devices(visible, "GPU")
    except RuntimeError as error:
        raise RuntimeError(
            too_late("hide GPUs", f"hide_other_gpus({list(names)})")
        ) from error


def hide_gpus() -> None:
    """Hides all GPUs, so operations without a device run on the CPU.

    Raises:
        RuntimeError: If TensorFlow's runtime has started with GPUs.

    Example:
        >>> tfparallel.devices.hide_gpus()
        >>> tfparallel.devices.list_devices("GPU")
        []
    """
    if physical_devices("GPU"):
        try:
            tf.config.set_visible_devices([], "GPU")
        except RuntimeError as error:
            raise RuntimeError(too_late("hide GPUs", "hide_gpus()")) from error


def whole_gpu(name: str) -> int | None:
    """Returns CUDA's number of the GPU that a device covers whole.

    Args:
        name: A device of this process.

    Returns:
        The number; None for a part of a GPU, and for a device of another type.

    Example:
        >>> tfparallel.devices.whole_gpu("CPU:0") is None
        True
    """
    kind, _, index = canonical(name).rpartition("/device:")[2].partition(":")
    if kind != "GPU":
        return None
    logical = [
        (physical.name.rpartition(":")[2], num_logical(physical) == 1)
        for physical in physical_devices("GPU")
        for _ in range(num_logical(physical))
    ]
    if int(index) >= len(logical):
        return None
    number, is_whole = logical[int(index)]
    return int(number) if is_whole else None


def choose_devices(
    num_devices: int | None = None,
    device_type: str = "auto",
    devices: Sequence[str] | int | None = None,
) -> list[str]:
    """Chooses the devices of a training run by number, type or name.

    Args:
        num_devices: How many devices; by default all of the type. If there are
            fewer CPU devices, the CPU is split, while that is still possible.
        device_type: `"cpu"`, `"gpu"`, or `"auto"`: GPUs if there are any, else
            the CPU.
        devices: Device names, instead of the other two; or a number, as `num_devices`.

    Returns:
        Canonical device names.

    Raises:
        ValueError: If the arguments contradict each other, or a device does
            not exist.
        RuntimeError: If the CPU would have to be split after TensorFlow's
            runtime has started.

    Example:
        >>> tfparallel.devices.choose_devices(2, device_type="cpu")
        ['CPU:0', 'CPU:1']
    """
    if str(device_type).lower() not in _DEVICE_TYPES:
        raise ValueError(
            f"Unknown device type; it must be one of {', '.join(_DEVICE_TYPES)}. "
            f"Received: device_type={device_type!r}."
        )
    device_type = device_type.lower()
    if isinstance(devices, int) and num_devices in (None, devices):
        num_devices, devices = devices, None
    if num_devices is not None:
        check_count(num_devices)
    if devices is not None:
        number = devices if isinstance(devices, int) else len(devices)
        if num_devices is not None and num_devices != number:
            raise ValueError(
                "devices and num_devices contradict each other; pass only one of them. Received: "
                f"num_devices={num_devices}, devices={devices}."
            )
        checked = check_devices(devices)
        others = [name for name in checked if not name.lower().startswith(device_type)]
        if others and device_type != "auto":
            raise ValueError(
                f"devices and device_type contradict each other: {', '.join(others)} is of another "
                f"type. Received: device_type={device_type!r}, devices={list(devices)}. Remove "
                "device_type; the names already include it."
            )
        return checked
    gpus = list_devices("GPU")
    if device_type == "cpu" or (device_type == "auto" and not gpus):
        if device_type == "auto" and why_no_gpu():
            warnings.warn(f"Training on the CPU. {why_no_gpu()}", stacklevel=2)
        cpus = list_devices("CPU")
        if num_devices is not None and num_devices > len(cpus):
            cpus = split_cpu(num_devices)
        return cpus[:num_devices]
    if not gpus:
        raise ValueError(
            f"No GPU can be used: TensorFlow lists none. Received: device_type={device_type!r}, "
            f"num_devices={num_devices}. To continue without one, use device type 'cpu'. "
            f"{why_no_gpu()}".rstrip()
        )
    if num_devices is not None and num_devices > len(gpus):
        raise ValueError(
            f"Cannot use {counted(num_devices, 'GPU')}: this machine has {len(gpus)} "
            f"({', '.join(gpus)}). Received: num_devices={num_devices}, "
            f"device_type={device_type!r}. Ask for at most {len(gpus)}, pass device type 'cpu' to "
            "split the CPU instead, or split a GPU: "
            f"`tfparallel.devices.split_gpu({num_devices})`, or --split_gpu on the command line."
        )
    return gpus[:num_devices]
