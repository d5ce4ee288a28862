"""One measurement of `bench pipeline`, in its own processes, each on a core of its own.

Started by that program: `python -m tfparallel.commands.bench_pipeline_job TASK.py --parallel=…`.
"""

import importlib
import os
import sys
from collections.abc import Sequence

from absl import flags

from tfparallel.cluster.spec import Cluster
from tfparallel.commands.flags import Command, path_problems
from tfparallel.commands.parallelism_flags import common_flags, common_problems
from tfparallel.commands.runner import run_with_task

__all__ = ["main"]

_COMMAND = Command(
    name="bench_pipeline_job",
    summary="Measures one pipeline, or plain Keras in one process.",
    example="tfparallel bench pipeline models/transformer.py",
)


def main(arguments: Sequence[str]) -> int:
    """Runs the program and returns its exit code."""
    return run_with_task(_COMMAND, _flags(), _problems, _measure, arguments)


def _flags() -> flags.FlagValues:
    values = common_flags()
    flags.DEFINE_integer("steps", 20, "Timed steps.", flag_values=values)
    flags.DEFINE_string("report", None, "Where the figures go (.json).", flag_values=values)
    return values


def _problems(values: flags.FlagValues) -> list[str]:
    return common_problems(values) + path_problems("report", values.report, ".json")


def _measure(path: str, values: flags.FlagValues) -> int:
    if hasattr(os, "sched_setaffinity"):  # Before TensorFlow makes its threads.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[Cluster.from_env().worker_index % len(cores)]})
    return importlib.import_module("tfparallel.commands.benching_pipeline").measure(path, values)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
