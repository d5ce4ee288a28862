"""What the programs share: help, usage errors, sizes and paths on the command line."""

import importlib.util
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from tfparallel.cluster.preemption import TRY_AGAIN
from tfparallel.cluster.worker_error import say_why
from tfparallel.commands.help import Command, help_text

__all__ = [
    "Command",
    "LostError",
    "StartError",
    "UsageError",
    "parse",
    "parse_checked",
    "parse_flags_alone",
    "parse_positional",
    "path_problems",
    "plot_problems",
    "report_flag",
    "resolved",
    "run_command",
]


# What users of other tools type, and what it is here, where the command has it.
_ELSEWHERE = {
    "batch_size": ["global_batch_size"],
    "gpus": ["num_devices", "nproc_per_node"],
    "hosts": ["nnodes"],
    "master_addr": ["rdzv_endpoint"],
    "master_port": ["rdzv_endpoint"],
    "mode": ["parallel"],
    "n": ["nproc_per_node", "num_devices"],
    "nodes": ["nnodes"],
    "np": ["nproc_per_node"],
    "num_gpus": ["num_devices", "nproc_per_node"],
    "num_nodes": ["nnodes"],
    "num_processes": ["nproc_per_node"],
    "output": ["save", "report"],
    "output_dir": ["checkpoint_dir", "log_dir"],
    "parallelism": ["parallel"],
    "per_device_batch_size": ["global_batch_size"],
    "steps": ["steps_per_epoch"],
    "workers": ["num_workers", "nproc_per_node"],
}
_IN_TASK = {
    "learning_rate": "the optimizer's, in `compile_model(model)`",
    "loss": "in `compile_model(model)`",
    "lr": "the optimizer's, in `compile_model(model)`",
    "metrics": "in `compile_model(model)`",
    "optimizer": "in `compile_model(model)`",
}


class UsageError(Exception):
    """A mistake on the command line; its text is shown and the exit code is 2."""


class StartError(Exception):
    """The workers of a job could not start together; its text is shown and the exit code is 1."""


class LostError(Exception):
    """Another worker has ended; the text is shown and this process ends at once.

    Its code is 75: the same command may go on.
    """


def parse_positional(
    command: Command, values: flags.FlagValues, arguments: Sequence[str]
) -> list[str] | None:
    """Parses the arguments of one program.

    Args:
        command: The program's name and texts.
        values: Its flags; filled here.
        arguments: What stands after the sub-command.

    Returns:
        What is no flag, or None if help was asked for (and printed).

    Raises:
        UsageError: If a flag is unknown or has a bad value.
    """
    if any(argument in ("-h", "-help", "--help") for argument in arguments):
        print(help_text(command, values))
        return None
    try:
        return values([command.name, *(_spelled(values, text) for text in arguments)])[1:]
    except flags.UnrecognizedFlagError as error:
        raise UsageError(_unknown(command, values, str(error), error.flagname)) from error
    except flags.IllegalFlagValueError as error:
        raise UsageError(_in_words(str(error))) from error
    except flags.Error as error:
        raise UsageError(str(error)) from error


def _in_words(told):
    """What absl says of a value that cannot be, as a sentence."""
    found = re.fullmatch(r"flag --(\w+)=(.*?): (.*)", told, re.DOTALL)
    if found is None:
        return told
    name, value, problem = found.groups()
    kinds = {
        "invalid literal for int": "a whole number",
        "could not convert": "a number",
        "('Non-boolean": "true or false",
    }
    required = next((kind for begin, kind in kinds.items() if problem.startswith(begin)), None)
    if (whole := re.fullmatch(r"(.*) is required", problem)) is not None:
        required = whole[1]
    if (choices := re.fullmatch(r"value should be one of <(.*)>", problem)) is not None:
        required = f"one of {choices[1].replace('|', ', ')}"
    if required is None:
        return told
    return f"--{name} must be {required}. Received: --{name}={value}."


def _unknown(command, values, told, name):
    """What absl says of a flag that there is not, as a sentence."""
    alike = re.search(r"Did you mean: (.*?) ?\?", told)
    meant = [f"--{each}" for each in _ELSEWHERE.get(name.replace("-", "_"), ()) if each in values]
    if meant:
        fix = f"Here it is {' or '.join(meant)}."
    elif name in _IN_TASK and "TASK" in command.arguments:
        fix = f"The task file says it: {_IN_TASK[name]}."
    elif alike is None:
        fix = f"`tfparallel {command.name} --help` shows the flags."
        if "PROGRAM" in command.arguments:
            fix += f" A program's own flags come after the program: `-- PROGRAM --{name}`."
    else:
        fix = "Did you mean " + " or ".join(f"--{each}" for each in alike[1].split(" or ")) + "?"
    return f"--{name} is no flag of `{command.name}`. {fix}"


def _spelled(values, argument):
    """A flag that is written with dashes, as torchrun's may be, with underscores."""
    found = re.fullmatch(r"--(no-)?([a-z][a-z0-9-]*)(=.*)?", argument, re.DOTALL)
    if found is None or "-" not in (found[1] or "") + found[2]:
        return argument
    name = found[2].replace("-", "_")
    whole = (found[1] or "").replace("-", "_") + name
    if whole in values:
        return f"--{whole}{found[3] or ''}"
    return f"--{'no' * bool(found[1])}{name}{found[3] or ''}" if name in values else argument


