"""Verifies that parallel training produces the weights of one device.

The model trains twice on the same batches from the same weights, once on one device and once in
parallel. Then every weight, optimizer variable, loss and metric is compared.

    within the tolerance or the rounding floor
    at steps 1, 2, 4, 8, … and the last -----------------------> match
      | no                                                       (undetermined: rounding alone
    does the model have random layers?                            exceeds the tolerance)
      | yes: train again with the random layers off
    the new comparison is within the same limits, and two
    parallel runs with one seed give the same weights ---------> reproducible
      | no
      +--------------------------------------------------------> differs

`tfparallel.diagnostics.floor` defines the rounding floor of a model.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.diagnostics import floor as rounding
from tfparallel.diagnostics.check_report import CheckReport, ValueReport, VariableReport
from tfparallel.diagnostics.compare import TOLERANCES, digits_that_agree, is_float
from tfparallel.diagnostics.floor import Comparison, Deviation, Key, deviation
from tfparallel.diagnostics.layers import first_difference, random_layers
from tfparallel.diagnostics.training_run import Build, Outcome, Trial, coarsest_dtype, plain

_SHOWN = 8


def check_parity(
    build_model: Build,
    compile_model: Callable[[keras.Model], None],
    batches: list[tuple[Any, ...]],
    *,
    make_parallel_model: Callable[[Build], keras.Model],
    seed: int = 0,
    progress: Callable[[str], None] = lambda text: None,
) -> CheckReport:
    """Compares parallel training with training on one device, as `tfparallel.check` describes.

    Args:
        build_model: Returns the uncompiled model.
        compile_model: Compiles a model in place; called once for each model.
        batches: The steps, each `(x, y[, sample_weight])` in NumPy arrays. The comparison is
            sharpest at the first one, which should divide unevenly.
        make_parallel_model: Takes a function that builds the model; returns the parallel model.
        seed: Seeds the weights and the random layers.
        progress: Called with a description of each training before it starts.

    Raises:
        ValueError: If there are no batches, or the parallel model has different weights.
    """
    if not batches:
        raise ValueError("At least one batch is required. Received: batches=[].")
    trial = Trial(build_model, compile_model, batches, seed)
    with _without_retracing_warnings():
        return _compared(trial, make_parallel_model, batches, progress)


@contextlib.contextmanager
def _without_retracing_warnings() -> Iterator[None]:
    """Silences TensorFlow's warnings about retracing.

    Each training traces its own step, and TensorFlow counts all of them as one function.
    """

    def is_other_record(record: logging.LogRecord) -> bool:
        return "triggered tf.function retracing" not in record.getMessage()

    tf.get_logger().addFilter(is_other_record)
    try:
        yield
    finally:
        tf.get_logger().removeFilter(is_other_record)


def _compared(trial, make_parallel_model, batches, progress) -> CheckReport:
    runs = _Runs(trial, make_parallel_model, progress)
    drawing = random_layers(runs.single.model)
    judged, failed, notes = runs, runs.comparison.failed, _not_finite(runs.single, runs.parallel)
    failing_at_once = bool(notes)
    if failed and drawing:
        judged = _Runs(trial, make_parallel_model, progress, draws=False)
        # Includes variables that agreed in the first comparison and differ only now.
        failed = judged.comparison.failed & set(runs.comparison.readings)
        notes.append("trained again with the random layers off")
        if not runs.repeats():
            notes.append("two parallel runs with the same seed give different weights")
            judged, failed = runs, runs.comparison.failed
    failing = failing_at_once or bool(failed)
    first = None
    if failing:
        progress("looking for the first layer that differs")
        first = _layer_that_differs(trial, make_parallel_model, batches[0], runs.tolerance, notes)
        first = first or _variable_that_differs(judged)
    variables, values = _items(runs, judged, failed)
    variables, values = _with_digits(variables, runs.dtype), _with_digits(values, runs.dtype)
    notes += _undetermined_note(variables)
    verdicts = {item.verdict for item in variables}
    return CheckReport(
        verdict=(
            "differs"
            if failing
            else next((v for v in ("reproducible", "match") if v in verdicts), "undetermined")
        ),
        dtype=runs.dtype,
        tolerance=runs.tolerance,
        batch_sizes=tuple(len(tf.nest.flatten(batch)[0]) for batch in batches),
        steps=runs.comparison.steps,
        sharp_until=rounding.sharp_until(runs.comparison.steps),
        growth=rounding.growth(runs.comparison.steps),
        variables=variables,
        values=values,
        random_layers=tuple(drawing),
        first_difference=first,
        notes=tuple(notes),
        sent_bytes_in_a_step=runs.parallel.sent_bytes,
    )


def uneven_first(batches: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Shortens the first batch to a prime number of examples, which no number of devices divides.

    Bugs with uneven shards then show at the first step, where the rounding floor is lowest. The
    size is the largest prime up to half of the batch.
    """
    first = batches[0]
    half = len(tf.nest.flatten(first)[0]) // 2
    primes = [n for n in range(2, half + 1) if all(n % d for d in range(2, math.isqrt(n) + 1))]
    if not primes:
        return batches
    return [tf.nest.map_structure(lambda array: array[: primes[-1]], first), *batches[1:]]


def make_deterministic(*, operations: bool = True) -> None:
    """Turns on deterministic operations and turns off TF32, for this process.

    Both affect speed. TF32 keeps only 10 of a float32's 23 mantissa bits, which makes a wrong sum
    indistinguishable from a rounded one. Set a random seed before the first random operation
    (`keras.utils.set_random_seed`). With deterministic `operations`, Keras does not use XLA.
    """
    if operations:
        tf.config.experimental.enable_op_determinism()
    tf.config.experimental.enable_tensor_float_32_execution(False)


