"""`tfparallel plan TASK.py`: how many devices does a task need, and which layers go where."""

import importlib
import os
import re
from collections.abc import Sequence

from absl import flags

from tfparallel.commands.flags import Command, UsageError, parse, path_problems, run_command
from tfparallel.task import TaskError, load_task

__all__ = ["main"]

_COMMAND = Command(
    name="plan",
    summary="Says how many devices a task needs, which layers go where, and the command for it. "
    "Nothing is trained, and the model is never held whole.",
    example="tfparallel plan models/resnet.py --num_devices=4 --device_memory=16GiB",
)
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    return run_command("plan", lambda: _main(arguments), (TaskError,))


def parse_bytes(text: str) -> int:
    """Reads a number of bytes: `"16GiB"`, `"500MB"`, `"1048576"`.

    Raises:
        ValueError: If it is none, or not above zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?) ?([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise ValueError(
            f"A number of bytes such as 16GiB, 500MB or 1048576 is required. Received: {text!r}."
        )
    return int(float(match[1]) * unit)


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_integer("num_devices", 1, "How many devices there are.", flag_values=values)
    flags.DEFINE_string(
        "device_memory", None, "What each may hold, such as 16GiB; no limit if absent.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_integer("global_batch_size", 64, "Examples in a step.", flag_values=values)
    flags.DEFINE_enum(
        "balance", "memory", ("memory", "time", "both"), "What the cut spreads evenly.", values
    )
    flags.DEFINE_string("report", None, "Write the plan here (.json).", flag_values=values)
    return values


def _main(arguments: Sequence[str]) -> int:
    values = _flags()
    path = parse(_COMMAND, values, arguments)
    if path is None:
        return 0
    problems, device_memory = path_problems("report", values.report, ".json"), None
    for name in ("num_devices", "global_batch_size"):
        if getattr(values, name) < 1:
            problems.append(f"At least 1 is required. Received: --{name}={getattr(values, name)}.")
    if values.device_memory is not None:
        try:
            device_memory = parse_bytes(values.device_memory)
        except ValueError as error:
            problems.append(f"--device_memory: {error}")
    if problems:
        raise UsageError("\n".join(problems))
    if not os.path.exists(path):
        load_task(path)  # Says so now, not after the seconds that TensorFlow takes to load.
    # Only now, so that help and mistakes cost no start of TensorFlow.
    importlib.import_module("tfparallel.startup").prepare()
    return importlib.import_module("tfparallel.commands.planning").answer(
        path, values, device_memory
    )
