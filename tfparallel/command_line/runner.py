"""Runs a command: parses its flags, reports usage errors, starts its workers.

TensorFlow takes seconds to load: help and usage errors come first.
"""

import importlib
import os
import pkgutil
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from tfparallel.activity import Activity
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.command_line.command_table import COMMANDS, Command
from tfparallel.command_line.exits import StartError, UsageError, run_command
from tfparallel.command_line.flag_parsing import defined, flag_problems, parsed
from tfparallel.command_line.flag_table import flags_of
from tfparallel.command_line.help import help_text
from tfparallel.task import TaskError, path_problems

TFPARALLEL = (sys.executable, "-m", "tfparallel")
_DEADLINE_SECONDS = 900.0  # For a job.


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs a command, and returns its exit code.

    Args:
        name: A key of `COMMANDS`.
        arguments: The arguments after the command's name.
    """
    command = COMMANDS[name]
    # For a two-word command, the first word is enough.
    return run_command(name.partition(" ")[0], lambda: _run(name, command, arguments), (TaskError,))


def _run(name: str, command: Command, arguments: Sequence[str]) -> int:
    end = arguments.index("--") if command.runs_program and "--" in arguments else len(arguments)
    wants_help = list(arguments) == ["help"] and not os.path.exists("help")
    if wants_help or any(word in ("-h", "-help", "--help") for word in arguments[:end]):
        print(help_text(name))
        return 0
    values, positional = checked(name, arguments)
    if command.workers is not None:
        code = _run_as_workers(name, arguments, values[command.workers].value, command.workers)
        if code is not None:
            return code
    if command.loads_tensorflow:
        # With several workers, each would print it.
        with Activity("loading TensorFlow", is_shown=os.environ.get("WORLD_SIZE", "1") == "1"):
            importlib.import_module("tfparallel.startup").prepare()
    module = importlib.import_module(f"tfparallel.commands.{command.module}")
    return module.run(values, positional)


def checked(name: str, arguments: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """Parses and checks the arguments of a command; reports all problems at once.

    Args:
        name: A key of `COMMANDS`.
        arguments: The arguments after the command's name.

    Returns:
        The flags, and the positional arguments: for `launch`, the command after `--`.

    Raises:
        UsageError: If there are problems.
    """
    command, values = COMMANDS[name], defined(name)
    if command.runs_program:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        before, positional = parsed(name, values, arguments[:end]), list(arguments[end + 1 :])
        if before:
            program = shlex.join(["python"] * before[0].endswith(".py") + before)
            raise UsageError(
                "The workers' command must follow `--`. "
                f"Received: {before} before it. Type `tfparallel {name} … -- {program}`."
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
    """Returns the problems of positional arguments that the command's usage determines."""
    if command.is_on_task:
        if len(positional) != 1:
            fix = _fix_of_words(name, positional) or f"Example: {command.example}"
            return [f"One task file is required. Received: {positional}. {fix}"]
        return path_problems(positional[0])
    if command.arguments == "[--flags]" and positional:
        return [
            f"tfparallel {name} takes only flags. Received: {positional}. Example: "
            f"{command.example}"
        ]
    return []


def _fix_of_words(name: str, words: Sequence[str]) -> str | None:
    """Returns how to fix words beside the task file, if they look like parts of flags."""
    dashes = [word for word in words if word and word[0] in "\u2010\u2011\u2012\u2013\u2014\u2212"]
    bare = [word for word in words if word.partition("=")[0] in flags_of(name)]
    if dashes:  # As documents and chats write two hyphens.
        return f"A flag begins with two hyphens: --{dashes[0].lstrip(dashes[0][0])}."
    if bare:
        return f"Did you mean --{bare[0]}?"
    if len(words) > 1 and os.path.isfile(words[0]) and not os.path.exists(words[1]):
        return "A flag's value has no spaces, or stands in quotes."
    return None


def _run_as_workers(
    name: str, arguments: Sequence[str], number: int | None, flag: str
) -> int | None:
    """Runs the same command in several processes: `--num_workers=3` launches three workers.

    Returns:
        The job's exit code; None to run the command in this process, because the flag is absent or
        this process is one of the workers.
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
            f"This process is already one of {cluster.num_workers} workers ({cluster.source}). "
            f"Received: --{flag}={number}. Drop the flag."
        )
    command = (*TFPARALLEL, *name.split(), *arguments)
    return run("launch", [f"--nproc_per_node={number}", "--", *command])


def run_job(what: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs a benchmark's command in separate processes, and waits for its end.

    Args:
        what: The run's name, for an error.
        command: The command.
        environment: Environment variables to add to this process's.

    Raises:
        StartError: If it fails, or has not ended after 15 minutes.
    """
    try:
        process = subprocess.run(
            command,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_DEADLINE_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise StartError(
            f"{what} did not finish within {_DEADLINE_SECONDS:.0f} s. Use fewer --steps, or a "
            "smaller batch."
        ) from error
    if process.returncode:
        raise StartError(
            f"{what} failed with exit code {process.returncode}:\n{process.stdout[-3000:]}"
        )
