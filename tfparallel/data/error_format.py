"""What a user has given, short enough for a message."""

from typing import Any

__all__ = ["short"]

_LONGEST = 60  # Characters.


def short(value: Any) -> str:
    """Returns a value's type, and its shape or as much of its text as fits.

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
