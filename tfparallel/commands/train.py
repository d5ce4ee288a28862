"""`tfparallel train TASK.py`: trains a task file in parallel."""

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from absl import flags

from tfparallel.commands.flags import Command, path_problems, resolved
from tfparallel.commands.parallelism_flags import common_flags, common_problems, numbers_flags
from tfparallel.commands.runner import run_with_task
from tfparallel.diagnostics.faults import parse_fault

__all__ = ["main"]

_COMMAND = Command(
    name="train",
    summary="Trains a task file with the parallelism that --parallel names. "
    "Batch sizes are global: the weights do not depend on the number of devices.",
    example="tfparallel train models/digits_cnn.py --parallel=data --num_devices=2 --epochs=3",
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    return run_with_task(_COMMAND, _flags(), _problems, _train, arguments)


def _flags() -> flags.FlagValues:
    values = common_flags()
    flags.DEFINE_integer(
        "epochs",
        None,
        "How often the data is passed over. As often as EPOCHS in the task file says if absent, or "
        "once.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "steps_per_epoch", None, "Batches in an epoch; one pass if absent.", flag_values=values
    )
    numbers_flags(values)
    flags.DEFINE_string("save", None, "Write the model here (.keras).", flag_values=values)
    flags.DEFINE_string("report", None, "Write a report here (.json).", flag_values=values)
    flags.DEFINE_string(
        "trace",
        None,
        "Write a timeline of all workers' last steps here (.json), for chrome://tracing or "
        "ui.perfetto.dev: input, forward, backward, each reduction, update.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "checkpoint_dir",
        None,
        "Write the state here after each epoch, and resume from it.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "checkpoint_every_steps",
        None,
        "Write the state after this many steps, too; with --checkpoint_dir.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "inject",
        None,
        "Have a fault strike a worker, once: kill:worker=1,step=20, hang:worker=0,step=5, "
        "exit:worker=1,step=3,code=5, preempt:worker=1,step=20, slow:worker=1,ms=50, or "
        "corrupt_checkpoint:worker=0,step=20.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "tensorboard",
        None,
        "Write losses and metrics of each epoch here, for `tensorboard --logdir=DIR`.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "callbacks",
        None,
        "Whether the Keras callbacks that callbacks() in the task file returns take part. Default: "
        "if there is such a function. A checkpoint does not hold what they remember.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "stop_on_nan",
        False,
        "Stop with exit code 1 when the loss is NaN; otherwise warn.",
        flag_values=values,
    )
    return values


def _problems(values: flags.FlagValues) -> list[str]:
    problems = common_problems(values)
    if values.epochs is not None and values.epochs < 1:
        problems.append(f"At least one epoch is required. Received: --epochs={values.epochs}.")
    if values.steps_per_epoch is not None and values.steps_per_epoch < 1:
        problems.append(
            "An epoch needs at least one step. "
            f"Received: --steps_per_epoch={values.steps_per_epoch}."
        )
    problems += path_problems("save", values.save, ".keras")
    problems += path_problems("report", values.report, ".json")
    problems += path_problems("trace", values.trace, ".json")
    problems += _checkpoint_problems(values)
    problems += _tensorboard_problems(values)
    if values.inject is not None:
        try:
            fault = parse_fault(values.inject)
            if fault.kind == "corrupt_checkpoint" and values.checkpoint_dir is None:
                problems.append(
                    f"{fault.kind} needs checkpoints. Received: --inject={fault} without "
                    "--checkpoint_dir."
                )
        except ValueError as error:
            problems.append(str(error))
    return problems


def _tensorboard_problems(values) -> list[str]:
    if values.tensorboard is None:
        return []
    if os.path.isfile(values.tensorboard):
        return [
            "TensorBoard's folder is a file. Received: --tensorboard="
            f"{values.tensorboard}. Name a folder."
        ]
    if importlib.util.find_spec("tensorboard") is None:
        return [
            "--tensorboard needs TensorBoard, which is not installed. Received: --tensorboard="
            f"{values.tensorboard}. Install it: pip install tensorboard"
        ]
    return []


def _checkpoint_problems(values) -> list[str]:
    problems = []
    if values.checkpoint_dir is not None and os.path.isfile(values.checkpoint_dir):
        problems.append(
            "The checkpoint folder is a file. "
            f"Received: --checkpoint_dir={values.checkpoint_dir}. Name a folder."
        )
    every = values.checkpoint_every_steps
    if every is not None and every < 1:
        problems.append(
            "A checkpoint is written after one or more steps. "
            f"Received: --checkpoint_every_steps={every}."
        )
    if every is not None and values.checkpoint_dir is None:
        problems.append(
            "--checkpoint_every_steps needs a folder to write to. Received: "
            f"--checkpoint_every_steps={every} alone. Add --checkpoint_dir=FOLDER."
        )
    return problems


def _train(path: str, values: flags.FlagValues) -> int:
    training = importlib.import_module("tfparallel.commands.training")
    started = time.perf_counter()
    result = training.train(path, values)
    if values.report is not None and result.is_chief:
        training.write_report(
            values.report,
            {
                "command": "train",
                "configuration": {"task": path, **resolved(values)},
                **result.report,
                "wall_time_seconds": time.perf_counter() - started,
            },
        )
    return _finish(result, values)


def _finish(result: Any, values: flags.FlagValues) -> int:
    if result.failure is not None:
        print(f"tfparallel train: {result.failure}", file=sys.stderr)
        return 1
    if not result.is_chief:
        return 0
    for name in ("save", "report", "trace"):
        if name == "trace" and not os.path.exists(values.trace or ""):
            continue
        if getattr(values, name) is not None:
            print(f"wrote {getattr(values, name)}")
    return 0
