"""The rounding floor: how far rounding alone carries a training, step by step.

    step                    1      2      4      8
    one device              a₁     a₂     a₄     a₈
    in parallel             b₁     b₂     b₄     b₈      difference  max|a − b|
    first weights moved     m₁     m₂     m₄     m₈      floor       max|a − m|

A parallel run adds the same numbers in another order, and rounds otherwise. What training makes of
that is a property of the model, not of the parallelism: a deep network with batch normalization may
multiply it by ten a step. The third training shows how much: it is plain Keras on one device, its
first weights moved by one unit in the last place. A variable matches at a step if

    max|a − b|  ≤  max(tolerance · max|a|,  multiple · floor)

The floor is the larger of two, both of that step: the variable's own, and the median over the
model's variables of its kind, relative to their magnitudes. One moved training is one sample: where
a variable happens to end near its first copy, the median says how far rounding carries its peers.

`docs/internals/check.md` says where the multiples come from (`MULTIPLES`), and which further
trainings there are where a variable is beyond its floor.

At the first steps the floor of a float64 training lies far below what any fault makes (1e-13
against 1e-2); that of float32 lies below the tolerance in most variables. What happens there
decides. At later steps, where the floor has grown, only what is far beyond rounding is a
difference.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from tfparallel.diagnostics.compare import Distance, distance_between, is_float, largest_magnitude
from tfparallel.diagnostics.training_run import Outcome, Snapshot, State

__all__ = [
    "FINER",
    "MULTIPLES",
    "Comparison",
    "Deviation",
    "Key",
    "Reading",
    "StepReport",
    "compare",
    "deviation",
    "growth",
    "sharp_until",
]

Key = tuple[int | None, str] | str

# By how many units the first weights are moved -> how many times that floor is allowed; `FINER`
# stands for the training in a finer type, of the weights as they are.
FINER = 0
MULTIPLES = {1: 10.0, 32: 3.0, FINER: 3.0}

# A variable that rounding alone changes by a tenth of itself at the first step is made of rounding.
_NOISE = 0.1
# Above it the floor has stopped to grow: two trainings cannot be further apart than they are long.
_SATURATED = 1e-2


# By step, then by variable or value.
Deviation = Mapping[int, Mapping[Key, Distance]]


@dataclasses.dataclass(frozen=True)
class Reading:
    """One variable or value at one step.

    Attributes:
        step: The step.
        absolute: The largest absolute difference.
        relative: That, over the largest magnitude on one device.
        floor: What a move of the first weights by one unit makes of `relative`.
        matches: Whether the difference is rounding.
        sharp: Whether no more than the tolerance was allowed.
    """

    step: int
    absolute: float
    relative: float
    floor: float
    matches: bool
    sharp: bool


@dataclasses.dataclass(frozen=True)
class StepReport:
    """The weights at one step; those that are made of rounding are left out.

    Attributes:
        step: The step.
        difference: The largest relative difference of a weight in parallel.
        median_difference: The median of the weights' differences.
        floor: The largest relative difference that one unit in the last place makes.
        median_floor: The median of these.
        num_sharp: The weights that were held against the tolerance alone.
        num_weights: All that were compared.
    """

    step: int
    difference: float
    median_difference: float
    floor: float
    median_floor: float
    num_sharp: int
    num_weights: int

    @property
    def sharp(self) -> bool:
        """Whether most weights were held against the tolerance alone."""
        return 2 * self.num_sharp > self.num_weights


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A parallel training beside that of one device and its floors.

    Attributes:
        readings: The steps of each variable and value.
        steps: The weights as a whole, by step.
    """

    readings: dict[Key, tuple[Reading, ...]]
    steps: tuple[StepReport, ...]

    @property
    def failed(self) -> set[Key]:
        """What differs by more than rounding at a step."""
        return {
            key
            for key, readings in self.readings.items()
            if not all(reading.matches for reading in readings)
        }

    def first_step(self, key: Key) -> int | None:
        """The first step at which a variable or value differs, or None."""
        return next((r.step for r in self.readings[key] if not r.matches), None)


def deviation(single: Outcome, other: Outcome) -> Deviation:
    """Returns how far a training is from that of one device, by step; NaN for what it lacks."""
    found = {}
    for step, snapshot in single.snapshots.items():
        theirs = other.snapshots.get(step, Snapshot({}, {}))
        found[step] = {
            key: distance_between(state.value, theirs.states[key].value)
            if key in theirs.states
            else Distance(math.nan, math.nan, math.nan)
            for key, state in snapshot.states.items()
        }
        for name, value in snapshot.values.items():
            received = theirs.values.get(name, math.nan)
            found[step][name] = Distance(abs(value - received), abs(value), abs(received))
    return found


def compare(
    single: Outcome, parallel: Deviation, floors: Mapping[int, Deviation], tolerance: float
) -> Comparison:
    """Tells what rounding does from what the parallelism does.

    Args:
        single: The training on one device.
        parallel: How far the parallel one is from it.
        floors: How far those with moved weights are, by the number of units, 1 among them; and
            that in a finer type, by `FINER`.
        tolerance: The relative difference that counts as rounding in any model.
    """
    noise = _made_of_rounding(single, floors[1])
    readings: dict[Key, list[Reading]] = {}
    steps = []
    for step, snapshot in single.snapshots.items():
        limits = _Limits(single, step, floors, noise, tolerance)
        for key, distance in parallel[step].items():
            strict, allowed = limits.of(key, snapshot.states.get(key), distance.magnitude)
            reading = Reading(
                step,
                distance.absolute,
                distance.relative,
                floors[1][step][key].relative,
                distance.absolute <= allowed,
                allowed <= strict,
            )
            readings.setdefault(key, []).append(reading)
        steps.append(_step_report(step, single, readings, noise))
    return Comparison({key: tuple(found) for key, found in readings.items()}, tuple(steps))


