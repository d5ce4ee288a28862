"""Explains why the first candidate is first and, if none fits, which changes would help.

Such a change comes from the same predictions: the smallest sufficient change of one setting at a
time.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from tfparallel.planning.candidates import CLOSE, Candidate, Choices
from tfparallel.texts import counted, seconds_text, size_text

_MOST_DEVICES = 1024  # The largest number of devices to suggest.


@dataclasses.dataclass(frozen=True)
class Remedy:
    """A change of one setting that makes the model fit.

    Attributes:
        name: The setting: "shard", "recompute", "global_batch_size", "num_devices" or
            "device_memory".
        value: The new value: the smallest sufficient one, or the largest halved batch size.
        candidate: The candidate that fits with it.
    """

    name: str
    value: int | str
    candidate: Candidate

    def as_json(self) -> dict[str, Any]:
        """Returns the remedy as JSON values."""
        shard = {} if self.candidate.shard is None else {"shard": self.candidate.shard}
        mesh = dataclasses.asdict(self.candidate.mesh)
        held_bytes = self.candidate.held_bytes
        return {self.name: self.value, "mesh": mesh, **shard, "held_bytes": held_bytes}

    def __str__(self):
        by, size = self.candidate.name, size_text(self.candidate.held_bytes)
        if self.name == "device_memory":
            return f"with {size_text(self.value)} per device ({by})"
        if self.name == "num_devices":
            return f"on {counted(self.value, 'device')} ({by}: {size})"
        return f"with --{self.name}={self.value} ({by}: {size})"


def why_first(ranked: Sequence[Candidate]) -> str:
    """Explains in one line why the first candidate is first.

    Args:
        ranked: The result of `rank` or `with_trials`.
    """
    fitting = [candidate for candidate in ranked if candidate.why_not is None]
    if not fitting:
        return "no mesh fits"
    first, *others = fitting
    if not others:
        return f"{first.name} is the only usable mesh"
    second = others[0]
    if first.measured_seconds is not None:
        if second.measured_seconds is None:
            return f"{first.name} is the only mesh that was tried"
        share = first.measured_seconds / second.measured_seconds
        if share > 1 - CLOSE:
            return (
                f"{first.name} and {second.name} were the fastest in the trials, and equally fast"
            )
        return (
            f"{first.name} took {share:.0%} of the step time of the next one tried, {second.name}"
        )
    best, next_best = first.prediction.step_seconds, second.prediction.step_seconds
    close = [c.name for c in others if c.prediction.step_seconds <= best * (1 + CLOSE)]
    if next_best < best:
        return (
            f"{first.name} keeps weights whole; {second.name} is predicted to take "
            f"{next_best / best:.0%} of its step time: compare them with "
            f"--num_trials={1 + len(close)}"
        )
    if close:
        are = "is" if len(close) == 1 else "are"
        return (
            f"{first.name} is predicted to be the fastest, but within {CLOSE:.0%} of it {are} "
            f"{'; '.join(close)}: compare them with --num_trials={1 + len(close)}"
        )
    parts = {
        name: seconds - first.prediction.parts[name]
        for name, seconds in second.prediction.parts.items()
    }
    saved = max(parts, key=parts.get)
    takes = "takes" if saved == "overhead" else "take"
    text = (
        f"{first.name} takes {best / next_best:.0%} of the step time of the next, {second.name}, "
        f"whose {saved} {takes} {seconds_text(parts[saved])} longer"
    )
    if saved == "passes" and second.prediction.bubble > 0:
        text += f" (its stages idle {second.prediction.bubble:.0%} of the time)"
    return text


def remedies(
    ranked: Sequence[Candidate],
    choices: Choices,
    num_devices: int,
    rank_others: Callable[[Choices, int], Sequence[Candidate]],
) -> list[Remedy]:
    """Returns changes that would make something fit, if nothing does.

    Args:
        ranked: The result of `rank`.
        choices: The user's settings.
        num_devices: Number of devices.
        rank_others: Ranks the candidates for other settings or numbers of devices, with the same
            costs.
    """

    def fitting(changed: Choices, number: int = num_devices) -> Candidate | None:
        candidates = rank_others(changed, number)
        return next((candidate for candidate in candidates if candidate.why_not is None), None)

    def least(name: str, options: Sequence[tuple[int | str, Choices, int]]) -> list[Remedy]:
        for value, changed, number in options:
            candidate = fitting(changed, number)
            if candidate is not None:
                value = candidate.mesh.size if name == "num_devices" else value
                return [Remedy(name, value, candidate)]
        return []

    def changed(**values: Any) -> Choices:
        return dataclasses.replace(choices, **values)

    result = []
    if choices.parallelism != "auto":
        others = rank_others(changed(parallelism="auto"), num_devices)
        shares = [c for c in others if c.shard is not None and c.why_not is None]
        order = sorted(shares, key=lambda candidate: candidate.shard)  # "optimizer" first.
        result += [Remedy("shard", c.shard, c) for c in order[:1]]
    if choices.recompute == "never" and choices.parallelism != "model" and num_devices > 1:
        result += least("recompute", [("always", changed(recompute="always"), num_devices)])
    batches = _halves(choices.batch_size)
    result += least(
        "global_batch_size", [(rows, changed(batch_size=rows), num_devices) for rows in batches]
    )
    numbers = [num_devices * 2**power for power in range(1, _MOST_DEVICES.bit_length())]
    most = [number for number in numbers if number <= _MOST_DEVICES]
    result += least("num_devices", [(number, choices, number) for number in most])
    predicted = [candidate for candidate in ranked if candidate.held_bytes is not None]
    if predicted:
        smallest = min(predicted, key=lambda candidate: candidate.held_bytes)
        result.append(Remedy("device_memory", _rounded_up(smallest.held_bytes), smallest))
    return result


def _halves(number: int) -> list[int]:
    """Returns a half of a number, a quarter of it, and so on, down to 1."""
    return [number >> power for power in range(1, number.bit_length())]


def _rounded_up(size_bytes: int) -> int:
    """Rounds a number of bytes up to one whose text is exact, so that users can type it."""
    unit = next(unit for unit in (2**30, 2**20, 2**10, 1) if size_bytes >= unit or unit == 1)
    steps = 10 if 1 < unit and size_bytes < 999 * unit else 1  # The text has four digits.
    return math.ceil(steps * size_bytes / unit) * unit // steps
