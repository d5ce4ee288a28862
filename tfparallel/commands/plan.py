"""`tfparallel plan TASK.py`: how many devices does a task need, and which layers go where.

`tfparallel plan all_reduce` is another program: see `plan_all_reduce`.
"""

import importlib
from collections.abc import Sequence

from absl import flags

from tfparallel.commands.flags import (
    Command,
    balance_flags,
    device_memory_problems,
    path_problems,
)
from tfparallel.commands.on_task import run_on_task

__all__ = ["main"]

_COMMAND = Command(
    name="plan",
    summary="Says how many devices a task needs, which layers go where, and the command for it. "
    "Nothing is trained, and the model is never held whole.",
    example="tfparallel plan models/resnet.py --num_devices=4 --device_memory=16GiB",
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    if "all_reduce" in arguments:
        rest = [argument for argument in arguments if argument != "all_reduce"]
        return importlib.import_module("tfparallel.commands.plan_all_reduce").main(rest)
    return run_on_task(_COMMAND, _flags(), _problems, _plan, arguments)


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


def _plan(path: str, values: flags.FlagValues) -> int:
    return importlib.import_module("tfparallel.commands.planning").answer(path, values)
