"""Defines and parses absl flags from the rows of the table, and reports usage errors."""

import contextlib
import difflib
import functools
import importlib.util
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags

from tfparallel import cuda_driver
from tfparallel.cluster.environment import available_cores
from tfparallel.command_line.command_table import COMMANDS
from tfparallel.command_line.exclusions import EXCLUDES
from tfparallel.command_line.exits import UsageError
from tfparallel.command_line.flag import Flag
from tfparallel.command_line.flag_table import TABLE, flags_of
from tfparallel.command_line.help import placeholder
from tfparallel.command_line.words_elsewhere import FLAGS, NEEDLESS


class Counted(int):
    """The number that a word such as "gpu" means on this host; other hosts may differ.

    Attributes:
        text: The word.
    """

    text = ""


class _Workers(flags.ArgumentParser):
    """Parses --nproc_per_node like torchrun."""

    syntactic_help = "a number, gpu, cpu or auto"

    def parse(self, argument):
        """Returns the number of workers."""
        if str(argument).removeprefix("-").isdecimal():
            return int(argument)
        num_gpus = cuda_driver.num_gpus()
        numbers = {"gpu": num_gpus, "cpu": len(available_cores())}
        numbers["auto"] = num_gpus or numbers["cpu"]
        if argument not in numbers:
            raise ValueError(f"{self.syntactic_help} is required")
        number = Counted(numbers[argument])
        number.text = argument
        return number


_DEFINE = {
    "text": flags.DEFINE_string,
    "whole": flags.DEFINE_integer,
    "real": flags.DEFINE_float,
    "switch": flags.DEFINE_bool,
    "list": flags.DEFINE_list,
    "repeated": flags.DEFINE_multi_string,
}

# Settings that belong in the task file rather than in flags.
_IN_TASK = dict.fromkeys(("loss", "metrics", "optimizer"), "in `compile_model(model)`")
_IN_TASK |= dict.fromkeys(
    ("learning_rate", "lr", "momentum", "weight_decay"), "the optimizer, in `compile_model(model)`"
)
_IN_TASK |= dict.fromkeys(
    ("data", "data_dir", "dataset", "shuffle", "validation_split"), "in `load_data()`"
)
_IN_TASK |= dict.fromkeys(("model", "dropout", "num_layers"), "in `build_model()`")
_IN_TASK |= dict.fromkeys(("early_stopping", "patience"), "in `callbacks()`")

# How other tools make a choice a flag: --use_gpu, --tensor_parallel_size.
_AROUND_CHOICE = re.compile("^(use|enable)_|_?(parallel_size|parallelism|parallel|size)$")

# A flag's text is parsed the same way in every command.
_READERS = {row.name: row.read for rows in TABLE.values() for row in rows if row.read is not None}


def defined(command: str) -> flags.FlagValues:
    """Returns the flags of a command, unparsed."""
    values = flags.FlagValues()
    for name, flag in flags_of(command).items():
        if flag.choices is not None:
            flags.DEFINE_enum(name, flag.default, tuple(flag.choices), flag.text, values)
        elif flag.kind == "workers":
            flags.DEFINE(_Workers(), name, flag.default, flag.text, values)
        else:
            _DEFINE[flag.kind](name, flag.default, flag.text, flag_values=values)
        for other in flag.also:
            flags.DEFINE_alias(other, name, values)
    return values


def parsed(command: str, values: flags.FlagValues, arguments: Sequence[str]) -> list[str]:
    """Parses the flags of a command; returns the positional arguments.

    Raises:
        UsageError: If a flag is unknown, has a value of the wrong type, or is given by two names.
    """
    spelled = [_with_underscores(values, text) for text in arguments]
    try:
        positional = values([command, *spelled])[1:]
    except flags.UnrecognizedFlagError as error:
        typed = f"-{error.flagname}"
        typed = typed if typed in arguments else f"-{typed}"
        raise UsageError(_unknown(command, typed)) from error
    except flags.IllegalFlagValueError as error:
        raise UsageError(_value_error(command, str(error))) from error
    except flags.Error as error:
        name = str(error).removeprefix("Missing value for flag ")
        if name != str(error):
            typed = name.lstrip("-")
            rows = flags_of(command).values()
            row = next(row for row in rows if typed in (row.name, *row.also))
            shown = "|".join(row.choices) if row.choices else placeholder(row)
            raise UsageError(f"{name} needs a value. Received: none. Use {name}={shown}") from error
        raise UsageError(str(error)) from error
    for name, flag in flags_of(command).items():
        typed = {text.partition("=")[0] for text in spelled}
        names = [f"--{each}" for each in (name, *flag.also) if f"--{each}" in typed]
        if len(names) > 1:
            clashing = [text for text in spelled if text.partition("=")[0] in names]
            raise UsageError(
                f"{names[1]} is an alias of {names[0]}. Received: {' with '.join(clashing)}. Drop "
                "one of the two."
            )
    return positional


