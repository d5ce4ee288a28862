"""`tfparallel init [FILE]`: writes a task file that runs, by flags or by a short dialogue."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags

from tfparallel.commands.flags import (
    Command,
    UsageError,
    parse_positional,
    run_command,
)
from tfparallel.commands.help import define_choice

__all__ = ["main"]

_COMMAND = Command(
    name="init",
    summary="Writes a task file: a small model, how it is compiled, and its data, a sample or a "
    "file of your own. It runs at once with `tfparallel train`. At a terminal, what no flag says "
    "is asked.",
    example="tfparallel init task.py --kind=table --data=measurements.csv",
    arguments="[FILE.py] [--flags]",
)
_KINDS = {
    "image": "one class for each image",
    "table": "a column of a table from the others",
    "text": "the next character of a text",
    "series": "the next value of a time series",
}
_FORMS = {
    "none": "one device",
    "data": "replicas of the model, on two devices",
    "model": "layers on two devices",
    "tensor": "layers split over two devices",
    "pipeline": "layers on two devices, with micro-batches",
}
_DEFAULTS = {"kind": "image", "data": "sample", "parallel": "data"}


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    return run_command("init", lambda: _main(arguments), ())


def _flags() -> flags.FlagValues:
    values = flags.FlagValues()
    define_choice(values, "kind", None, _KINDS, "What the model predicts.")
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
        _FORMS,
        "The form that the commands in the file name; the file itself suits all.",
        if_absent="data",
    )
    flags.DEFINE_bool("force", False, "Write over a file that is there.", flag_values=values)
    return values


def _main(arguments: Sequence[str]) -> int:
    values = _flags()
    positional = parse_positional(_COMMAND, values, arguments)
    if positional is None:
        return 0
    path = positional[0] if positional else "task.py"
    problems = _path_problems(positional, path, values.force) + _problems(values)
    if problems:
        raise UsageError("\n".join(problems))
    templates = importlib.import_module("tfparallel.commands.task_templates")
    asked = _asked(values, templates.KINDS)
    data = _data(asked, templates.KINDS[asked["kind"]], path, values.target)
    form = f"--parallel={asked['parallel']}"
    if asked["parallel"] != "none":
        form += " --num_devices=2"
    commands = [f"tfparallel train {path} {form}"]
    if asked["parallel"] != "none":
        commands.append(f"tfparallel check {path} {form}")
    text = templates.task_file(asked["kind"], data, commands)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    print(f"wrote {path}: {_KINDS[asked['kind']]}; {data.summary if data else 'a sample of data'}")
    print("next:\n" + "\n".join(f"  {command}" for command in commands))
    return 0


def _problems(values) -> list[str]:
    if values.target is None or (values.data or "").endswith(".csv"):
        return []
    return [
        f"--target is the column of a .csv file. Received: --target={values.target} with "
        f"--data={values.data or 'sample'}. Drop it, or add --data=FILE.csv."
    ]


def _path_problems(positional, path, force) -> list[str]:
    if len(positional) > 1:
        return [f"One file is written. Received: {positional}. Example: {_COMMAND.example}"]
    if not path.endswith(".py"):
        return [f"A task file is Python and ends in .py. Received: {path!r}."]
    if os.path.isdir(path):
        return [f"A file is required. Received: the folder {path!r}."]
    if os.path.exists(path) and not force:
        return [f"There is such a file. Received: {path!r}. Name another, or add --force."]
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        return [f"The folder to write to does not exist. Received: {path!r}. mkdir -p {folder}"]
    return []


def _asked(values, kinds: Mapping[str, Any]) -> dict[str, str]:
    """What the flags say, and where they do not, the person at the terminal."""
    given = {name: getattr(values, name) for name in _DEFAULTS}
    if values.kind is None and values.data is not None:
        # The file's ending may tell.
        fitting = [name for name, kind in kinds.items() if values.data.endswith(kind.endings)]
        given["kind"] = fitting[0] if len(fitting) == 1 else None
    if given["kind"] is None and not sys.stdin.isatty():
        raise UsageError(
            "What the model predicts is required where nobody can be asked. Received: no --kind. "
            f"Add --kind={'|'.join(_KINDS)}."
        )
    if given["kind"] is not None:
        # A command line that says the most important thing asks nothing.
        return {name: value or _DEFAULTS[name] for name, value in given.items()}
    answers = {"kind": _choose("What is to be predicted?", "kind", _KINDS)}
    endings = kinds[answers["kind"]].endings
    if given["data"] is None:
        print(f"Data: a file of yours ({' or '.join(endings)}), or a sample that runs at once?")
        answers["data"] = _ask("data", "sample", lambda text: _wrong_data(text, endings))
    if given["parallel"] is None:
        answers["parallel"] = _choose("How will it be trained first?", "parallel", _FORMS)
    return {name: answers.get(name) or given[name] for name in _DEFAULTS}


def _choose(question: str, name: str, choices: Mapping[str, str]) -> str:
    longest = max(map(len, choices))
    print(question)
    for choice, meaning in choices.items():
        print(f"  {choice.ljust(longest)}  {meaning}")
    return _ask(
        name,
        _DEFAULTS[name],
        lambda text: None if text in choices else f"It must be one of {', '.join(choices)}.",
    )


def _ask(name: str, default: str, wrong: Callable[[str], str | None]) -> str:
    while True:
        try:
            answer = input(f"{name} [{default}]: ").strip() or default
        except EOFError:
            raise UsageError(f"No answer was given. Received: no --{name}.") from None
        if (told := wrong(answer)) is None:
            return answer
        print(told)


def _wrong_data(text, endings) -> str | None:
    if text == "sample":
        return None
    if not text.endswith(tuple(endings)):
        return f"It must be sample, or end in {' or '.join(endings)}."
    return None if os.path.isfile(text) else "There is no such file."


def _data(asked, kind, path, target):
    if asked["data"] == "sample":
        return None
    if not asked["data"].endswith(tuple(kind.endings)):
        raise UsageError(
            f"For --kind={asked['kind']} data must be sample, or a file that ends in "
            f"{' or '.join(kind.endings)} ({kind.form_of_data}). Received: --data={asked['data']}."
        )
    data_files = importlib.import_module("tfparallel.commands.data_files")
    try:
        return data_files.read_data_file(asked["kind"], asked["data"], path, target)
    except data_files.DataFileError as error:
        raise UsageError(str(error)) from error
