"""Runs a command: its flags, its mistakes, its own workers; then what it does.

TensorFlow takes seconds to load: help and mistakes are answered before.
"""

import importlib
import os
import pkgutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from tfparallel.activity import Activity
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.command_line.command_table import COMMANDS, Command
from tfparallel.command_line.exits import StartError, UsageError, run_command
from tfparallel.command_line.flag_table import flags_of
from tfparallel.command_line.flags import defined, flag_problems, parsed
from tfparallel.command_line.help import help_text
from tfparallel.task import TaskError

__all__ = ["TFPARALLEL", "checked", "run", "run_job"]

TFPARALLEL = (sys.executable, "-m", "tfparallel")
_DEADLINE_SECONDS = 900.0  # Of a job.


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs a command, and returns its exit code.

    Args:
        name: A key of `COMMANDS`.
        arguments: What stands behind it.
    """
    command = COMMANDS[name]
    # Of a command of two words, the first says enough.
    return run_command(name.partition(" ")[0], lambda: _run(name, command, arguments), (TaskError,))


def _run(name: str, command: Command, arguments: Sequence[str]) -> int:
    end = arguments.index("--") if command.runs_program and "--" in arguments else len(arguments)
    if any(argument in ("-h", "-help", "--help") for argument in arguments[:end]):
        print(help_text(name))
        return 0
    values, positional = checked(name, arguments)
    if command.workers is not None:
        code = _run_as_workers(name, arguments, values[command.workers].value, command.workers)
        if code is not None:
            return code
    if command.loads_tensorflow:
        # Of several workers each would say so.
        with Activity("loading TensorFlow", is_shown=os.environ.get("WORLD_SIZE", "1") == "1"):
            importlib.import_module("tfparallel.startup").prepare()
    module = importlib.import_module(f"tfparallel.commands.{command.module}")
    return module.run(values, positional)


def checked(name: str, arguments: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """Reads the arguments of a command, and tells all that is wrong with them at once.

    Args:
        name: A key of `COMMANDS`.
        arguments: What stands behind it.

    Returns:
        Its flags, and what is no flag: for `launch` what stands behind `--`.

    Raises:
        UsageError: If something is wrong.
    """
    command, values = COMMANDS[name], defined(name)
    if command.runs_program:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        before, positional = parsed(name, values, arguments[:end]), list(arguments[end + 1 :])
        if before:
            raise UsageError(
                "The workers' command must follow `--`. "
                f"Received: {before} before it. Example: {command.example}"
            )
    else:
        positional = parsed(name, values, arguments)
    problems = _positional_problems(name, command, positional)
    problems += flag_problems(name, values)
    if command.rules is not None:
        problems += pkgutil.resolve_name(f"tfparallel.{command.rules}")(values, positional)
    if problems:
        raise UsageError("\n".join(problems))
    return values, positional


def _positional_problems(name: str, command: Command, positional: list[str]) -> list[str]:
    """What is wrong with what is no flag, where the command says all of it."""
    if command.is_on_task:
        if len(positional) != 1:
            bare = [word for word in positional if word.partition("=")[0] in flags_of(name)]
            fix = f"Did you mean --{bare[0]}?" if bare else f"Example: {command.example}"
            return [f"One task file is required. Received: {positional}. {fix}"]
        (path,) = positional
        if os.path.isdir(path):
            files = sorted(each for each in os.listdir(path) if each.endswith(".py"))
            fix = f"Name a file in it, such as {os.path.join(path, files[0])}." if files else ""
            return [f"A task file is required. Received: a folder, {path!r}. {fix}".rstrip()]
        if not os.path.exists(path):
            is_short = os.path.exists(f"{path}.py")
            fix = f"Did you mean {path}.py?" if is_short else "Check the path."
            return [f"The task file does not exist. Received: {path!r} (in {os.getcwd()}). {fix}"]
    if command.arguments == "[--flags]" and positional:
        return [
            f"tfparallel {name} takes flags alone. Received: {positional}. Example: "
            f"{command.example}"
        ]
    return []


def _run_as_workers(
    name: str, arguments: Sequence[str], number: int | None, flag: str
) -> int | None:
    """Runs the same command in so many processes: `--num_workers=3` is `launch` of three.

    Returns:
        The job's exit code; None where the command is to run in this process, because the flag is
        absent or this process is one of the workers.
    """
    if number is None:
        return None
    try:
        cluster = Cluster.from_env()
    except ValueError as error:
        raise UsageError(str(error)) from error
    if cluster.num_workers == number:
        return None
    if cluster.num_workers > 1:
        raise UsageError(
            f"This process is one of {cluster.num_workers} workers already ({cluster.source}). "
            f"Received: --{flag}={number}. Drop the flag."
        )
    again = (*TFPARALLEL, *name.split(), *arguments)
    return run("launch", [f"--nproc_per_node={number}", "--", *again])


def run_job(what: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs a command to its end in processes of its own, for a benchmark that measures it.

    Args:
        what: The run, in words, for an error.
        command: What is run.
        environment: Variables beside those of this process.

    Raises:
        StartError: If it fails, or has not ended after 15 minutes.
    """
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_DEADLINE_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise StartError(
            f"{what} has not ended within {_DEADLINE_SECONDS:.0f} s. Ask for fewer --steps, or a "
            "smaller batch."
        ) from error
    if done.returncode:
        raise StartError(f"{what} failed with exit code {done.returncode}:\n{done.stdout[-3000:]}")