def _value_error(command, message):
    """Rewrites absl's message about an invalid value as a full error."""
    match = re.fullmatch(r"flag --(\w+)=(.*?): (.*)", message, re.DOTALL)
    if match is None:
        return message
    name, value, problem = match.groups()
    kinds = {
        "invalid literal for int": "a whole number",
        "could not convert": "a number",
        "('Non-boolean": "true or false",
    }
    required = next((kind for begin, kind in kinds.items() if problem.startswith(begin)), None)
    fix = ""
    if (whole := re.fullmatch(r"(.*) is required", problem)) is not None:
        required = whole[1]
    if problem.startswith("value should be one of <"):
        row = flags_of(command)[name]
        required = f"one of {', '.join(row.choices)}"
        typed = value.lower().replace("-", "_")
        if name == "parallel" and "," in typed:
            fix = " For several at once, use --parallel=hybrid --mesh=data=2,pipeline=2."
        elif typed in row.choices_elsewhere:
            fix = f" The value here is --{name}={row.choices_elsewhere[typed]}."
        elif alike := nearest(_AROUND_CHOICE.sub("", typed), row.choices):
            fix = f" Did you mean --{name}={alike}?"
    if value == "=":
        fix = f" Type --{name}=VALUE, without spaces."
    if required is None:
        return message
    return f"--{name} must be {required}. Received: --{name}={value}.{fix}"


def nearest(typed: str, words: Iterable[str]) -> str | None:
    """Returns the closest match for a mistyped word, or None.

    Example:
        >>> nearest("micro_batches", ["num_micro_batches", "global_batch_size"])
        'num_micro_batches'
    """
    words = list(words)
    whole = [word for word in words if f"_{typed}_" in f"_{word}_"]
    parts = [word for word in words if f"_{word}_" in f"_{typed}_"]
    alike = difflib.get_close_matches(typed, words, n=1, cutoff=0.7)
    return next(iter([*alike, *whole, *parts]), None)


def _equivalents(name: str, rows: Mapping[str, Flag]) -> list[str]:
    """Returns the flags, or a flag and its value, that a name of another tool means here."""
    whole = {typed.replace("_", ""): texts for typed, texts in FLAGS.items()}
    groups = whole.get(name.replace("_", ""), "").split(", ")
    flags = []
    for group in groups:
        here = [text for text in group.split("|") if text.partition("=")[0] in rows]
        flags += [f"--{text}" for text in here[:1]]
    if flags or name in _IN_TASK:
        return flags
    for word in (name, _AROUND_CHOICE.sub("", name)):
        for row in rows.values():
            if word in row.choices_elsewhere:
                return [f"--{row.name}={row.choices_elsewhere[word]}"]
            if word in (row.choices or ()):
                return [f"--{row.name}={word}"]
    return []


def _nearest_elsewhere(name: str) -> str:
    """Returns the closest name of another tool, or the name itself if none is close."""
    return next(iter(difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.8)), name)


def _of_launcher(name: str) -> str | None:
    """Returns the flag of `launch` that has a name, there or in another tool, as it is typed."""
    rows = flags_of("launch")
    flag = f"--{name}" if name in rows else next(iter(_equivalents(name, rows)), None)
    if flag is None or "=" in flag or rows[flag[2:]].kind == "switch":
        return flag
    return f"{flag}={placeholder(rows[flag[2:]])}"


def _unknown(command, typed):
    """Returns the error for an unknown flag, with a suggestion."""
    name = typed.lstrip("-").replace("-", "_").lower()
    rows = flags_of(command)
    is_on_task = COMMANDS[command].is_on_task
    equivalents = _equivalents(name, rows)
    others = [other for other in COMMANDS if " " not in other and name in flags_of(other)]
    if equivalents:
        fix = f"The flag here is {' or '.join(equivalents)}."
    elif name in _IN_TASK and is_on_task:
        fix = f"It is set in the task file: {_IN_TASK[name]}."
    elif command in ("train", "check") and (launch := _of_launcher(name)) is not None:
        fix = f"It is for the launcher: `tfparallel launch {launch} -- tfparallel {command} …`."
    elif match := nearest(name, [word for row in rows.values() for word in (row.name, *row.also)]):
        fix = f"Did you mean --{match}?"
    elif alike := _equivalents(_nearest_elsewhere(name), rows):
        fix = f"Did you mean {' or '.join(alike)}?"
    elif name in NEEDLESS:
        fix = "Nothing here needs it: drop it."
    elif name == "version":
        fix = "`tfparallel --version` shows the versions."
    else:
        fix = f"It is a flag of `{'`, `'.join(others)}`. " if others else ""
        fix += f"`tfparallel {command} --help` shows the flags."
    if COMMANDS[command].runs_program and not equivalents:
        fix += f" A program's own flags come after the program: `-- PROGRAM {typed}`."
    return f"{typed} is not a flag of `{command}`. {fix}"


def _with_underscores(values, argument):
    """Replaces dashes in a flag's name, which torchrun allows, by underscores."""
    match = re.fullmatch(r"--(no-)?([a-z][a-z0-9-]*)(=.*)?", argument, re.DOTALL)
    if match is None or "-" not in (match[1] or "") + match[2]:
        return argument
    name = match[2].replace("-", "_")
    whole = (match[1] or "").replace("-", "_") + name
    if whole in values:
        return f"--{whole}{match[3] or ''}"
    return f"--{'no' * bool(match[1])}{name}{match[3] or ''}" if name in values else argument


