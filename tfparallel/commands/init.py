"""`tfparallel init [FILE]`: writes a task file that runs, by flags or by a short dialogue."""

import importlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

from absl import flags

from tfparallel.commands.flags import (
    Command,
    UsageError,
    parse_checked,
    run_command,
)
from tfparallel.commands.help import define_choice
from tfparallel.commands.task_kinds import KINDS, SAMPLE, data_problems

__all__ = ["main"]

_COMMAND = Command(
    name="init",
    summary="Writes a task file: a small model, how it is compiled, and its data, a sample or a "
    "file of your own. It runs at once with `tfparallel train`. At a terminal, what no flag says "
    "is asked.",
    example="tfparallel init task.py --kind=table --data=measurements.csv",
    arguments="[FILE.py] [--flags]",
)
_PREDICTS = {name: kind.predicts for name, kind in KINDS.items()}
_KINDS = {
    "none": "one device",
    "data": "replicas of the model, on two devices",
    "model": "layers on two devices",
    "tensor": "layers split over two devices",
    "pipeline": "layers on two devices, with micro-batches",
}
_DEFAULTS = {"kind": "image", "data": SAMPLE, "parallel": "data"}


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    return run_command("init", lambda: _main(arguments), ())


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    define_choice(values, "kind", None, _PREDICTS, "What the model predicts.")
    flags.DEFINE_string(
        "data",
        None,
        "sample, or a file: .npz with arrays x and y, .csv with a line of names, .txt for text. "
        "Default: sample.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "target", None, "For .csv: the column to predict. Default: the last; for series the first.",
        flag_values=values,
    )  # fmt: skip
    define_choice(
        values,
        "parallel",
        None,
        _KINDS,
        "The parallelism that the commands in the file name; the file itself suits all.",
        if_absent="data",
    )
    flags.DEFINE_bool("force", False, "Write over a file that is there.", flag_values=values)
    return values


def _main(arguments: Sequence[str]) -> int:
    values = _flags()
    positional = parse_checked(_COMMAND, values, _problems, arguments)
    if positional is None:
        return 0
    path = _path(positional)
    asked = _asked(values)
    data = _data(asked, path, values.target)
    parallelism = f"--parallel={asked['parallel']}"
    if asked["parallel"] != "none":
        parallelism += " --num_devices=2"
    commands = [f"tfparallel train {shlex.quote(path)} {parallelism}"]
    if asked["parallel"] != "none":
        commands.append(f"tfparallel check {shlex.quote(path)} {parallelism}")
    templates = importlib.import_module("tfparallel.commands.task_templates")
    text = templates.task_file(asked["kind"], data, commands)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    found = data.summary if data else "a sample of data"
    print(f"wrote {path}: {_PREDICTS[asked['kind']]}; {found}")
    print("next:\n" + "\n".join(f"  {command}" for command in commands))
    return 0


def _path(positional) -> str:
    return positional[0] if positional else "task.py"


def _problems(values, positional) -> list[str]:
    problems = _path_problems(positional, _path(positional), values.force)
    if values.target is not None and not (values.data or "").endswith(".csv"):
        problems.append(
            f"--target is the column of a .csv file. Received: --target={values.target} with "
            f"--data={values.data or SAMPLE}. Drop it, or add --data=FILE.csv."
        )
    return problems


def _path_problems(positional, path, force) -> list[str]:
    if len(positional) > 1:
        return [f"One file is written. Received: {positional}. Example: {_COMMAND.example}"]
    if not path.endswith(".py"):
        return [f"A task file is Python and ends in .py. Received: {path!r}."]
    if os.path.isdir(path):
        return [f"A file is required. Received: the folder {path!r}."]
    if os.path.exists(path) and not force:
        return [f"The file exists already. Received: {path!r}. Name another, or add --force."]
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        return [f"The folder to write to does not exist. Received: {path!r}. mkdir -p {folder}"]
    return []


def _asked(values) -> dict[str, str]:
    """What the flags say, and where they do not, the person at the terminal."""
    given = {name: getattr(values, name) for name in _DEFAULTS}
    if values.kind is None and values.data is not None:
        # The file's ending may tell.
        fitting = [n for n, kind in KINDS.items() if values.data.endswith(tuple(kind.endings))]
        given["kind"] = fitting[0] if len(fitting) == 1 else None
    if given["kind"] is None and not sys.stdin.isatty():
        raise UsageError(
            "--kind is required when there is no terminal. Received: no --kind. Add "
            f"--kind={'|'.join(KINDS)}."
        )
    if given["kind"] is not None:
        # A command line that says the most important thing asks nothing.
        return {name: value or _DEFAULTS[name] for name, value in given.items()}
    kind = _choose("What is to be predicted?", "kind", _PREDICTS)
    answers = {"kind": kind}
    if given["data"] is None:
        endings = " or ".join(KINDS[kind].endings)
        print(f"Data: a file of yours ({endings}), or a sample that runs at once?")
        answers["data"] = _ask("data", SAMPLE, lambda text: data_problems(kind, text))
    if given["parallel"] is None:
        answers["parallel"] = _choose("How will it be trained first?", "parallel", _KINDS)
    return {name: answers.get(name) or given[name] for name in _DEFAULTS}


def _choose(question: str, name: str, choices: Mapping[str, str]) -> str:
    longest = max(map(len, choices))
    print(question)
    for choice, meaning in choices.items():
        print(f"  {choice.ljust(longest)}  {meaning}")
    return _ask(
        name,
        _DEFAULTS[name],
        lambda text: [] if text in choices else [f"It must be one of {', '.join(choices)}."],
    )


def _ask(name: str, default: str, problems_of: Callable[[str], list[str]]) -> str:
    while True:
        try:
            answer = input(f"{name} [{default}]: ").strip() or default
        except EOFError:
            raise UsageError(f"No answer was given. Received: no --{name}.") from None
        if not (problems := problems_of(answer)):
            return answer
        print("\n".join(problems))


def _data(asked, path, target):
    if asked["data"] == SAMPLE:
        return None
    if problems := data_problems(asked["kind"], asked["data"]):
        raise UsageError("\n".join(problems))
    data_files = importlib.import_module("tfparallel.commands.data_files")
    try:
        return data_files.read_data_file(asked["kind"], asked["data"], path, target)
    except data_files.DataFileError as error:
        raise UsageError(str(error)) from error
