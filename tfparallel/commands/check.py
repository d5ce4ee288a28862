"""`tfparallel check TASK.py`: does a model train in parallel to the weights of one device."""

import importlib
from collections.abc import Sequence

from absl import flags

from tfparallel.commands.flags import Command, path_problems, plot_problems
from tfparallel.commands.parallelism_flags import common_flags, common_problems, numbers_flags
from tfparallel.commands.runner import run_with_task

__all__ = ["main"]

_COMMAND = Command(
    name="check",
    summary="Trains a task file on one device and in parallel, from the same weights on the "
    "same batches, and compares every variable, beside what rounding alone makes of the model. "
    "Exit code 1 if one differs.",
    example="tfparallel check models/digits_cnn.py --parallel=data --num_devices=3 --steps=20",
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    return run_with_task(_COMMAND, _flags(), _problems, _check, arguments)


def _flags() -> flags.FlagValues:
    values = common_flags()
    flags.DEFINE_integer("steps", 20, "How many steps are trained.", flag_values=values)
    flags.DEFINE_boolean(
        "prove",
        False,
        "Train nothing: prove on the operations of the model that it treats each example by "
        "itself, and print where the rows of the batch are in what each layer makes.",
        flag_values=values,
    )
    numbers_flags(values)
    flags.DEFINE_string("report", None, "Write a report here (.json).", flag_values=values)
    flags.DEFINE_string(
        "plot",
        None,
        "Draw how the difference and the rounding floor grow, step by step (.png).",
        flag_values=values,
    )
    return values


def _problems(values: flags.FlagValues) -> list[str]:
    problems = common_problems(values)
    if values.steps < 1:
        problems.append(f"At least one step is required. Received: --steps={values.steps}.")
    if values.parallel == "none":
        problems.append(
            "A parallelism to check is required. Received: --parallel=none. Use --parallel=data."
        )
    for name in ("compression", "sync"):
        if getattr(values, name) not in (None, "every_step"):
            problems.append(
                "What is checked is whether the weights are those of one device with an update in "
                f"each step. Received: --{name}={getattr(values, name)}. Drop it, and look at the "
                "accuracy that `tfparallel train` reaches with it."
            )
    problems += plot_problems(values.plot)
    return problems + path_problems("report", values.report, ".json")


def _check(path: str, values: flags.FlagValues) -> int:
    if values.prove:
        return importlib.import_module("tfparallel.commands.proving").prove(path, values)
    return importlib.import_module("tfparallel.commands.checking").check(path, values)