class _Runs:
    """The trainings of one comparison: one device, parallel, and one device with nudged weights."""

    def __init__(
        self,
        trial: Trial,
        make_parallel_model: Callable[[Build], keras.Model],
        progress: Callable[[str], None],
        draws: bool = True,
    ):
        self._trial, self._progress = trial, progress
        self._without = "" if draws else ", with the random layers off"
        self._make_parallel_model = make_parallel_model
        self._draws = draws
        self._floors: dict[int, Deviation] = {}
        progress(f"training on one device{self._without}")
        self.single = trial.run(plain, draws=draws)
        self.dtype = coarsest_dtype(self.single.model)
        self.tolerance = TOLERANCES[self.dtype]
        progress(f"training in parallel{self._without}")
        self.parallel = trial.run(make_parallel_model, draws=draws)
        self.comparison = self._compare(self.single, self.parallel)

    def repeats(self) -> bool:
        """Whether a second parallel training with the same seed gives the same weights."""
        self._progress("training in parallel again")
        repeated = self._trial.run(self._make_parallel_model, draws=self._draws)
        return not self._compare(self.parallel, repeated).failed

    def _compare(self, expected: Outcome, received: Outcome) -> Comparison:
        """Compares two trainings, against further floors if the first one is exceeded."""
        differences, floors = deviation(expected, received), {}
        for num_units in rounding.MULTIPLES:
            is_finer = num_units == rounding.FINER
            if is_finer and self.dtype not in ("float16", "bfloat16"):
                break
            if num_units not in self._floors:
                variant = "in float32" if is_finer else "from nudged initial weights"
                self._progress(f"training on one device, {variant}{self._without}")
                other = self._trial.run(
                    plain, draws=self._draws, moved_by=num_units, in_float32=is_finer
                )
                self._floors[num_units] = deviation(self.single, other)
            floors[num_units] = self._floors[num_units]
            comparison = rounding.compare(expected, differences, floors, self.tolerance)
            if not comparison.failed:
                break
        return comparison


def _items(
    runs: _Runs, judged: _Runs, failed: set[Key]
) -> tuple[tuple[VariableReport, ...], tuple[ValueReport, ...]]:
    """Returns all variables and values with their verdicts; `failed` differ in `judged`."""

    def verdict(key: Key) -> tuple[str, int | None]:
        if key in failed:
            return "differs", judged.comparison.first_step(key)
        if key in runs.comparison.failed:
            return "reproducible", None
        readings = runs.comparison.readings[key]
        is_match = any(r.sharp for r in readings) or all(
            r.relative <= runs.tolerance for r in readings
        )
        return "match" if is_match else "undetermined", None

    last, readings = runs.single.last, runs.comparison.readings
    variables = tuple(
        VariableReport(
            state.path,
            state.value.shape,
            readings[key][-1].absolute,
            readings[key][-1].relative,
            readings[key][-1].floor,
            *verdict(key),
        )
        for key, state in last.states.items()
    )
    others = runs.parallel.last.values
    values = tuple(
        ValueReport(name, value, others.get(name, math.nan), *verdict(name))
        for name, value in last.values.items()
    )
    return variables, values


def _with_digits(items, dtype: str):
    return tuple(
        dataclasses.replace(item, digits=digits_that_agree(item.relative, dtype))
        if item.verdict == "match"
        else item
        for item in items
    )


def _undetermined_note(variables: tuple[VariableReport, ...]) -> list[str]:
    paths = [item.path for item in variables if item.verdict == "undetermined"]
    if not paths:
        return []
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return [
        f"rounding alone determines {', '.join(paths[:_SHOWN])}{more}; the check proves nothing "
        "about them"
    ]


def _not_finite(single: Outcome, parallel: Outcome) -> list[str]:
    notes = []
    for where, outcome in (("on one device", single), ("in parallel", parallel)):
        steps = [i + 1 for i, loss in enumerate(outcome.running_loss) if not math.isfinite(loss)]
        paths = [
            state.path
            for state in outcome.last.states.values()
            if is_float(state.value) and not np.isfinite(state.value.astype("float64")).all()
        ]
        if steps:
            notes.append(f"the loss {where} is not finite from step {steps[0]} on")
        elif paths:
            notes.append(f"{paths[0]} is not finite {where}")
    return notes


def _layer_that_differs(
    trial: Trial,
    make_parallel_model: Callable[[Build], keras.Model],
    batch: tuple[Any, ...],
    tolerance: float,
    notes: list[str],
) -> str | None:
    try:
        return first_difference(
            lambda: trial.build(draws=False), make_parallel_model, batch, tolerance
        )
    # The verdict holds even if this search fails: it runs the model in ways that its author may
    # not have foreseen.
    except Exception as error:
        notes.append(
            f"searching for the first layer that differs failed: {type(error).__name__}: {error}"
        )
        return None


def _variable_that_differs(runs: _Runs) -> str | None:
    """Describes the variable that differs first; weights come before slots."""
    differing = [
        (reading.step, getattr(runs.single.last.states.get(key), "kind", "") != "weight", index)
        for index, (key, readings) in enumerate(runs.comparison.readings.items())
        for reading in readings
        if not reading.matches
    ]
    if not differing:
        return None
    step, _, index = min(differing)
    key, readings = list(runs.comparison.readings.items())[index]
    reading = next(reading for reading in readings if reading.step == step)
    state = runs.single.last.states.get(key)
    name = repr(key) if state is None else f"{state.path!r}"
    is_weight = state is not None and state.kind == "weight"
    of = f"layer {state.path.rpartition('/')[0]!r}: " if is_weight else ""
    return (
        f"{of}after step {step}, {name} differs by {reading.relative:.1e} of its largest "
        f"magnitude, while rounding alone accounts for {reading.floor:.1e}"
    )
