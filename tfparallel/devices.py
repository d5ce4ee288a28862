"""Logical devices: list them, check names against them, split the CPU or a GPU.

A device is named `"CPU:0"` or `"GPU:1"`. TensorFlow places an operation on the
CPU without a word when the device it was given does not exist; the functions
here raise instead. This module, and `device_memory.py`, are the only callers of `tf.config`.

```python
import tfparallel

tfparallel.devices.split_cpu(4)          # first, before any model or tensor
tfparallel.devices.list_devices()        # ['CPU:0', 'CPU:1', 'CPU:2', 'CPU:3']
tfparallel.devices.check_devices(["/device:CPU:1"])  # ['CPU:1']
```
"""

import numbers
import os
import re
import warnings
from collections.abc import Sequence

from tfparallel import cuda_driver, startup
from tfparallel.device_memory import peak_tensor_bytes
from tfparallel.device_names import canonical, to_tensorflow_name

tf = startup.import_tensorflow()

if not startup.has_nvidia_gpu():
    # The first look for GPUs logs an error where there is none; look now, with
    # the log held back. On a machine with a GPU the look waits until it is
    # needed, since CUDA_VISIBLE_DEVICES may still change.
    with startup.quiet_stderr():
        tf.config.list_physical_devices()

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
# TensorFlow and CUDA keep some memory of their own beside the logical devices'.
_USABLE_GPU_MEMORY = 0.9
_connected: list[str] = []  # The devices of all processes, once `connect` has joined them.


