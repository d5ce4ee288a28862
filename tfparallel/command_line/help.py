"""What `--help` shows: an example first, then the flags by topic, each choice named once."""

import shutil
import textwrap
from collections.abc import Iterator

from tfparallel.command_line.command_table import COMMANDS
from tfparallel.command_line.flag import Flag
from tfparallel.command_line.flag_table import TABLE

__all__ = ["help_text"]

_WIDEST = 100
_COLUMN = 28  # Where the text of a flag begins.
_SHOWN = {"whole": "N", "real": "N", "list": "A,B", "workers": "N|gpu|cpu|auto"}


def help_text(command: str) -> str:
    """Returns what `--help` shows, as wide as the terminal, or as a page."""
    width = min(_WIDEST, shutil.get_terminal_size((_WIDEST, 24)).columns)
    told = COMMANDS[command]
    lines = [
        f"usage: tfparallel {command} {told.arguments}",
        "",
        "example:",
        # In one line, so that it can be pasted.
        f"  {told.example}",
        "",
        *textwrap.wrap(told.summary, width),
    ]
    for topic, rows in TABLE.items():
        own = [row for row in rows if command in row.commands.split(", ")]
        if own:
            lines += ["", f"{topic}:"]
        for row in own:
            lines += _described(row, width)
    return "\n".join(lines)


def _described(row: Flag, width) -> Iterator[str]:
    head = "  " + ", ".join([_head(row), *(f"--{name}" for name in row.also)])
    meanings = row.choices if isinstance(row.choices, dict) else {}
    # A default of 0 is worth telling, and equals False.
    is_told = row.default is not None and row.default is not False and row.default != []
    is_told &= not meanings
    text = row.text + (f" (default: {_as_typed(row.default)})" if is_told else "")
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
    return f"--{row.name}={_placeholder(row)}"


def _placeholder(row: Flag) -> str:
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
    # With spaces, where a line may end.
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
