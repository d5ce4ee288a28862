"""`tfparallel plan TASK.py`: how many devices does a task need, and which layers go where."""

import importlib
import os
from collections.abc import Sequence

from absl import flags

from tfparallel.commands.flags import (
    Command,
    UsageError,
    balance_flags,
    device_memory_problems,
    parse,
    path_problems,
    run_command,
)
from tfparallel.task import TaskError, load_task

__all__ = ["main"]

_COMMAND = Command(
    name="plan",
    summary="Says how many devices a task needs, which layers go where, and the command for it. "
    "Nothing is trained, and the model is never held whole.",
    example="tfparallel plan models/resnet.py --num_devices=4 --device_memory=16GiB",
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    return run_command("plan", lambda: _main(arguments), (TaskError,))


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_integer("num_devices", 1, "How many devices there are.", flag_values=values)
    flags.DEFINE_integer("global_batch_size", 64, "Examples in a step.", flag_values=values)
    balance_flags(values)
    flags.DEFINE_string("report", None, "Write the plan here (.json).", flag_values=values)
    return values


def _problems(values: flags.FlagValues) -> list[str]:
    problems = path_problems("report", values.report, ".json") + device_memory_problems(values)
    for name in ("num_devices", "global_batch_size"):
        if getattr(values, name) < 1:
            problems.append(f"At least 1 is required. Received: --{name}={getattr(values, name)}.")
    return problems


def _main(arguments: Sequence[str]) -> int:
    values = _flags()
    path = parse(_COMMAND, values, arguments)
    if path is None:
        return 0
    problems = _problems(values)
    if problems:
        raise UsageError("\n".join(problems))
    if not os.path.exists(path):
        load_task(path)  # Says so now, not after the seconds that TensorFlow takes to load.
    # Only now, so that help and mistakes cost no start of TensorFlow.
    importlib.import_module("tfparallel.startup").prepare()
    return importlib.import_module("tfparallel.commands.planning").answer(path, values)