def list_devices(device_type: str | None = None) -> list[str]:
    """Lists the logical devices, without starting TensorFlow's runtime.

    `tf.config.list_logical_devices` starts the runtime, after which nothing can
    be split any more; this function may be called at any time.

    Args:
        device_type: `"CPU"` or `"GPU"` for one type alone; by default all.

    Returns:
        Names such as `["CPU:0", "GPU:0"]`, by type and index; after
        `tfparallel.connect_to_cluster` those of all its processes, such as
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
            f"device_type={device_type!r}. tfparallel runs on no others."
        )
    if _connected:
        kind = f"/device:{device_type.upper()}:" if device_type is not None else ""
        return [name for name in _connected if kind in name]
    names = []
    for kind in ("CPU", "GPU"):
        if device_type is not None and device_type.upper() != kind:
            continue
        num_logical = sum(_num_logical(physical) for physical in _physical_devices(kind))
        names.extend(f"{kind}:{index}" for index in range(num_logical))
    return names


def check_devices(names: Sequence[str] | int) -> list[str]:
    """Checks device names against what exists.

    Args:
        names: Device names, in any form that `canonical` takes; or how many devices to take, as
            `choose_devices` does.

    Returns:
        The names as `"GPU:0"`, in the order given.

    Raises:
        ValueError: If the list is empty, or a name is malformed, unknown, or
            given twice; all of them in one message.

    Example:
        >>> tfparallel.devices.check_devices(["/device:CPU:1", "cpu:0"])
        ['CPU:1', 'CPU:0']
    """
    if isinstance(names, int):
        return choose_devices(num_devices=names)
    if isinstance(names, str):
        raise ValueError(
            "devices must be a list of names, one for each device. "
            f"Received: {names!r}. Pass {[name.strip() for name in names.split(',')]}."
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
            problems.append(f"{name!r} is no device name such as 'GPU:0'")
            continue
        if device not in existing:
            problems.append(f"{device} does not exist")
        checked.append(device)
    for device in dict.fromkeys(checked):
        if checked.count(device) > 1:
            problems.append(f"{device} is named {checked.count(device)} times")
    if problems:
        raise ValueError(
            f"Cannot use these devices: {'; '.join(problems)}. "
            "Each must be named once and be one of these devices: "
            f"{', '.join(existing)}. Received: devices={names}. "
            f"{_how_to_get_more(checked)}".rstrip()
        )
    return checked


def resolve(name: str) -> str:
    """Gives a device name its one spelling among those that exist, without looking for it.

    Args:
        name: A device name in any form that `canonical` takes.

    Returns:
        What `canonical` returns; after `connect`, the full name of a device of this process too.

    Raises:
        ValueError: If `name` is no device name.

    Example:
        >>> tfparallel.devices.resolve("/device:CPU:1")
        'CPU:1'
    """
    name = canonical(name)
    if _connected and not name.startswith("/"):
        return f"{_connected[0].partition('/device:')[0]}/device:{name}"
    return name


def reached_devices() -> set[str]:
    """The names of all devices that TensorFlow reaches, of other processes too; starts it."""
    return {canonical(device.name) for device in tf.config.list_logical_devices()}


def connect(addresses: Sequence[str]) -> list[str]:
    """Joins the devices of other processes to those of this one, which is the first.

    Args:
        addresses: `"host:port"` of each process. In all others a `tf.distribute.Server` runs.

    Returns:
        The names of all devices, those of the first process first.

    Example:
        >>> tfparallel.devices.connect(["localhost:2222", "localhost:2223"])  # doctest: +SKIP
        ['/job:worker/task:0/device:CPU:0', '/job:worker/task:1/device:CPU:0']
    """
    cluster = tf.train.ClusterSpec({"worker": list(addresses)})
    tf.config.experimental_connect_to_cluster(cluster, job_name="worker", task_index=0)
    found = reached_devices()
    _connected[:] = sorted(found, key=lambda name: [int(n) for n in re.findall(r":(\d+)", name)])
    return list(_connected)


def split_cpu(num_devices: int) -> list[str]:
    """Splits the CPU into logical devices, to try parallel training without GPUs.

    They share the cores and the memory of the machine: results are those of
    as many real devices, speed is not. A second call with the same number does
    nothing.

    Args:
        num_devices: How many logical CPU devices there shall be.

    Returns:
        The names `["CPU:0", …]`.

    Raises:
        ValueError: If `num_devices` is not a whole number of at least 1.
        RuntimeError: If TensorFlow's runtime has started with another number.

    Example:
        >>> tfparallel.devices.split_cpu(4)
        ['CPU:0', 'CPU:1', 'CPU:2', 'CPU:3']
    """
    _check_count(num_devices)
    (cpu,) = _physical_devices("CPU")
    _split(cpu, num_devices, memory_limit_mib=None, call=f"split_cpu({num_devices})")
    return list_devices("CPU")


def split_gpu(
    num_devices: int, memory_limit_mib: int | None = None, gpu: str = "GPU:0"
) -> list[str]:
    """Splits one GPU into logical devices, each with its own share of the memory.

    A second call with the same numbers does nothing. Where several GPUs are
    split, the logical devices are numbered through: GPU:0 and GPU:1 are the
    halves of the first.

    Args:
        num_devices: How many logical devices the GPU shall give.
        memory_limit_mib: Memory of each, in MiB; by default an equal share of
            90% of the GPU's memory, since TensorFlow needs some beside it.
        gpu: Which GPU, counted before any was split.

    Returns:
        The names of all logical GPU devices.

    Raises:
        ValueError: If a number is not a whole number of at least 1, or there is
            no such GPU.
        RuntimeError: If TensorFlow's runtime has started with other numbers, or
            the GPU's memory cannot be read.

    Example:
        >>> tfparallel.devices.split_gpu(2)  # doctest: +SKIP
        ['GPU:0', 'GPU:1']
    """
    _check_count(num_devices)
    if memory_limit_mib is not None:
        _check_count(memory_limit_mib, argument="memory_limit_mib")
    gpus = _physical_devices("GPU")
    names = [f"GPU:{index}" for index in range(len(gpus))]
    if canonical(gpu) not in names:
        fix = f"Pick one of {', '.join(names)}." if names else _how_to_get_more(["GPU:0"])
        raise ValueError(
            f"Cannot split {canonical(gpu)}: TensorFlow sees {_count(len(gpus), 'GPU')}. "
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


def hide_other_gpus(names: Sequence[str]) -> None:
    """Leaves this process the named GPUs alone, which are numbered anew from GPU:0.

    Args:
        names: Names of GPUs, none of which was split.

    Raises:
        ValueError: As `check_devices`.
        RuntimeError: If TensorFlow's runtime has started with others.

    Example:
        >>> tfparallel.devices.hide_other_gpus(["GPU:1"])  # doctest: +SKIP
    """
    gpus = _physical_devices("GPU")
    kept = [gpus[int(name.partition(":")[2])] for name in check_devices(names)]
    try:
        tf.config.set_visible_devices(kept, "GPU")
    except RuntimeError as error:
        raise RuntimeError(
            _too_late("hide GPUs", f"hide_other_gpus({list(names)})")
        ) from error


def hide_gpus() -> None:
    """Leaves this process no GPU: what names no device runs on the CPU, too.

    Raises:
        RuntimeError: If TensorFlow's runtime has started with some.

    Example:
        >>> tfparallel.devices.hide_gpus()
        >>> tfparallel.devices.list_devices("GPU")
        []
    """
    if _physical_devices("GPU"):
        try:
            tf.config.set_visible_devices([], "GPU")
        except RuntimeError as error:
            raise RuntimeError(_too_late("hide GPUs", "hide_gpus()")) from error


def whole_gpu(name: str) -> int | None:
    """Returns which GPU, as CUDA counts them, a device is the whole of.

    Args:
        name: A device of this process.

    Returns:
        The number; None for a part of a GPU, and for what is none.

    Example:
        >>> tfparallel.devices.whole_gpu("CPU:0") is None
        True
    """
    kind, _, index = canonical(name).rpartition("/device:")[2].partition(":")
    if kind != "GPU":
        return None
    logical = [
        (physical.name.rpartition(":")[2], _num_logical(physical) == 1)
        for physical in _physical_devices("GPU")
        for _ in range(_num_logical(physical))
    ]
    if int(index) >= len(logical):
        return None
    number, is_whole = logical[int(index)]
    return int(number) if is_whole else None


def set_memory_growth(enabled: bool = True) -> list[str]:
    """Lets TensorFlow take GPU memory as needed, instead of all of it at once.

    On a machine without a GPU it does nothing, so that a program may call it
    everywhere. A second call with the same value does nothing.

    Args:
        enabled: Whether memory grows.

    Returns:
        The names of the GPUs it was set on.

    Raises:
        RuntimeError: If TensorFlow's runtime has started with the other setting.
        ValueError: If a GPU was split: its logical devices have fixed memory.

    Example:
        >>> tfparallel.devices.set_memory_growth()  # doctest: +SKIP
        ['GPU:0', 'GPU:1']
    """
    gpus = _physical_devices("GPU")
    call = f"set_memory_growth({enabled})"
    for index, physical in enumerate(gpus):
        # A GPU that nobody set anything on reports None or False.
        if bool(tf.config.experimental.get_memory_growth(physical)) == enabled:
            continue
        if tf.config.get_logical_device_configuration(physical) is not None and enabled:
            raise ValueError(
                f"GPU:{index} was split into {_count(_num_logical(physical), 'logical device')} "
                "of fixed memory; memory growth needs it whole. "
                f"Received: {call}. Remove one of the two calls."
            )
        try:
            tf.config.experimental.set_memory_growth(physical, enabled)
        except RuntimeError as error:
            raise RuntimeError(_too_late(f"set memory growth on GPU:{index}", call)) from error
    return list_devices("GPU")


def choose_devices(
    num_devices: int | None = None,
    device_type: str = "auto",
    devices: Sequence[str] | int | None = None,
) -> list[str]:
    """Chooses the devices of a training run from what the user asked for.

    Args:
        num_devices: How many; by default all there are of the type. More CPU
            devices than exist are made by splitting the CPU, while that is
            still possible.
        device_type: `"cpu"`, `"gpu"`, or `"auto"`: GPUs if there is any, else
            the CPU.
        devices: Device names, instead of the other two; or a number, as `num_devices`.

    Returns:
        Canonical device names.

    Raises:
        ValueError: If the arguments contradict each other, or ask for what
            does not exist.
        RuntimeError: If the CPU would have to be split, and TensorFlow's
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
        _check_count(num_devices)
    if devices is not None:
        count = devices if isinstance(devices, int) else len(devices)
        if num_devices is not None and num_devices != count:
            raise ValueError(
                "devices and num_devices contradict each other; give one of the two. "
                f"Received: num_devices={num_devices}, devices={devices}."
            )
        checked = check_devices(devices)
        others = [name for name in checked if not name.lower().startswith(device_type)]
        if others and device_type != "auto":
            raise ValueError(
                f"devices and device_type contradict each other: {', '.join(others)} is of another "
                f"type. Received: device_type={device_type!r}, devices={list(devices)}. "
                "Leave device_type out; the names say it."
            )
        return checked
    gpus = list_devices("GPU")
    if device_type == "cpu" or (device_type == "auto" and not gpus):
        if device_type == "auto" and _why_no_gpu():
            warnings.warn(f"Training on the CPU. {_why_no_gpu()}", stacklevel=2)
        cpus = list_devices("CPU")
        if num_devices is not None and num_devices > len(cpus):
            cpus = split_cpu(num_devices)
        return cpus[:num_devices]
    if not gpus:
        raise ValueError(
            "No GPU can be used: TensorFlow lists none. "
            f"Received: device_type={device_type!r}, num_devices={num_devices}. "
            f"To go on without one: device type 'cpu'. {_why_no_gpu()}".rstrip()
        )
    if num_devices is not None and num_devices > len(gpus):
        raise ValueError(
            f"Cannot use {_count(num_devices, 'GPU')}: this machine has {len(gpus)} "
            f"({', '.join(gpus)}). Received: num_devices={num_devices}, "
            f"device_type={device_type!r}. Ask for at most {len(gpus)}, "
            "pass device type 'cpu' to split the CPU instead, or split a GPU: "
            f"`tfparallel.devices.split_gpu({num_devices})`, --split_gpu on the command line."
        )
    return gpus[:num_devices]


