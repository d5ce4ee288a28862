"""The size, the resources and the patience of a job on Ray."""

import dataclasses
import numbers
import os
from collections.abc import Mapping

from tfparallel.cluster.config_error import refusal, shown

_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """The options of a job, with the words of Ray Train.

    Attributes:
        num_workers: The least and the largest number of workers.
        resources: The resources of each worker, by Ray's names.
        max_failures: How many failures to restart after; -1 for no limit.
        placement_strategy: How Ray chooses nodes.
        grace_seconds: How long a save may take when the workers are stopped.
        start_timeout_seconds: How long to wait for Ray to place the least number of workers.
        storage_path: A folder that every node must see.

    Raises:
        ValueError: If an option is invalid; all problems in one message.
    """

    num_workers: tuple[int, int]
    resources: Mapping[str, float]
    max_failures: int = 0
    placement_strategy: str = "PACK"
    grace_seconds: float = 60.0
    start_timeout_seconds: float = 600.0
    storage_path: str | os.PathLike | None = None

    def __post_init__(self):
        problems = []
        least, most = self.num_workers
        if not (_is_whole(least, 1) and _is_whole(most, 1)):
            problems.append("num_workers must be a whole number of at least 1, or two of them")
        elif most < least:
            problems.append("the second of num_workers must not be less than the first")
        values = self.resources.values()
        if not values or not all(_is_number(value) and value > 0 for value in values):
            problems.append("resources_per_worker must have positive numbers")
        if not _is_whole(self.max_failures, -1):
            problems.append("max_failures must be a whole number of at least 0, or -1 for no limit")
        if self.placement_strategy not in _STRATEGIES:
            problems.append(f"placement_strategy must be one of {', '.join(_STRATEGIES)}")
        if not (_is_number(self.grace_seconds) and self.grace_seconds >= 0):
            problems.append("grace_seconds must not be negative")
        if not (_is_number(self.start_timeout_seconds) and self.start_timeout_seconds > 0):
            problems.append("start_timeout_seconds must be positive")
        if _is_url(self.storage_path):
            problems.append("storage_path must be a folder that all nodes mount, not a URL")
        if problems:
            raise refusal("Cannot start a job on Ray", problems, shown(vars(self)))


def parse_num_workers(text: str) -> tuple[int, int]:
    """Parses "2" or "2:4"; raises `ValueError` for anything else."""
    least, colon, most = text.partition(":")
    if not (least.isdecimal() and (most.isdecimal() if colon else True)):
        raise ValueError(f"a number, or MIN:MAX, is required. Received: {text!r}.")
    numbers_ = int(least), int(most or least)
    if not 1 <= numbers_[0] <= numbers_[1]:
        raise ValueError(
            f"at least 1 worker is required, and MAX must not be less than MIN. Received: {text!r}."
        )
    return numbers_


def parse_resources(text: str) -> dict[str, float]:
    """Parses "CPU=4,GPU=1"; raises `ValueError` for anything else."""
    resources = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            resources[name.strip()] = float(number)
        except ValueError:
            raise ValueError(f"NAME=NUMBER is required. Received: {part!r}.") from None
    return resources


def parse_storage_path(text: str) -> str:
    """Returns the text; raises `ValueError` for a URL."""
    if _is_url(text):
        raise ValueError(f"a folder that all nodes mount is required, not a URL. Received: {text}.")
    return text


def _is_url(path):
    return path is not None and "://" in os.fspath(path)


def _is_whole(value, least):
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_whole and value >= least


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
