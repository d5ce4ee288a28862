"""`tfparallel bench all_reduce`: which collective algorithm is fast here, and is it right."""

import importlib
import os
import sys
from collections.abc import Sequence

from absl import flags

from tfparallel.bench.collectives import COLLECTIVES
from tfparallel.bench.inputs import DTYPES, itemsize
from tfparallel.bench.measure import MIN_WARMUP
from tfparallel.bench.sizes import parse_size, sweep
from tfparallel.cluster.spec import Cluster
from tfparallel.commands import launch
from tfparallel.commands.flags import (
    Command,
    UsageError,
    parse_checked,
    path_problems,
    plot_problems,
    report_flag,
    run_command,
)
from tfparallel.task import TaskError, load_task

__all__ = ["main"]

_COMMAND = Command(
    name="bench",
    summary="Measures every algorithm of a collective at every size, interleaved, and checks every "
    "element. With a task file: at the sizes of the model's gradients, with advice. `tfparallel "
    "bench train TASK.py` measures how a training scales over workers, and `tfparallel bench "
    "pipeline TASK.py` stages and micro-batches; they have flags of their own.",
    example="tfparallel bench all_reduce --num_devices=4 --min_bytes=4K --max_bytes=16M "
    "--report=a.json --plot=a.png",
    arguments=f"{'|'.join(COLLECTIVES)} [TASK.py] [--flags]",
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command; 1 stands for a wrong element."""
    return run_command("bench", lambda: _main(arguments), (TaskError,))


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    define_text, define_number = flags.DEFINE_string, flags.DEFINE_integer
    define_text("min_bytes", "4K", "The smallest size; K, M and G are powers of 1024.", values)
    define_text("max_bytes", "16M", "The largest size.", flag_values=values)
    define_number("step_factor", 4, "Each size is this many times the last.", flag_values=values)
    define_number("iters", 20, "Timed calls of each algorithm at each size.", flag_values=values)
    define_number("warmup_iters", MIN_WARMUP, "Calls before the timed ones.", flag_values=values)
    flags.DEFINE_list("algorithms", ["all"], "Which, by name.", flag_values=values)
    flags.DEFINE_enum("dtype", "float32", DTYPES, "Type of the elements.", values)
    define_number(
        "num_devices", None, "Ranks in one process; the CPU is split as needed.", flag_values=values
    )
    flags.DEFINE_enum(
        "device_type", "auto", ("auto", "cpu", "gpu"), "Which devices to count.", values
    )
    define_number(
        "nproc_per_node", None, "Start this many processes, a rank each.", flag_values=values
    )
    report_flag(values, "Write the rows here (.json).")
    define_text("csv", None, "Write the rows here (.csv).", flag_values=values)
    define_text("plot", None, "Draw time and bus bandwidth here (.png).", flag_values=values)
    flags.DEFINE_bool(
        "save_profile",
        False,
        "Keep the sweep for --all_reduce=auto, under this host, these ranks and versions.",
        flag_values=values,
    )
    return values


def _main(arguments: Sequence[str]) -> int:
    values = _flags()
    positional = parse_checked(_COMMAND, values, _problems, arguments)
    if positional is None:
        return 0
    collective, *task = positional
    if task and not os.path.exists(task[0]):
        load_task(task[0])  # Raises the error that says so.
    exit_code = _run_as_workers(arguments, values)
    if exit_code is not None:
        return exit_code
    importlib.import_module("tfparallel.startup").prepare()
    benching = importlib.import_module("tfparallel.commands.benching")
    return benching.bench(collective, task[0] if task else None, values)


def _problems(values: flags.FlagValues, positional: list[str]) -> list[str]:
    problems = _positional_problems(positional, values) + _flag_problems(values)
    return problems + _task_problems(positional[1:], values)


def _positional_problems(positional: Sequence[str], values: flags.FlagValues) -> list[str]:
    problems = []
    if not positional or positional[0] not in COLLECTIVES:
        problems.append(
            f"tfparallel bench needs the name of a collective: {', '.join(COLLECTIVES)}; or "
            "`train TASK.py`, or `pipeline TASK.py`. "
            f"Received: {list(positional)}. Example: {_COMMAND.example}"
        )
    if len(positional) == 2 and positional[0] in COLLECTIVES[1:]:
        problems.append(
            "Gradients are summed; all_reduce is required with a task file. Received: "
            f"{' '.join(positional)}. Drop the file."
        )
    if values.save_profile and positional and positional[0] in COLLECTIVES[1:]:
        problems.append(
            "A profile says how to sum gradients; all_reduce is required. Received: --save_profile "
            f"with {positional[0]}. Drop the flag."
        )
    if len(positional) > 2:
        problems.append(
            f"tfparallel bench takes at most one task file. Received: {list(positional[1:])}."
        )
    return problems


def _task_problems(task: Sequence[str], values: flags.FlagValues) -> list[str]:
    given = [
        f"--{name}={getattr(values, name)}"
        for name in ("min_bytes", "max_bytes", "step_factor")
        if values[name].present
    ]
    if task and given:
        return [
            "With a task file the sizes are those of the model's gradients. Received: "
            f"{task[0]} and {', '.join(given)}. Drop the file or the sizes."
        ]
    if task and values.save_profile:
        return [
            "A profile is a sweep over sizes. Received: --save_profile with "
            f"{task[0]}. Drop one of the two."
        ]
    return []


def _flag_problems(values: flags.FlagValues) -> list[str]:
    problems = []
    try:
        sizes = parse_size(values.min_bytes), parse_size(values.max_bytes)
        sweep(*sizes, values.step_factor, itemsize(values.dtype))
    except ValueError as error:
        problems.append(f"--min_bytes, --max_bytes, --step_factor: {error}")
    least = {"iters": 1, "warmup_iters": MIN_WARMUP, "num_devices": 2, "nproc_per_node": 2}
    for name, lowest in least.items():
        given = getattr(values, name)
        if given is not None and given < lowest:
            problems.append(f"At least {lowest} is required. Received: --{name}={given}.")
    if values.num_devices is not None and values.nproc_per_node is not None:
        problems.append(
            "Ranks are the devices of one process or processes, not both. Received: "
            f"--num_devices={values.num_devices}, --nproc_per_node={values.nproc_per_node}. "
            "Drop one of the two."
        )
    problems += path_problems("report", values.report, ".json")
    problems += path_problems("csv", values.csv, ".csv")
    problems += plot_problems(values.plot)
    return problems


def _run_as_workers(arguments: Sequence[str], values: flags.FlagValues) -> int | None:
    """Starts the same command in each process; None where this process is to measure."""
    if values.nproc_per_node is None:
        return None
    try:
        cluster = Cluster.from_env()
    except ValueError as error:
        raise UsageError(str(error)) from error
    if cluster.num_workers == values.nproc_per_node:
        return None
    if cluster.num_workers > 1:
        raise UsageError(
            f"This process is one of {cluster.num_workers} workers already ({cluster.source}). "
            f"Received: --nproc_per_node={values.nproc_per_node}. Drop the flag."
        )
    command = (sys.executable, "-m", "tfparallel", "bench", *arguments)
    return launch.main([f"--nproc_per_node={values.nproc_per_node}", "--", *command])
