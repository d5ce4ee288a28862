"""Parses `compression=`, without TensorFlow."""

from collections.abc import Callable
from typing import NamedTuple

FORMS = "bf16, fp16, topk:FRACTION such as topk:0.01, or powersgd:RANK such as powersgd:2"


class CompressionName(NamedTuple):
    """A kind of compression and its parameter.

    Attributes:
        kind: "bf16", "fp16", "topk" or "powersgd".
        number: The fraction of the elements to send, or the rank of the factors.
    """

    kind: str
    number: float | int | None = None

    @classmethod
    def parse(cls, spec: str | None) -> "CompressionName | None":
        """Parses "bf16", "fp16", "topk:0.01" or "powersgd:2"; None means no compression.

        Raises:
            ValueError: If the kind is unknown or its number is invalid.
        """
        if spec is None:
            return None
        kind, _, number = str(spec).partition(":")
        if spec in ("bf16", "fp16"):
            return cls(kind)
        if kind == "topk":
            fraction = _read(float, number)
            if fraction is not None and 0 < fraction <= 1:
                return cls(kind, fraction)
            reason = "topk takes the fraction of elements to send, above 0 and at most 1"
        elif kind == "powersgd":
            rank = _read(int, number)
            if rank is not None and rank >= 1:
                return cls(kind, rank)
            reason = "powersgd takes the rank of its factors, a whole number of at least 1"
        else:
            reason = "there is no compression of that name"
        raise ValueError(f"`compression` must be {FORMS}. Received: {spec!r}; {reason}.")


def _read(kind: Callable, text: str):
    try:
        return kind(text)
    except ValueError:
        return None
