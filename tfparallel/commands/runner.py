"""A program that works on a task file: flags, mistakes, its own workers, then TensorFlow."""

import importlib
import os
from collections.abc import Callable, Sequence

from absl import flags

from tfparallel.activity import Activity
from tfparallel.commands.flags import Command, UsageError, parse, run_command
from tfparallel.commands.own_workers import run_as_workers
from tfparallel.task import TaskError, load_task

__all__ = ["run_beside_task", "run_with_task"]


def run_beside_task(
    command: Command,
    values: flags.FlagValues,
    problems: Callable[[flags.FlagValues], list[str]],
    body: Callable[[str, flags.FlagValues], int],
    arguments: Sequence[str],
) -> int:
    """Runs a program that has other processes run the task file that its arguments name.

    Args:
        command: As for `run_with_task`, like all others.
        values: Likewise.
        problems: Likewise.
        body: Likewise.
        arguments: Likewise.

    Returns:
        The exit code.
    """

    def run() -> int:
        path = parse(command, values, arguments)
        if path is None:
            return 0
        missing = [] if os.path.exists(path) else [f"No such task file. Received: {path}."]
        _refuse([*problems(values), *missing])
        return body(path, values)

    return run_command(command.name, run, ())


def run_with_task(
    command: Command,
    values: flags.FlagValues,
    problems: Callable[[flags.FlagValues], list[str]],
    body: Callable[[str, flags.FlagValues], int],
    arguments: Sequence[str],
) -> int:
    """Runs a program on the task file that its arguments name.

    TensorFlow takes seconds to load: help and mistakes are answered before, and a body's own module
    is to be imported by the body.

    Args:
        command: What `--help` says.
        values: The program's flags, not parsed yet.
        problems: Returns what is wrong with the parsed flags, all of it.
        body: Is given the task file's path and the flags; returns the exit code.
        arguments: What stands behind the program's name.

    Returns:
        The exit code.
    """

    def run() -> int:
        path = parse(command, values, arguments)
        if path is None:
            return 0
        _refuse(problems(values))
        if not os.path.exists(path):
            load_task(path)  # Raises the error that says so.
        if "num_workers" in values:
            exit_code = run_as_workers(command.name, arguments, values)
            if exit_code is not None:
                return exit_code
        # Of several workers each would say so.
        with Activity("loading TensorFlow", is_shown=os.environ.get("WORLD_SIZE", "1") == "1"):
            importlib.import_module("tfparallel.startup").prepare()
        return body(path, values)

    return run_command(command.name, run, (TaskError,))


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise UsageError("\n".join(problems))
