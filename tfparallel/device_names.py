"""The canonical name of a device: `"GPU:0"`, or `"/job:worker/task:1/device:GPU:0"`.

The first is a device of this process, the second a device of one that `connect_to_cluster` joined.
"""

import re

_DEVICE_NAME = re.compile(
    r"(?:/job:(?P<job>\w+)(?:/replica:0)?/task:(?P<task>\d+))?"
    r"/?(?:device:)?(?P<type>[a-z]+):(?P<index>\d+)",
    re.IGNORECASE,
)


def canonical(name: str) -> str:
    """Converts a device name to its canonical form, without checking that it exists.

    Args:
        name: `"gpu:0"`, `"/GPU:0"`, `"/device:GPU:0"`, `"GPU:0"`, or the same after a job and a
            task such as `/job:worker/replica:0/task:1`.

    Returns:
        The name as `"GPU:0"`; with a job other than TensorFlow's "localhost", as
        `"/job:worker/task:1/device:GPU:0"`.

    Raises:
        ValueError: If `name` is not a device name.

    Example:
        >>> tfparallel.devices.canonical("/device:GPU:0")
        'GPU:0'
    """
    match = _DEVICE_NAME.fullmatch(name.strip()) if isinstance(name, str) else None
    if match is None:
        raise ValueError(
            f"Not a device name; it must be a type and an index such as 'GPU:0' or 'CPU:1'. "
            f"Received: {name!r}."
        )
    device = f"{match['type'].upper()}:{int(match['index'])}"
    if match["job"] in (None, "localhost"):
        return device
    return f"/job:{match['job']}/task:{int(match['task'])}/device:{device}"


def to_tensorflow_name(name: str) -> str:
    """Converts a device name to the form that `tf.device` documents.

    Args:
        name: A device name in any form that `canonical` takes.

    Returns:
        The name as `"/device:GPU:0"`, after its job and task if it has them.

    Raises:
        ValueError: If `name` is not a device name.

    Example:
        >>> with tf.device(tfparallel.devices.to_tensorflow_name("CPU:1")):
        ...     ones = tf.ones(2)
    """
    name = canonical(name)
    return name if name.startswith("/") else f"/device:{name}"
