"""`tfparallel plan TASK.py`: which mesh of devices is the fastest for a task, and does it fit."""

import importlib
from collections.abc import Sequence

from absl import flags

from tfparallel.commands.flags import Command, path_problems
from tfparallel.commands.help import define_choice
from tfparallel.commands.pipeline_flags import pipeline_flags, pipeline_problems
from tfparallel.commands.plan_flags import plan_flags, plan_problems
from tfparallel.commands.runner import run_with_task

__all__ = ["main"]

_COMMAND = Command(
    name="plan",
    summary="Ranks every mesh of so many devices by its predicted step, with the memory of a "
    "device, and names the command for the first. Without --num_trials nothing is trained, and the "
    "model is never held whole.",
    example="tfparallel plan models/resnet.py --num_devices=4 --device_memory=16GiB",
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    return run_with_task(_COMMAND, _flags(), _problems, _plan, arguments)


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    define_choice(
        values,
        "parallel",
        "auto",
        {
            "auto": "every mesh of the devices, the best first",
            "model": "how many devices are needed, and which layers go where",
            "pipeline": "what each device does, and when, with micro-batches",
        },
        "What is planned.",
    )
    flags.DEFINE_integer("num_devices", 1, "How many devices there are.", flag_values=values)
    flags.DEFINE_integer("global_batch_size", 64, "Examples in a step.", flag_values=values)
    plan_flags(values)
    pipeline_flags(values)
    flags.DEFINE_string(
        "draw", None, "For pipeline: draw the schedule here (.png or .txt).", flag_values=values
    )
    flags.DEFINE_string(
        "trace",
        None,
        "For pipeline: write it as a trace for chrome://tracing here (.json).",
        flag_values=values,
    )
    flags.DEFINE_string("report", None, "Write the plan here (.json).", flag_values=values)
    return values


def _problems(values: flags.FlagValues) -> list[str]:
    problems = path_problems("report", values.report, ".json") + plan_problems(values)
    problems += pipeline_problems(values)
    problems += path_problems("trace", values.trace, ".json")
    if values.draw is not None:
        is_text = values.draw.endswith(".txt")
        problems += path_problems("draw", values.draw, ".txt" if is_text else ".png")
    for name in ("draw", "trace"):
        if getattr(values, name) is not None and values.parallel != "pipeline":
            problems.append(
                f"--{name} shows what --parallel=pipeline does. Received: --{name}="
                f"{getattr(values, name)} with --parallel={values.parallel}."
            )
    for name in ("num_devices", "global_batch_size"):
        if getattr(values, name) < 1:
            problems.append(f"At least 1 is required. Received: --{name}={getattr(values, name)}.")
    return problems


def _plan(path: str, values: flags.FlagValues) -> int:
    name = {
        "auto": "planning_meshes",
        "model": "planning",
        "pipeline": "planning_pipeline",
    }[values.parallel]
    return importlib.import_module(f"tfparallel.commands.{name}").answer(path, values)
