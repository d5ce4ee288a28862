"""Long lists of names in a line: the first, the last, and how many."""

from collections.abc import Sequence

__all__ = ["first_to_last"]

_MOST = 8  # More than these nobody reads in a line.


def first_to_last(names: Sequence[str], noun: str | None = None) -> str:
    """Returns names in a line, of many the first and the last.

    Args:
        names: Any number of them.
        noun: What they are, for their number where some are left out; None to leave it out.

    Example:
        >>> first_to_last(["a", "b"], "layers")
        'a, b'
        >>> first_to_last([f"conv_{n}" for n in range(1, 31)], "layers")
        'conv_1 … conv_30 (30 layers)'
    """
    if len(names) <= _MOST:
        return ", ".join(names)
    count = f" ({len(names)} {noun})" if noun is not None else ""
    return f"{names[0]} … {names[-1]}{count}"
