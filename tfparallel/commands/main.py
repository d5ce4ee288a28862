"""The `tfparallel` command: dispatches to a sub-command.

TensorFlow is not imported here: usage and errors appear at once.
"""

import difflib
import importlib
import platform
import sys
from collections.abc import Sequence

_TOPICS = {
    "a task": {
        "init": "writes a task file: a model, how it is compiled, and its data",
        "train": "trains a task file on one or more devices, as --parallel says",
        "check": "compares a parallel run with a single-device run, variable by variable",
        "plan": "predicts memory and step time for each device mesh, and prints the best command",
    },
    "several processes and hosts": {
        "launch": "starts, watches, restarts and stops the workers of a job",
        "trace": "shows what each worker of a job did last, and which one the others waited for",
    },
    "a machine": {
        "doctor": "checks this host, its cluster and its versions for problems",
        "bench": "benchmarks collectives, pipelines, and scaling over workers",
    },
}
_COMMANDS = {name: job for topic in _TOPICS.values() for name, job in topic.items()}
# Names that other tools use.
_ELSEWHERE = {
    **dict.fromkeys(("run", "fit", "start"), "train"), "new": "init", "create": "init",
    **dict.fromkeys(("verify", "test", "compare"), "check"), "benchmark": "bench",
    **dict.fromkeys(("torchrun", "mpirun", "horovodrun", "spawn"), "launch"), "info": "doctor",
}  # fmt: skip
_OF_TWO_WORDS = ("bench pipeline", "bench pipeline_job", "bench train", "plan all_reduce")

_USAGE = """\
usage: tfparallel COMMAND [ARGUMENTS] [--flags]

example:
  tfparallel init task.py --kind=image
  tfparallel train task.py --parallel=data --num_devices=2 --epochs=3
  tfparallel launch --nproc_per_node=2 -- python my_script.py
{commands}

A task file is a Python file with build_model(), compile_model(model) and
load_data() -> (train, validation). It may also define EPOCHS and callbacks().

`tfparallel COMMAND --help` shows an example and the flags of a command; `bench all_reduce`,
`bench pipeline`, `bench train` and `plan all_reduce` have flags of their own. Dashes may stand
for underscores. `tfparallel --version` names the versions.
"""


def usage() -> str:
    """Returns the text of `tfparallel --help`."""
    width = max(len(name) for name in _COMMANDS)
    lines = []
    for topic, commands in _TOPICS.items():
        lines += ["", f"{topic}:"]
        lines += [f"  {name:<{width}}  {job}" for name, job in commands.items()]
    return _USAGE.format(commands="\n".join(lines))


def versions() -> str:
    """Returns the text of `tfparallel --version`: the versions of tfparallel and its base."""
    # The import takes twenty milliseconds, which `--help` can save.
    installed = importlib.import_module("tfparallel.installed")
    parts = []
    for name in ("tfparallel", "tensorflow", "keras"):
        version = installed.version_of(name)
        parts.append(f"{name}: not installed" if version is None else f"{name} {version}")
    return ", ".join([*parts, f"Python {platform.python_version()}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command.

    Args:
        argv: The arguments after the program's name; `sys.argv[1:]` if None.

    Returns:
        The exit code: 0 for success, 1 if the job failed, 2 for a usage error.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[1:] and arguments[0] in ("help", "-h", "--help"):
        arguments = [*arguments[1:], "--help"]
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
    two_words = f"{name} {rest[0]}" if rest else name
    if (problem := _unknown(arguments) or _misspelt(two_words)) is not None:
        print(f"tfparallel: {problem}", file=sys.stderr)
        return 2
    if two_words in _OF_TWO_WORDS:
        name, rest = two_words, rest[1:]
    # The general `--help` does not need the modules behind the table of flags.
    return importlib.import_module("tfparallel.command_line.runner").run(name, rest)


def _unknown(arguments: Sequence[str]) -> str | None:
    """Returns the problem of a first word that is no command."""
    name = arguments[0]
    if name in _COMMANDS:
        return None
    alike = difflib.get_close_matches(name.lower(), _COMMANDS, n=1)
    later = [word for word in arguments if word in _COMMANDS]
    if name.endswith(".py"):
        alike = [f"train {name}"]
    elif name in _ELSEWHERE:
        alike = [_ELSEWHERE[name]]
    fix = "`tfparallel --help` explains them."
    if alike:
        fix = f"Did you mean `tfparallel {alike[0]}`?"
    if name.startswith("-") and later:
        fix = f"Flags come after the command: `tfparallel {later[0]} …`."
    names = ", ".join(_COMMANDS)
    return f"unknown command; it must be one of {names}. Received: {name!r}. {fix}"


def _misspelt(two_words: str) -> str | None:
    """Returns the problem of a command of two words whose second is misspelt."""
    alike = difflib.get_close_matches(two_words, _OF_TWO_WORDS, n=1, cutoff=0.85)
    if not alike or two_words == alike[0] or two_words.endswith(".py"):
        return None
    return f"unknown command. Received: {two_words!r}. Did you mean `tfparallel {alike[0]}`?"