def _physical_devices(kind):
    # Devices that the user has hidden with tf.config.set_visible_devices are
    # none of ours.
    return tf.config.get_visible_devices(kind)


def _num_logical(physical):
    configuration = tf.config.get_logical_device_configuration(physical)
    return 1 if configuration is None else len(configuration)


def _split(physical, num_devices, memory_limit_mib, call):
    wanted = [
        tf.config.LogicalDeviceConfiguration(memory_limit=memory_limit_mib)
        for _ in range(num_devices)
    ]
    present = tf.config.get_logical_device_configuration(physical)
    if present == wanted or (present is None and num_devices == 1 and memory_limit_mib is None):
        return
    try:
        tf.config.set_logical_device_configuration(physical, wanted)
    except RuntimeError as error:
        # The one public sign that the runtime has started.
        kind = physical.device_type
        what = (
            f"split the {kind} into {_count(num_devices, 'device')}: it has "
            f"{_count(_num_logical(physical), 'device')}"
        )
        raise RuntimeError(_too_late(what, call)) from error


def _too_late(what, call):
    return (
        f"Cannot {what}, and TensorFlow's runtime has started already; devices must be set up "
        "before the first tensor, layer, or data set is made. "
        f"Received: tfparallel.devices.{call}. Move this call to the top of the program, "
        "directly below the imports. In a notebook restart the kernel "
        "(Colab: Runtime > Restart session) and run this call in the first cell."
    )


