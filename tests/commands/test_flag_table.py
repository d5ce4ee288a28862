"""The table of flags: each row is whole, and each contradiction can be met."""

import pytest

from tfparallel.command_line import flag_parsing
from tfparallel.command_line.command_table import COMMANDS
from tfparallel.command_line.exclusions import EXCLUDES
from tfparallel.command_line.flag_parsing import defined, flag_problems
from tfparallel.command_line.flag_table import TABLE, flags_of
from tfparallel.command_line.options import TrainOptions
from tfparallel.command_line.runner import checked
from tfparallel.layout.mesh import Mesh

ROWS = [row for rows in TABLE.values() for row in rows]


def conditions():
    for row in ROWS:
        if row.only_with is not None:
            yield row.only_with, set(row.commands.split(", "))
    for excludes in EXCLUDES:
        for each in excludes.these:
            yield each, {name for row in ROWS for name in row.commands.split(", ")}


def test_a_command_has_a_flag_once():
    assert {name for row in ROWS for name in row.commands.split(", ")} <= set(COMMANDS)
    for command in COMMANDS:
        names = [row.name for row in ROWS if command in row.commands.split(", ")]
        assert len(names) == len(set(names)), command


@pytest.mark.parametrize("condition", sorted({text for text, _ in conditions()}))
def test_the_condition_of_a_row_names_a_flag_and_its_values(condition):
    name, _, words = condition.partition("=")
    commands = set.union(*(names for text, names in conditions() if text == condition))
    rows = [row for row in ROWS if row.name == name and commands & set(row.commands.split(", "))]
    assert rows, name
    choices = {word for row in rows for word in row.choices or ()}
    if choices and words:
        assert set(words.split("|")) <= choices


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_absent_contradicts_nothing(command):
    values = defined(command)
    values([command])
    assert not flag_problems(command, values)
    assert set(flags_of(command)) <= set(values)


def test_a_text_is_read_once(monkeypatch):
    """Story: the door, the contradictions and the command's body each parsed them."""
    texts = []
    for name in ("mesh", "sync"):
        read = flag_parsing._READERS[name]
        monkeypatch.setitem(
            flag_parsing._READERS, name, lambda text, read=read: texts.append(text) or read(text)
        )
    typed = ["--parallel=hybrid", "--mesh=data=3,pipeline=5", "--sync=accumulate:17"]
    values, _ = checked("train", [__file__, *typed])
    options = TrainOptions.of(values)
    assert options.mesh == Mesh(3, 5) and options.policy.accumulated == 17
    assert sorted(texts) == ["accumulate:17", "data=3,pipeline=5"]


def test_a_number_outside_of_its_row_is_told():
    values = defined("train")
    values(["train", "--seed=-1", "--epochs=0", "--start_timeout=nan", "--bucket_bytes=many"])
    problems = "\n".join(flag_problems("train", values))
    assert "--seed must be from 0 to 4294967295. Received: --seed=-1." in problems
    assert "--epochs must be at least 1. Received: --epochs=0." in problems
    assert "--start_timeout must be above 0. Received: --start_timeout=nan." in problems
    assert "--bucket_bytes: A number of bytes such as 16GiB" in problems
