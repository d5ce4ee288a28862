"""The rounding floor: how far rounding alone makes two trainings diverge, by step.

    step                    1      2      4      8
    one device              a₁     a₂     a₄     a₈
    in parallel             b₁     b₂     b₄     b₈      difference  max|a − b|
    nudged initial weights  m₁     m₂     m₄     m₈      floor       max|a − m|

A parallel run adds the same numbers in a different order, and so rounds differently. How much
training amplifies that is a property of the model, not of the parallelism: a deep network with
batch normalization may amplify it tenfold per step. The third training measures it: plain Keras on
one device, with the initial weights nudged by one unit in the last place. A variable matches at a
step if

    max|a − b|  ≤  max(tolerance · max|a|,  multiple · floor)

The floor at a step is the larger of two: the variable's own, and the median over the model's
variables of the same kind, relative to their magnitudes. The nudged training is a single sample: if
a variable happens to end near its original, the median still reflects what rounding does to its
peers.

`docs/internals/check.md` explains the multiples (`MULTIPLES`) and the further trainings that run if
a variable exceeds its floor.

At the first steps the floor of a float64 training is far below the effect of any bug (1e-13 against
1e-2), and in float32 it is below the tolerance for most variables. Those steps decide. At later
steps the floor has grown, and only a difference far beyond rounding counts.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from tfparallel.diagnostics.compare import Distance, distance_between, is_float, largest_magnitude
from tfparallel.diagnostics.training_run import Outcome, Snapshot, State

Key = tuple[int | None, str] | str

# Units in the last place by which the weights are nudged -> allowed multiple of that floor. `FINER`
# is the training in a finer dtype, with unchanged weights.
FINER = 0
MULTIPLES = {1: 10.0, 32: 3.0, FINER: 3.0}

# A variable that rounding alone changes by a tenth at the first step is pure noise.
_NOISE = 0.1
# Above this the floor saturates: the distance of two trainings is bounded by their magnitudes.
_SATURATED = 1e-2


# Distances by step, then by variable or value.
Deviation = Mapping[int, Mapping[Key, Distance]]


@dataclasses.dataclass(frozen=True)
class Reading:
    """One variable or value at one step.

    Attributes:
        step: The step.
        absolute: The largest absolute difference.
        relative: `absolute` / the largest magnitude on one device.
        floor: The same for the training that was nudged by one unit.
        matches: Whether the difference is explained by rounding.
        sharp: Whether the limit was the tolerance alone.
    """

    step: int
    absolute: float
    relative: float
    floor: float
    matches: bool
    sharp: bool


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Statistics over the weights at one step, without those that are pure noise.

    Attributes:
        step: The step.
        difference: The largest relative difference between the parallel run and one device.
        median_difference: The median of these differences.
        floor: The largest relative difference caused by one unit in the last place.
        median_floor: The median of these floors.
        num_sharp: Number of weights whose limit was the tolerance alone.
        num_weights: Number of weights compared.
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
        """Whether the tolerance alone was the limit for most weights."""
        return 2 * self.num_sharp > self.num_weights


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A parallel training, compared with one device and its floors.

    Attributes:
        readings: One reading per step, for each variable and value.
        steps: Statistics over the weights, by step.
    """

    readings: dict[Key, tuple[Reading, ...]]
    steps: tuple[StepReport, ...]

    @property
    def failed(self) -> set[Key]:
        """The variables and values that differ by more than rounding at some step."""
        return {
            key
            for key, readings in self.readings.items()
            if not all(reading.matches for reading in readings)
        }

    def first_step(self, key: Key) -> int | None:
        """Returns the first step at which a variable or value differs, or None."""
        return next((r.step for r in self.readings[key] if not r.matches), None)


def deviation(single: Outcome, other: Outcome) -> Deviation:
    """Returns the distances of a training from that of one device; NaN for missing variables."""
    by_step = {}
    for step, snapshot in single.snapshots.items():
        other_snapshot = other.snapshots.get(step, Snapshot({}, {}))
        by_step[step] = {
            key: distance_between(state.value, other_snapshot.states[key].value)
            if key in other_snapshot.states
            else Distance(math.nan, math.nan, math.nan)
            for key, state in snapshot.states.items()
        }
        for name, value in snapshot.values.items():
            received = other_snapshot.values.get(name, math.nan)
            by_step[step][name] = Distance(abs(value - received), abs(value), abs(received))
    return by_step


def compare(
    single: Outcome, parallel: Deviation, floors: Mapping[int, Deviation], tolerance: float
) -> Comparison:
    """Separates the effects of rounding from those of the parallelism.

    Args:
        single: The training on one device.
        parallel: The deviation of the parallel training.
        floors: The deviations of the nudged trainings, by number of units, which must include 1;
            and that of the training in a finer dtype, under `FINER`.
        tolerance: The relative difference that counts as rounding in any model.
    """
    noise = _noise_weights(single, floors[1])
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
    return Comparison({key: tuple(by_step) for key, by_step in readings.items()}, tuple(steps))


class _Limits:
    """The allowed differences at one step."""

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
        """Returns the tolerance and the full limit, for a variable or (`state=None`) a value."""
        if state is not None and not is_float(state.value):
            # Integers must be equal, unless rounding alone changes them, as with a loss scale.
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
            # Pure noise has no meaningful magnitude: compare it with its peers, and with what noise
            # has made of it.
            allowed.append(self._tolerance * self._scales[kind])
            allowed.append(MULTIPLES[1] * max(magnitude, self._floors[1][key].other_magnitude))
        return strict, max(allowed)


def _finite(floor: float) -> float:
    """Returns the floor; 0 if it is not finite, and so carries no information."""
    return floor if math.isfinite(floor) else 0.0


def sharp_until(steps: Sequence[StepReport]) -> int | None:
    """Returns the last step before the first that is not sharp; None if that is the first step."""
    last = None
    for report in steps:
        if not report.sharp:
            break
        last = report.step
    return last


def growth(steps: Sequence[StepReport]) -> float | None:
    """Returns the factor by which each step amplifies rounding; None if no growth is visible.

    It is fitted to the logarithm of the floor over the steps, up to its saturation.
    """
    floors = [(report.step, report.median_floor) for report in steps if report.median_floor > 0]
    last = next((i for i, (_, floor) in enumerate(floors) if floor > _SATURATED), len(floors))
    rising = floors[: last + 1]
    if len(rising) < 2 or rising[-1][1] < 100 * rising[0][1]:
        return None
    numbers, logarithms = zip(*[(step, math.log(floor)) for step, floor in rising], strict=True)
    slope = float(np.polyfit(numbers, logarithms, 1)[0])
    return math.exp(slope) if slope > 0 else None


def _noise_weights(single: Outcome, floor: Deviation) -> frozenset[int]:
    """Finds the weights whose true gradient is zero, so that only rounding moves them.

    A bias before batch normalization, or the bias of an attention key, has no effect: its computed
    gradient is noise, which an optimizer such as Adam scales up to full steps. After a nudge by one
    unit, such a weight and all its slots end up completely different.
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
    """Returns the median of the relative floors by kind; `""` stands for losses and metrics."""
    by_kind: dict[str, list[float]] = {}
    for key, state in states.items():
        if state.owner is None or state.owner in noise or not is_float(state.value):
            continue
        relative = floor[key].relative
        if math.isfinite(relative):
            by_kind.setdefault(state.kind, []).append(relative)
    medians = {kind: float(np.median(floors)) for kind, floors in by_kind.items()}
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
