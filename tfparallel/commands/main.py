"""The `tfparallel` command: finds the program for a sub-command and runs it.

TensorFlow is not imported here, so that usage and mistakes show at once.
"""

import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Sequence

__all__ = ["main"]

_COMMANDS = {
    "train": "trains a task file under the form that --parallel names",
    "check": "proves that a form trains to the same weights as one device",
    "launch": "starts, watches, restarts and stops the workers of a job",
    "bench": "measures collectives (which is fast here, and is it right), pipelines, and scaling",
    "plan": "says how many devices a task needs, and which layers go where",
    "trace": "says what each worker of a job did last, and who was waited for",
    "doctor": "says what will fail on this host, in this cluster, with these versions",
}

# What a first argument makes another program.
_PROGRAMS = {
    ("bench", "pipeline"): "bench_pipeline",
    ("bench", "train"): "bench_train",
    ("plan", "all_reduce"): "plan_all_reduce",
}

_USAGE = """\
usage: tfparallel COMMAND TASK.py [--flags]
       tfparallel launch [--flags] -- PROGRAM [ARGUMENTS]
       tfparallel bench all_reduce [TASK.py] [--flags]
       tfparallel bench pipeline TASK.py [--flags]
       tfparallel bench train TASK.py [--flags]
       tfparallel plan all_reduce [--flags]
       tfparallel trace FOLDER [--flags]
       tfparallel doctor [--flags]

commands:
{commands}

A task file is a Python file with build_model(), compile_model(model) and
load_data() -> (train, validation).

example:
  tfparallel train models/digits_cnn.py --parallel=data --num_devices=2 --epochs=3

`tfparallel COMMAND --help` lists the flags of a command; dashes may stand for underscores.
`tfparallel --version` names the versions.
"""


def usage() -> str:
    """Returns the text of `tfparallel --help`."""
    width = max(len(name) for name in _COMMANDS)
    lines = [f"  {name:<{width}}  {job}" for name, job in _COMMANDS.items()]
    return _USAGE.format(commands="\n".join(lines))


def versions() -> str:
    """Returns the text of `tfparallel --version`: its own, and of what it stands on."""
    found = []
    for name in ("tfparallel", "tensorflow", "keras"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name}: not installed")
    return ", ".join([*found, f"Python {platform.python_version()}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command.

    Args:
        argv: The arguments after the program's name; `sys.argv[1:]` if None.

    Returns:
        The exit code: 0 for success, 1 if the job failed, 2 for a usage error.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments and arguments[0] in ("--version", "version"):
        print(versions())
        return 0
    if not arguments:
        print(usage(), file=sys.stderr)
        return 2
    name, *rest = arguments
    if name not in _COMMANDS:
        print(
            f"tfparallel: no such command; it must be one of {', '.join(_COMMANDS)}. "
            f"Received: {name!r}.\n\n{usage()}",
            file=sys.stderr,
        )
        return 2
    if (program := _PROGRAMS.get((name, *rest[:1]))) is not None:
        name, rest = program, rest[1:]
    command = importlib.import_module(f"tfparallel.commands.{name}")
    return command.main(rest)