def flag_problems(command: str, values: flags.FlagValues) -> list[str]:
    """Returns the problems of the values according to the rows, singly and combined."""
    rows = flags_of(command)
    problems = [problem for row in rows.values() for problem in _value_problems(row, values)]
    for row in rows.values():
        problems += _requirement_problems(row, values)
    for excludes in EXCLUDES:
        if all(_is_met(values, each) for each in excludes.these):
            received = [_as_typed(values, each.partition("=")[0]) for each in excludes.these]
            problems.append(f"{excludes.why} Received: {' with '.join(received)}. {excludes.fix}")
    return problems


def _value_problems(row: Flag, values) -> Iterator[str]:
    value = values[row.name].value
    if value is None:
        return
    received = f"Received: {_as_typed(values, row.name)}."
    if row.least is not None or row.above is not None:
        lowest = row.least if row.least is not None else math.nextafter(row.above, math.inf)
        highest = row.most if row.most is not None else math.inf
        if not lowest <= value <= highest or math.isinf(value):
            required = f"at least {row.least:g}" if row.above is None else f"above {row.above:g}"
            if row.most is not None:
                required = f"from {row.least} to {row.most}"
            elif math.isinf(value):
                required = f"a number, {required}"
            yield f"--{row.name} must be {required}. {received}"
    if row.read is not None:
        try:
            _read(row.name, value)
        except ValueError as error:
            plain, fix = str(value).lower().replace("-", "_"), ""
            with contextlib.suppress(ValueError):  # Only the spelling may be wrong.
                _read(row.name, plain)
                fix = f" Did you mean --{row.name}={plain}?"
            yield f"--{row.name}: {error}{fix}"
    if row.ending is not None:
        yield from _path_problems(row, value, received)
    if row.needs_package is not None:
        package, name = row.needs_package
        if importlib.util.find_spec(package) is None:
            yield (
                f"--{row.name} needs {package}, which is not installed. {received} Install it: "
                f"pip install {name}"
            )


def _path_problems(row: Flag, path: str, received: str) -> Iterator[str]:
    """Yields the reasons why a file could not be written."""
    if not path.endswith(tuple(row.ending.split(" or "))):
        yield f"The path must end in {row.ending}. {received}"
    parent = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        yield f"The path is a folder; a file is required. {received}"
    elif not os.path.isdir(parent):
        create = f"Create it: mkdir -p {os.path.dirname(path)}"
        yield f"The output folder does not exist. {received} {create}"
    elif os.path.exists(path) and not os.access(path, os.W_OK):
        yield f"The file exists and is not writable. {received}"
    else:
        try:
            # To root, `os.access` promises what some file systems refuse.
            with tempfile.TemporaryFile(dir=parent):
                pass
        except OSError as error:
            yield f"The output folder is not writable ({error.strerror}). {received}"


def _requirement_problems(row: Flag, values) -> Iterator[str]:
    """Yields the error for a flag without the flag that it requires."""
    if row.only_with is None or not _is_set(values, row.name) or _is_met(values, row.only_with):
        return
    name, _, words = row.only_with.partition("=")
    first, *others = f"--{row.only_with}".split("|")
    needed = f"{', '.join([first, *others[:-1]])} or {others[-1]}" if others else first
    beside = f" with {_as_typed(values, name)}" if values[name].value is not None else " alone"
    yield (
        f"--{row.name} is for {needed}. Received: {_as_typed(values, row.name)}{beside}. Drop "
        f"--{row.name}, or {'use' if words else 'add'} {first}."
    )


def _is_met(values, condition: str) -> bool:
    """Whether a flag is set, or has one of the values in the condition."""
    name, _, words = condition.partition("=")
    if name not in values:
        return False
    if not words:
        return _is_set(values, name)
    return str(values[name].value).partition(":")[0] in words.split("|")


def _is_set(values: flags.FlagValues, name: str) -> bool:
    """Whether a flag differs from its default."""
    return values[name].value != values[name].default


def _as_typed(values, name: str) -> str:
    """Formats a flag as it is typed."""
    value = values[name].value
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    if isinstance(value, list):
        value = ",".join(value)
    return f"--{name}={getattr(value, 'text', value)}"


@functools.cache  # The check at the door and the command's body read the same text.
def _read(name: str, text: str) -> Any:
    return _READERS[name](text)


def value_of(values: flags.FlagValues, name: str) -> Any:
    """Returns the parsed value of a flag whose row has a reader; None for None."""
    value = values[name].value
    return None if value is None else _read(name, value)


def resolved(values: flags.FlagValues) -> dict[str, Any]:
    """Returns all flags that are not None, with their values."""
    all_values = {name: values[name].value for name in sorted(values) if name not in ("?", "json")}
    return {name: value for name, value in all_values.items() if value is not None}
