"""Formats and parses counts, bytes, seconds, lists, tables and values for people."""

import numbers
import re
from collections.abc import Sequence
from typing import Any

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}  # As on Kubernetes.
_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # As in nccl-tests.
MOST_NAMES = 8  # The most names in a line.
_LONGEST = 60  # Characters of a value.


def parse_bytes(text: str) -> int:
    """Reads a number of bytes: `"16GiB"`, `"500MB"`, `"4K"`, `"1048576"`.

    Raises:
        ValueError: If it is not a number of bytes, or not above zero.
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?) ?([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise ValueError(
            "A number of bytes such as 16GiB, 500MB, 4K or 1048576 is required. Received: "
            f"{text!r}."
        )
    return int(float(match[1]) * unit)


def number_of_bytes(name: str, value: int | str | None) -> int | None:
    """Returns the bytes of an argument, a number or a text such as `"16GiB"`; None for None.

    Args:
        name: The argument's name, for the message.
        value: The argument's value.

    Raises:
        ValueError: If it is not a number of bytes, or not above zero.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except ValueError:
            pass
    elif isinstance(value, numbers.Real) and not isinstance(value, bool) and value >= 1:
        return int(value)
    raise ValueError(
        f"`{name}` must be a number of bytes of at least 1, or a string such as '16GiB'. Received: "
        f"{name}={value!r}. Pass {name}=16 * 2**30, or {name}='16GiB'."
    )


def counted(number: int, noun: str) -> str:
    """A number of things: "1 worker", "3 workers"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size_text(size_bytes: float) -> str:
    """A number of bytes for people: "3.2 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} GiB"


def seconds_text(seconds: float) -> str:
    """A time for people.

    Example:
        >>> seconds_text(0.0421), seconds_text(1.5)
        ('42.1 ms', '1.5 s')
    """
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.4g} s"


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> list[str]:
    """Returns a line for each row of a table, with columns as wide as their longest text.

    Args:
        rows: The rows, all of the same length.
        right: Whether to align texts to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    place = str.rjust if right else str.ljust
    return ["  ".join(map(place, row, widths)).rstrip() for row in rows]


def first_to_last(names: Sequence[str], noun: str | None = None) -> str:
    """Returns names in a line; for many names, only the first and the last.

    Args:
        names: Any number of names.
        noun: A plural noun for their number if some are omitted; None to omit the number.

    Example:
        >>> first_to_last(["a", "b"], "layers")
        'a, b'
        >>> first_to_last([f"conv_{n}" for n in range(1, 31)], "layers")
        'conv_1 … conv_30 (30 layers)'
    """
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    count = f" ({len(names)} {noun})" if noun is not None else ""
    return f"{names[0]} … {names[-1]}{count}"


def short(value: Any) -> str:
    """Returns a value's type, and its shape or a prefix of its text.

    Example:
        >>> short("file.npz"), short(None)
        ("'file.npz' (of type str)", 'None')
    """
    if value is None:
        return "None"
    kind = type(value).__name__
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{kind} of shape {tuple(shape)}"
    text = repr(value)
    return f"{text if len(text) <= _LONGEST else text[:_LONGEST] + '…'} (of type {kind})"
