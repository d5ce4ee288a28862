"""What a row of the table says of a flag."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Flag"]


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of some commands.

    Attributes:
        name: Its name.
        commands: Those that have it.
        text: What it is for.
        default: What it is where it is absent.
        kind: "text", "whole" and "real" numbers, "switch", "list" and "repeated" text; "workers" is
            a number of processes, or what there is to count.
        choices: The words that it takes, with what each means, or without.
        shown: What `--help` has behind "=", where kind and choices do not say it.
        if_absent: Which of the choices an absent flag means, where the default is None.
        also: Other names of it.
        elsewhere: How other tools call it.
        choices_elsewhere: How other tools call some of its choices.
        least: The lowest number that it takes.
        most: The highest.
        above: Any number that it takes is higher.
        ending: What a file that it names ends in, if it writes one.
        read: Makes of the text what is meant; raises a ValueError that says what is wrong.
        only_with: What it needs: another flag, or one of its values, as "parallel=data|hybrid".
        needs_package: What must be installed for it, and how.
    """

    name: str
    commands: str
    text: str
    default: Any = None
    kind: str = "text"
    choices: Mapping[str, str] | tuple[str, ...] | None = None
    shown: str | None = None
    if_absent: str | None = None
    also: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    choices_elsewhere: Mapping[str, str] = dataclasses.field(default_factory=dict)
    least: float | None = None
    most: float | None = None
    above: float | None = None
    ending: str | None = None
    read: Callable[[str], Any] | None = None
    only_with: str | None = None
    needs_package: tuple[str, str] | None = None