def parse(command: Command, values: flags.FlagValues, arguments: Sequence[str]) -> str | None:
    """Parses the arguments of a program on one task file, whose path it returns.

    As `parse_positional`; it is a `UsageError` too if there is not exactly one task file.
    """
    positional = parse_positional(command, values, arguments)
    if positional is None:
        return None
    if len(positional) != 1:
        raise UsageError(
            f"tfparallel {command.name} takes exactly one task file. "
            f"Received: {positional}. Example: {command.example}"
        )
    return positional[0]


def parse_flags_alone(
    command: Command,
    values: flags.FlagValues,
    problems_of: Callable[[flags.FlagValues], list[str]],
    arguments: Sequence[str],
) -> bool:
    """Parses the arguments of a program that takes nothing but flags.

    Args:
        command: The program's name and texts.
        values: Its flags; filled here.
        problems_of: Returns what is wrong with them.
        arguments: What stands after the sub-command.

    Returns:
        Whether the program is to run; False if help was asked for (and printed).

    Raises:
        UsageError: If there is anything else, or something is wrong with a flag.
    """

    def problems(values, positional):
        found = problems_of(values)
        if positional:
            program = f"tfparallel {command.name} {command.arguments}".removesuffix(" [--flags]")
            told = f"{program} takes flags alone. Received: {positional}. Example: "
            found.insert(0, told + command.example)
        return found

    return parse_checked(command, values, problems, arguments) is not None


def parse_checked(
    command: Command,
    values: flags.FlagValues,
    problems_of: Callable[[flags.FlagValues, list[str]], list[str]],
    arguments: Sequence[str],
) -> list[str] | None:
    """Parses the arguments of one program, and tells all that is wrong with them at once.

    Args:
        command: The program's name and texts.
        values: Its flags; filled here.
        problems_of: Returns what is wrong with the flags, and with what is no flag.
        arguments: What stands after the sub-command.

    Returns:
        What is no flag, or None if help was asked for (and printed).

    Raises:
        UsageError: If something is wrong.
    """
    positional = parse_positional(command, values, arguments)
    if positional is None:
        return None
    if problems := problems_of(values, positional):
        raise UsageError("\n".join(problems))
    return positional


def path_problems(name: str, path: str | None, suffix: str) -> list[str]:
    """Returns why the file of the flag `name` could not be written at the end."""
    if path is None:
        return []
    problems = []
    if not path.endswith(suffix):
        problems.append(f"The path must end in {suffix}. Received: --{name}={path}.")
    parent = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        problems.append(f"The path is a folder; a file is required. Received: --{name}={path}.")
    elif not os.path.isdir(parent):
        problems.append(
            f"The folder to write to does not exist. Received: --{name}={path}. "
            f"Create it: mkdir -p {os.path.dirname(path)}"
        )
    elif not os.access(parent, os.W_OK):
        problems.append(f"The folder cannot be written to. Received: --{name}={path}.")
    return problems


def report_flag(values: flags.FlagValues, text: str) -> None:
    """Adds --report, and --json as another name of it, which some programs had alone."""
    flags.DEFINE_string("report", None, text, flag_values=values)
    flags.DEFINE_alias("json", "report", values)


def plot_problems(path: str | None) -> list[str]:
    """Returns why the picture that --plot asks for could not be drawn or written at the end."""
    problems = path_problems("plot", path, ".png")
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        problems.append(
            f"--plot needs matplotlib, which is not installed. Received: --plot={path}. Install "
            "it: pip install 'tfparallel[bench]'"
        )
    return problems


def resolved(values: flags.FlagValues) -> dict[str, Any]:
    """Returns every flag with its value, those left at None aside."""
    every = {name: values[name].value for name in sorted(values) if name not in ("?", "json")}
    return {name: value for name, value in every.items() if value is not None}


def run_command(name: str, run: Callable[[], int], input_errors: tuple[type, ...]) -> int:
    """Runs a program's body and turns the user's mistakes into exit code 2.

    Args:
        name: The sub-command, for the message.
        run: The body.
        input_errors: The exceptions that are mistakes in the input, beside
            `UsageError`. Anything else keeps its traceback.

    Returns:
        The exit code.
    """
    try:
        return _flushed(name, run())
    except BrokenPipeError:
        # Whoever read the output has gone (`| head`).
        _drop_output()
        return 128 + signal.SIGPIPE
    except (UsageError, *input_errors) as error:
        cause = error.__cause__
        if cause is not None and not isinstance(error, UsageError):
            traceback.print_exception(cause)
        say_why(f"tfparallel {name}: {error}")
        return 2
    except StartError as error:
        say_why(f"tfparallel {name}: {error}")
        return 1
    except LostError as error:
        say_why(f"tfparallel {name}: {error}")
        sys.stdout.flush()
        sys.stderr.flush()
        # Past TensorFlow's own end, which waits seconds for the workers that are gone.
        os._exit(TRY_AGAIN)


def _flushed(name, code):
    """Writes what is left of the output; returns the exit code, 1 where a full disk spoils a 0."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        if code == 0:
            print(f"tfparallel {name}: the output is not whole: {error}", file=sys.stderr)
            return 1
    return code


def _drop_output():
    """Drops what cannot be written: at its end Python would try again, and fail with code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