def _check_count(value, argument="num_devices"):
    # bool is an integer too, and True devices are a mistake.
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(
            f"{argument} must be a whole number of at least 1. Received: {argument}={value!r}."
        )


def _count(number, noun):
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _how_to_get_more(asked):
    hints = []
    num_cpus = 1 + max((int(name[4:]) for name in asked if name.startswith("CPU:")), default=-1)
    if num_cpus > len(list_devices("CPU")):
        hints.append(f"To get more CPU devices: `tfparallel.devices.split_cpu({num_cpus})`.")
    num_gpus = 1 + max((int(name[4:]) for name in asked if name.startswith("GPU:")), default=-1)
    gpus = list_devices("GPU")
    if num_gpus > len(gpus):
        if gpus:
            hints.append(
                f"To get more GPU devices: `tfparallel.devices.split_gpu({num_gpus})`."
            )
        else:
            hints.append(_why_no_gpu())
            hints.append("To try without a GPU: `tfparallel.devices.split_cpu(4)`.")
    return " ".join(hint for hint in hints if hint)


def _why_no_gpu():
    """Explains a GPU that the system shows and TensorFlow does not; else is empty."""
    if not startup.has_nvidia_gpu() or tf.config.list_physical_devices("GPU"):
        return ""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"TensorFlow sees no GPU: CUDA_VISIBLE_DEVICES={visible!r} may hide it."
    return (
        "This machine has an NVIDIA GPU that TensorFlow cannot use, most often for want of the "
        "CUDA libraries: `pip install 'tensorflow[and-cuda]'`."
    )


def _memory_unknown(index):
    return (
        f"Cannot read how much memory GPU:{index} has; its logical devices need a limit. "
        "Received: memory_limit_mib=None. Pass it, in MiB: "
        "`tfparallel.devices.split_gpu(2, memory_limit_mib=4096)`."
    )
