"""What the programs share: help, usage errors, and the flags of those that take a task file."""

import dataclasses
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from tfparallel.commands.pipeline_flags import pipeline_flags, pipeline_problems

__all__ = [
    "Command",
    "LostError",
    "StartError",
    "UsageError",
    "balance_flags",
    "bucket_bytes",
    "common_flags",
    "common_problems",
    "device_memory",
    "device_memory_problems",
    "help_text",
    "parse",
    "parse_bytes",
    "path_problems",
    "resolved",
    "run_command",
]

_FORMS = ("none", "data", "model", "tensor", "pipeline")
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class UsageError(Exception):
    """A mistake on the command line; its text is shown and the exit code is 2."""


class StartError(Exception):
    """The workers of a job could not start together; its text is shown and the exit code is 1."""


class LostError(Exception):
    """Another worker has ended; the text is shown and this process ends at once, with code 1."""


@dataclasses.dataclass(frozen=True)
class Command:
    """What `--help` says about one program.

    Attributes:
        name: The sub-command.
        summary: What it does, one sentence.
        example: A command line that can be pasted.
        arguments: What stands behind the name.
    """

    name: str
    summary: str
    example: str
    arguments: str = "TASK.py [--flags]"


def common_flags() -> flags.FlagValues:
    """Returns a fresh set of flags that holds those common to all programs."""
    values = flags.FlagValues()
    flags.DEFINE_enum(
        "parallel",
        "data",
        _FORMS,
        "The form: none is one device and plain Keras; data splits the batch over devices and "
        "workers; model puts layers on devices; tensor splits layers over devices; pipeline has "
        "layers on devices work on micro-batches.",
        values,
    )
    flags.DEFINE_integer(
        "num_devices", None, "How many devices; the CPU is split as needed.", flag_values=values
    )
    flags.DEFINE_enum(
        "device_type", "auto", ("auto", "cpu", "gpu"), "Which devices to count.", values
    )
    flags.DEFINE_enum(
        "strategy",
        "auto",
        ("auto", "mirrored", "multi_worker"),
        "For data: this process's devices, or all workers of the job that it is part of.",
        values,
    )
    flags.DEFINE_integer(
        "num_workers", None, "Start this many workers on this host.", flag_values=values
    )
    flags.DEFINE_float(
        "start_timeout", 120.0, "Seconds to wait for the other workers.", flag_values=values
    )
    flags.DEFINE_float(
        "stall_timeout",
        1800.0,
        "Seconds that a step, or the pause between two, may last before a worker of a job ends.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "allow_independent_workers",
        False,
        "Let each worker of a job train a model of its own.",
        flag_values=values,
    )
    flags.DEFINE_list("devices", None, "Devices by name, such as GPU:0,GPU:2.", flag_values=values)
    flags.DEFINE_integer(
        "global_batch_size", 64, "Examples in a step, over all devices.", flag_values=values
    )
    flags.DEFINE_string(
        "all_reduce",
        None,
        "For data: the algorithm that sums gradients, by name (`tfparallel bench all_reduce` lists "
        "those that run here), or auto for the fastest, measured; TensorFlow's default if absent. "
        "Between workers: ring, ring_tuned, nccl, mpi or one of MPI's algorithms.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "bucket_bytes",
        None,
        "Between workers: sum gradients in pieces of this size, such as 4MiB, while the rest is "
        "computed; all at once if absent.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "calibrate",
        True,
        "For --all_reduce=auto: measure at the first step if no profile was saved.",
        flag_values=values,
    )
    balance_flags(values)
    flags.DEFINE_enum(
        "convolutions",
        "channels",
        ("channels", "height"),
        "For tensor: what convolutions are split by.",
        values,
    )
    pipeline_flags(values)
    flags.DEFINE_integer(
        "seed", 0, "Fixes the initial weights and the order of the data.", flag_values=values
    )
    return values


def balance_flags(values: flags.FlagValues) -> None:
    """Adds the flags that choose where a model is cut."""
    flags.DEFINE_enum(
        "balance",
        "memory",
        ("memory", "time", "both"),
        "For model and pipeline: what the cut between the devices spreads evenly. Without the "
        "flag a pipeline is cut by time.",
        values,
    )
    flags.DEFINE_string(
        "device_memory",
        None,
        "For model and pipeline: what a stage may hold, such as 16GiB; no limit if absent.",
        flag_values=values,
    )


def device_memory(values: flags.FlagValues) -> int | None:
    """Returns what --device_memory says, in bytes."""
    return None if values.device_memory is None else parse_bytes(values.device_memory)


def bucket_bytes(values: flags.FlagValues) -> int | None:
    """Returns what --bucket_bytes says, in bytes."""
    return None if values.bucket_bytes is None else parse_bytes(values.bucket_bytes)


def device_memory_problems(values: flags.FlagValues) -> list[str]:
    """Returns what is wrong with --device_memory."""
    try:
        device_memory(values)
    except ValueError as error:
        return [f"--device_memory: {error}"]
    return []


