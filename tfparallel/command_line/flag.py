"""A row of the table of flags."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of one or more commands.

    Attributes:
        name: Its name.
        commands: The commands that have it.
        text: Its help text.
        default: Its default value.
        kind: "text", "whole" and "real" numbers, "switch", "list" and "repeated" text; "workers" is
            a number of processes, or the kind of device to count.
        choices: The allowed values, with or without their meanings.
        shown: The placeholder after "=" in `--help`, if not derived from kind and choices.
        if_absent: The choice that an absent flag means, if the default is None.
        also: Aliases.
        choices_elsewhere: Names of its choices in other tools.
        least: The minimum.
        most: The maximum.
        above: The exclusive minimum.
        ending: The required ending of the file that it names, if it writes one.
        read: Parses the text; raises a ValueError with the problem.
        only_with: A required flag, or values of it, such as "parallel=data|hybrid".
        needs_package: The required package, and how to install it.
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
    choices_elsewhere: Mapping[str, str] = dataclasses.field(default_factory=dict)
    least: float | None = None
    most: float | None = None
    above: float | None = None
    ending: str | None = None
    read: Callable[[str], Any] | None = None
    only_with: str | None = None
    needs_package: tuple[str, str] | None = None
