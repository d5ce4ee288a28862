"""Whether two runs of one update, of the same variables, are known to come to the same."""

from typing import Any

from tfparallel.extend import original_class
from tfparallel.seams.optimizers import rate_of

__all__ = ["belongs_to_keras", "is_from_keras", "updates_alike"]


def updates_alike(optimizer) -> bool:
    """Whether optimizer and schedule are Keras's.

    One of the user's own may draw, or keep a state that nobody knows of.
    """
    return is_from_keras(original_class(optimizer)) and belongs_to_keras(rate_of(optimizer))


def belongs_to_keras(held: Any) -> bool:
    """Whether an object is of a class of Keras's, or None."""
    return held is None or is_from_keras(type(held))


def is_from_keras(cls: type) -> bool:
    """Whether Keras has a class, and not the user."""
    return cls.__module__.startswith("keras.")
