"""`tfparallel init [FILE]`: writes a task file that runs, by flags or by a short dialogue."""

import importlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

from absl import flags

from tfparallel.command_line.exits import UsageError
from tfparallel.command_line.flag_table import flags_of
from tfparallel.task_files.kinds import KINDS, SAMPLE, data_problems

__all__ = ["problems", "run"]

_PREDICTS = {name: kind.predicts for name, kind in KINDS.items()}
_DEFAULTS = {"kind": "image", "data": SAMPLE, "parallel": "data"}


def run(values: flags.FlagValues, positional: Sequence[str]) -> int:
    """Writes the file, and returns the exit code."""
    path = _path(positional)
    asked = _asked(values)
    data = _data(asked, path, values.target)
    parallelism = f"--parallel={asked['parallel']}"
    if asked["parallel"] != "none":
        parallelism += " --num_devices=2"
    commands = [f"tfparallel train {shlex.quote(path)} {parallelism}"]
    if asked["parallel"] != "none":
        commands.append(f"tfparallel check {shlex.quote(path)} {parallelism}")
    templates = importlib.import_module("tfparallel.task_files.templates")
    text = templates.task_file(asked["kind"], data, commands)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    found = data.summary if data else "a sample of data"
    print(f"wrote {path}: {_PREDICTS[asked['kind']]}; {found}")
    print("next:\n" + "\n".join(f"  {command}" for command in commands))
    return 0


def _path(positional) -> str:
    return positional[0] if positional else "task.py"


def problems(values: flags.FlagValues, positional: Sequence[str]) -> list[str]:
    """What is wrong with the file to write, and with the flags beyond their rows."""
    problems = _path_problems(positional, _path(positional), values.force)
    if values.target is not None and not (values.data or "").endswith(".csv"):
        problems.append(
            f"--target is the column of a .csv file. Received: --target={values.target} with "
            f"--data={values.data or SAMPLE}. Drop it, or add --data=FILE.csv."
        )
    return problems


def _path_problems(positional, path, force) -> list[str]:
    if len(positional) > 1:
        return [
            f"One file is written. Received: {list(positional)}. Example: tfparallel init task.py"
        ]
    if not path.endswith(".py"):
        fix = ""
        if path.endswith(tuple(ending for kind in KINDS.values() for ending in kind.endings)):
            fix = f" Name the data by a flag: tfparallel init task.py --data={path}"
        return [f"A task file is Python and ends in .py. Received: {path!r}.{fix}"]
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
        choices = flags_of("init")["parallel"].choices
        answers["parallel"] = _choose("How will it be trained first?", "parallel", choices)
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
    data_files = importlib.import_module("tfparallel.task_files.data_files")
    try:
        return data_files.read_data_file(asked["kind"], asked["data"], path, target)
    except data_files.DataFileError as error:
        raise UsageError(str(error)) from error
