"""Formats `--help`: an example, then the flags by topic, with their choices."""

import shutil
import textwrap
from collections.abc import Iterator

from tfparallel.command_line.command_table import COMMANDS
from tfparallel.command_line.flag import Flag
from tfparallel.command_line.flag_table import TABLE

_WIDEST = 100
_COLUMN = 28  # Where a flag's text begins.
_SHOWN = {"whole": "N", "real": "N", "list": "A,B", "workers": "N|gpu|cpu|auto"}


def help_text(command: str) -> str:
    """Returns the text of `--help`, as wide as the terminal, up to 100 columns."""
    width = min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns)
    entry = COMMANDS[command]
    lines = [
        f"usage: tfparallel {command} {entry.arguments}",
        "",
        "example:",
        # On one line, for pasting.
        f"  {entry.example}",
        "",
        *textwrap.wrap(entry.summary, width),
    ]
    for topic, rows in TABLE.items():
        topic_rows = [row for row in rows if command in row.commands.split(", ")]
        if topic_rows:
            lines += ["", f"{topic}:"]
        for row in topic_rows:
            lines += _flag_lines(row, width)
    return "\n".join(lines)


def _flag_lines(row: Flag, width) -> Iterator[str]:
    head = "  " + ", ".join([_head(row), *(f"--{name}" for name in row.also)])
    meanings = row.choices if isinstance(row.choices, dict) else {}
    # `is not False`: a default of 0 is shown, although 0 == False.
    shows_default = row.default is not None and row.default is not False and row.default != []
    shows_default &= not meanings
    text = row.text + (f" (default: {_as_typed(row.default)})" if shows_default else "")
    room = max(width - _COLUMN, 30)
    body = textwrap.wrap(text, room)
    longest = max(map(len, meanings), default=0)
    for word, meaning in meanings.items():
        first = f"  {word.ljust(longest)}  "
        meaning += " (default)" * (word == (row.default or row.if_absent))
        rest = " " * len(first)
        body += textwrap.wrap(
            meaning, room, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
        )
    if len(head) > _COLUMN - 2:
        yield head
    else:
        body[0] = head.ljust(_COLUMN) + body[0]
        yield body.pop(0)
    yield from (" " * _COLUMN + line for line in body)


def _head(row: Flag) -> str:
    if row.kind == "switch":
        return f"--[no]{row.name}" if row.default is not False else f"--{row.name}"
    return f"--{row.name}={placeholder(row)}"


def placeholder(row: Flag) -> str:
    """Returns what stands for a flag's value in `--help`."""
    if row.shown is not None:
        return row.shown
    if row.choices is not None:
        return "NAME" if isinstance(row.choices, dict) else "|".join(row.choices)
    if row.name.endswith(("_timeout", "_seconds")):
        return "SECONDS"
    return _SHOWN.get(row.kind, "TEXT")


def _as_typed(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    # With spaces, to allow line breaks.
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
