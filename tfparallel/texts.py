"""Bytes, seconds and tables as people write and read them."""

import numbers
import re
from collections.abc import Sequence

__all__ = ["aligned", "number_of_bytes", "parse_bytes", "seconds_text", "size_text"]

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # As in nccl-tests.


def parse_bytes(text: str) -> int:
    """Reads a number of bytes: `"16GiB"`, `"500MB"`, `"4K"`, `"1048576"`.

    Raises:
        ValueError: If it is none, or not above zero.
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
    """Returns what an argument says, a number or a text such as `"16GiB"`; None for None.

    Args:
        name: The argument's name, for the message.
        value: What was given.

    Raises:
        ValueError: If it is no number of bytes, or not above zero.
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
        f"`{name}` must be a number of bytes of at least 1, or a text such as '16GiB'. Received: "
        f"{name}={value!r}. Pass {name}=16 * 2**30, or {name}='16GiB'."
    )


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
    """Returns a line for each row of a table, its columns as wide as their longest text.

    Args:
        rows: All of one length.
        right: Whether texts stand at the right of their columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    place = str.rjust if right else str.ljust
    return ["  ".join(map(place, row, widths)).rstrip() for row in rows]
