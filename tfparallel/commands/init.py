"""`tfparallel init [FILE]`: writes a runnable task file, from flags or a short dialogue."""

import importlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

from absl import flags

from tfparallel.command_line.exits import UsageError
from tfparallel.command_line.flag_table import flags_of
from tfparallel.starter_tasks.kinds import KINDS, SAMPLE, data_problems

_PREDICTS = {name: kind.predicts for name, kind in KINDS.items()}
_DEFAULTS = {"kind": "image", "data": SAMPLE, "parallel": "data"}


def run(values: flags.FlagValues, positional: Sequence[str]) -> int:
    """Writes the file, and returns the exit code."""
    path = _path(positional)
    answers = _answers(values)
    data = _data(answers, path, values.target)
    parallelism = f"--parallel={answers['parallel']}"
    if answers["parallel"] != "none":
        parallelism += " --num_devices=2"
    commands = [f"tfparallel train {shlex.quote(path)} {parallelism}"]
    if answers["parallel"] != "none":
        commands.append(f"tfparallel check {shlex.quote(path)} {parallelism}")
    templates = importlib.import_module("tfparallel.starter_tasks.templates")
    text = templates.task_file(answers["kind"], data, commands)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    summary = data.summary if data else "sample data"
    print(f"wrote {path}: {_PREDICTS[answers['kind']]}; {summary}")
    print("next:\n" + "\n".join(f"  {command}" for command in commands))
    return 0


def _path(positional) -> str:
    return positional[0] if positional else "task.py"


def problems(values: flags.FlagValues, positional: Sequence[str]) -> list[str]:
    """Returns the problems of the output file, and of the flags beyond their rows."""
    problems = _path_problems(positional, _path(positional), values.force)
    if values.target is not None and not (values.data or "").endswith(".csv"):
        problems.append(
            f"--target names a column of a .csv file. Received: --target={values.target} with "
            f"--data={values.data or SAMPLE}. Drop it, or add --data=FILE.csv."
        )
    return problems


def _path_problems(positional, path, force) -> list[str]:
    if len(positional) > 1:
        return [
            f"`tfparallel init` writes one file. Received: {list(positional)}. Example: tfparallel "
            "init task.py"
        ]
    if not path.endswith(".py"):
        fix = ""
        if path.endswith(tuple(ending for kind in KINDS.values() for ending in kind.endings)):
            fix = f" Pass the data with a flag: tfparallel init task.py --data={path}"
        return [f"A task file is a Python file; its name must end in .py. Received: {path!r}.{fix}"]
    if os.path.isdir(path):
        return [f"A file is required. Received: the folder {path!r}."]
    if os.path.exists(path) and not force:
        return [
            f"The file already exists. Received: {path!r}. Choose another name, or add --force."
        ]
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        return [
            f"The output folder does not exist. Received: {path!r}. Create it: mkdir -p {folder}"
        ]
    return []


def _answers(values) -> dict[str, str]:
    """Returns the values of the flags; asks the user at the terminal for missing ones."""
    flag_values = {name: getattr(values, name) for name in _DEFAULTS}
    if values.kind is None and values.data is not None:
        # The file's ending may identify the kind.
        kinds = [n for n, kind in KINDS.items() if values.data.endswith(tuple(kind.endings))]
        flag_values["kind"] = kinds[0] if len(kinds) == 1 else None
    if flag_values["kind"] is None and not sys.stdin.isatty():
        raise UsageError(
            "Without a terminal, --kind is required. Received: no --kind. Add "
            f"--kind={'|'.join(KINDS)}."
        )
    if flag_values["kind"] is not None:
        # With --kind on the command line, do not ask.
        return {name: value or _DEFAULTS[name] for name, value in flag_values.items()}
    kind = _choose("What should the model predict?", "kind", _PREDICTS)
    answers = {"kind": kind}
    if flag_values["data"] is None:
        endings = " or ".join(KINDS[kind].endings)
        print(f"Data: your own file ({endings}), or a ready-made sample?")
        answers["data"] = _ask("data", SAMPLE, lambda text: data_problems(kind, text))
    if flag_values["parallel"] is None:
        choices = flags_of("init")["parallel"].choices
        answers["parallel"] = _choose("How do you want to train it first?", "parallel", choices)
    return {name: answers.get(name) or flag_values[name] for name in _DEFAULTS}


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


def _data(answers, path, target):
    if answers["data"] == SAMPLE:
        return None
    if problems := data_problems(answers["kind"], answers["data"]):
        raise UsageError("\n".join(problems))
    data_files = importlib.import_module("tfparallel.starter_tasks.data_files")
    try:
        return data_files.read_data_file(answers["kind"], answers["data"], path, target)
    except data_files.DataFileError as error:
        raise UsageError(str(error)) from error