def parse_bytes(text: str) -> int:
    """Reads a number of bytes: `"16GiB"`, `"500MB"`, `"1048576"`.

    Raises:
        ValueError: If it is none, or not above zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?) ?([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise ValueError(
            f"A number of bytes such as 16GiB, 500MB or 1048576 is required. Received: {text!r}."
        )
    return int(float(match[1]) * unit)


def parse(command: Command, values: flags.FlagValues, arguments: Sequence[str]) -> str | None:
    """Parses the arguments of one program.

    Args:
        command: The program's name and texts.
        values: Its flags; filled here.
        arguments: What stands after the sub-command.

    Returns:
        The path of the task file, or None if help was asked for (and printed).

    Raises:
        UsageError: If a flag is unknown or has a bad value, or if there is not
            exactly one task file.
    """
    if any(argument in ("-h", "-help", "--help") for argument in arguments):
        print(help_text(command, values))
        return None
    try:
        positional = values([command.name, *arguments])[1:]
    except flags.Error as error:
        raise UsageError(str(error)) from error
    if len(positional) != 1:
        raise UsageError(
            f"tfparallel {command.name} takes exactly one task file. "
            f"Received: {positional}. Example: {command.example}"
        )
    return positional[0]


def common_problems(values: flags.FlagValues) -> list[str]:
    """Returns what is wrong with the common flags, alone and together."""
    problems = []
    if values.global_batch_size < 1:
        problems.append(
            "The global batch size must be at least 1. "
            f"Received: --global_batch_size={values.global_batch_size}."
        )
    if values.num_devices is not None and values.num_devices < 1:
        problems.append(
            "The number of devices must be at least 1. "
            f"Received: --num_devices={values.num_devices}."
        )
    if not 0 <= values.seed < 2**32:
        problems.append(f"The seed must lie in [0, 2**32). Received: --seed={values.seed}.")
    if values.devices is not None and values.num_devices is not None:
        problems.append(
            "Devices are given either by count or by name, not both. "
            f"Received: --num_devices={values.num_devices}, "
            f"--devices={','.join(values.devices)}. Drop one of the two."
        )
    if values.devices is not None and values.device_type != "auto":
        problems.append(
            "Devices that are named need no type. Received: "
            f"--devices={','.join(values.devices)}, --device_type={values.device_type}. "
            "Drop --device_type."
        )
    if values.num_workers is not None and values.num_workers < 1:
        problems.append(
            "The number of workers must be at least 1. "
            f"Received: --num_workers={values.num_workers}."
        )
    if values.num_workers is not None and values.parallel in ("none", "tensor"):
        problems.append(
            f"--parallel={values.parallel} has no workers. "
            f"Received: --num_workers={values.num_workers}. Use --parallel=data or model."
        )
    for name in ("start_timeout", "stall_timeout"):
        if not getattr(values, name) > 0:
            problems.append(
                "The time to wait for other workers must be positive. "
                f"Received: --{name}={getattr(values, name)}."
            )
    if values.parallel != "data" and values.strategy != "auto":
        problems.append(
            "--strategy chooses among the forms of --parallel=data. Received: "
            f"--strategy={values.strategy} with --parallel={values.parallel}. Drop --strategy."
        )
    if values.parallel != "data" and values.all_reduce is not None:
        problems.append(
            "--all_reduce says how the replicas of --parallel=data are summed. Received: "
            f"--all_reduce={values.all_reduce} with --parallel={values.parallel}. "
            "Drop --all_reduce."
        )
    if not values.calibrate and values.all_reduce != "auto":
        problems.append(
            "--nocalibrate is for --all_reduce=auto. Received: --nocalibrate with "
            f"--all_reduce={values.all_reduce}. Drop --nocalibrate."
        )
    try:
        bucket_bytes(values)
    except ValueError as error:
        problems.append(f"--bucket_bytes: {error}")
    problems += device_memory_problems(values)
    problems += pipeline_problems(values)
    has_stages = values.parallel in ("model", "pipeline")
    if not has_stages and (values.device_memory or values.balance != "memory"):
        name = "device_memory" if values.device_memory else "balance"
        problems.append(
            f"--{name} says where --parallel=model and pipeline cut. Received: --{name}="
            f"{getattr(values, name)} with --parallel={values.parallel}. Drop --{name}."
        )
    if values.parallel != "tensor" and values.convolutions != "channels":
        problems.append(
            "--convolutions says how --parallel=tensor splits. Received: --convolutions="
            f"{values.convolutions} with --parallel={values.parallel}. Drop --convolutions."
        )
    count = len(values.devices) if values.devices is not None else values.num_devices
    if values.parallel == "none" and count is not None and count > 1:
        given = (
            f"--devices={','.join(values.devices)}"
            if values.devices is not None
            else f"--num_devices={count}"
        )
        problems.append(
            "--parallel=none trains on one device. "
            f"Received: {given}. Use --parallel=data, or one device."
        )
    return problems


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


def resolved(values: flags.FlagValues) -> dict[str, Any]:
    """Returns every flag with its value, those left at None aside."""
    every = {name: values[name].value for name in sorted(values) if name != "?"}
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
        return run()
    except (UsageError, *input_errors) as error:
        cause = error.__cause__
        if cause is not None and not isinstance(error, UsageError):
            traceback.print_exception(cause)
        print(f"tfparallel {name}: {error}", file=sys.stderr)
        return 2
    except StartError as error:
        print(f"tfparallel {name}: {error}", file=sys.stderr)
        return 1
    except LostError as error:
        print(f"tfparallel {name}: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # Past TensorFlow's own end, which waits seconds for the workers that are gone.
        os._exit(1)


def help_text(command: Command, values: flags.FlagValues) -> str:
    """Returns what `--help` shows."""
    lines = [
        f"usage: tfparallel {command.name} {command.arguments}",
        "",
        command.summary,
        "",
        "example:",
        f"  {command.example}",
        "",
        "flags:",
    ]
    for name in sorted(values):
        flag = values[name]
        choices = getattr(flag.parser, "enum_values", None)
        head = f"--{name}" + (f"={'|'.join(choices)}" if choices else "")
        # A default of 0 is worth telling, and equals False.
        has_default = flag.default is not None and flag.default is not False
        default = f" (default: {flag.default})" if has_default else ""
        lines += [f"  {head}", f"      {flag.help}{default}"]
    return "\n".join(lines)