class _Limits:
    """What is allowed at one step."""

    def __init__(
        self,
        single: Outcome,
        step: int,
        floors: Mapping[int, Deviation],
        noise: frozenset[int],
        tolerance: float,
    ):
        self._floors = {units: floor[step] for units, floor in floors.items()}
        self._noise = noise
        self._tolerance = tolerance
        states = single.snapshots[step].states
        self._medians = {
            units: _medians(states, floor, noise) for units, floor in self._floors.items()
        }
        self._scales: dict[str, float] = {}
        for state in states.values():
            if is_float(state.value):
                largest = max(self._scales.get(state.kind, 0.0), largest_magnitude(state.value))
                self._scales[state.kind] = largest

    def of(self, key: Key, state: State | None, magnitude: float) -> tuple[float, float]:
        """Returns the tolerance, and what is allowed in all, of a variable or (None) a value."""
        if state is not None and not is_float(state.value):
            # Counts are equal, or rounding alone changes them, as it may a loss scale.
            return 0.0, max(
                MULTIPLES[units] * _finite(floor[key].absolute)
                for units, floor in self._floors.items()
            )
        kind = state.kind if state is not None else ""
        strict = self._tolerance * magnitude
        allowed = [strict]
        for units, floor in self._floors.items():
            typical = self._medians[units].get(kind, 0.0) * magnitude
            allowed.append(MULTIPLES[units] * max(_finite(floor[key].absolute), typical))
        if state is not None and state.owner in self._noise:
            # It has no magnitude of its own, and is held against its peers, and against what
            # noise has made of it.
            allowed.append(self._tolerance * self._scales[kind])
            allowed.append(MULTIPLES[1] * max(magnitude, self._floors[1][key].other_magnitude))
        return strict, max(allowed)


def _finite(floor: float) -> float:
    """A floor that is not finite says nothing."""
    return floor if math.isfinite(floor) else 0.0


def sharp_until(steps: Sequence[StepReport]) -> int | None:
    """Returns the last step before any that is not sharp; None if the first is not."""
    last = None
    for report in steps:
        if not report.sharp:
            break
        last = report.step
    return last


def growth(steps: Sequence[StepReport]) -> float | None:
    """Returns by how much a step multiplies rounding; None if it is not seen to grow.

    The slope of the logarithm of the floor over the steps, up to where it stops to grow.
    """
    floors = [(report.step, report.median_floor) for report in steps if report.median_floor > 0]
    last = next((i for i, (_, floor) in enumerate(floors) if floor > _SATURATED), len(floors))
    rising = floors[: last + 1]
    if len(rising) < 2 or rising[-1][1] < 100 * rising[0][1]:
        return None
    numbers, logarithms = zip(*[(step, math.log(floor)) for step, floor in rising], strict=True)
    slope = float(np.polyfit(numbers, logarithms, 1)[0])
    return math.exp(slope) if slope > 0 else None


def _made_of_rounding(single: Outcome, floor: Deviation) -> frozenset[int]:
    """The weights whose true gradient is zero: rounding alone decides where they go.

    A bias before batch normalization or the bias of an attention key changes nothing: what is
    computed as its gradient is noise, and an optimizer such as Adam scales noise up to full steps.
    All that belongs to such a weight, slots included, is another after a move by one unit.
    """
    step, snapshot = next(iter(single.snapshots.items()))
    smallest: dict[int, float] = {}
    for key, state in snapshot.states.items():
        if state.owner is not None and is_float(state.value):
            relative = floor[step][key].relative
            smallest[state.owner] = min(smallest.get(state.owner, math.inf), relative)
    return frozenset(owner for owner, relative in smallest.items() if relative >= _NOISE)


def _medians(
    states: Mapping[Key, State], floor: Mapping[Key, Distance], noise: frozenset[int]
) -> dict[str, float]:
    """The median of the relative floors, by kind; `""` stands for losses and metrics."""
    by_kind: dict[str, list[float]] = {}
    for key, state in states.items():
        if state.owner is None or state.owner in noise or not is_float(state.value):
            continue
        relative = floor[key].relative
        if math.isfinite(relative):
            by_kind.setdefault(state.kind, []).append(relative)
    medians = {kind: float(np.median(found)) for kind, found in by_kind.items()}
    # A loss is a function of the weights.
    return medians | {"": medians.get("weight", 0.0)}


def _step_report(step, single, readings, noise) -> StepReport:
    weights = [
        readings[key][-1]
        for key, state in single.snapshots[step].states.items()
        if state.kind == "weight" and state.owner not in noise and is_float(state.value)
    ]
    differences = [reading.relative for reading in weights] or [0.0]
    floors = [reading.floor for reading in weights] or [0.0]
    return StepReport(
        step,
        max(differences),
        float(np.median(differences)),
        max(floors),
        float(np.median(floors)),
        sum(reading.sharp for reading in weights),
        len(weights),
    )
