"""The form of the elements of a Python object: their parts."""

from collections.abc import Sequence
from typing import Any

_PARTS = ("x", "y", "sample_weight")


def without_none(parts: Sequence[Any], name: str) -> tuple[Any, ...]:
    """Returns `(x[, y[, sample_weight]])` without a None at its end.

    Raises:
        ValueError: If another part is None: the next one would take its place.
    """
    present = tuple(parts)
    while present and present[-1] is None:
        present = present[:-1]
    missing = [n for n, part in zip(_PARTS, present, strict=False) if part is None]
    if missing or not present:
        raise ValueError(
            "Only the last parts of (x, y, sample_weight) may be None. Received: "
            f"{'=None, '.join(missing) or 'x'}=None in {name}. Pass an array, or leave out the "
            "parts behind it."
        )
    return present
