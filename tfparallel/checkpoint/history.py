"""The history of a run as JSON: a metric may log a number, or several, such as one per class."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def as_numbers(history: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Returns a history as numbers and lists of numbers."""
    return {name: [np.asarray(value).tolist() for value in history[name]] for name in history}


def as_logged(history: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Returns the history of `as_numbers` with its lists as arrays again."""
    return {
        name: [np.asarray(value) if isinstance(value, list) else value for value in history[name]]
        for name in history
    }
