"""Tries the first meshes of a plan: trains each briefly on a batch of the task's data."""

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfparallel.callbacks.step_measures import StepTime
from tfparallel.data.batches import batches_dataset, first_batches
from tfparallel.planning.candidates import Candidate, with_trials
from tfparallel.planning.planner import Plan
from tfparallel.task import Task, TaskError
from tfparallel.user_log import unnoticed

_SECONDS, _LEAST_CALLS, _MOST_CALLS = 1.0, 5, 50  # Length of a trial after the warm-up.

# Errors that a builder, TensorFlow or XLA may raise for one mesh but not for the next.
_REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError, tf.errors.OpError)


def batch_of(task: Task, global_batch_size: int) -> tuple[Any, ...]:
    """Returns the first batch of a task's data, as NumPy arrays.

    Raises:
        TaskError: If `train` does not accept the data.
    """
    data, _ = task.load_data()
    try:
        batch, _ = first_batches(  # The last one is short.
            data, global_batch_size=global_batch_size, seed=0, num_batches=2
        )
    except ValueError as error:
        raise TaskError(str(error)) from error
    return batch


def after_trials(
    plan: Plan,
    batch: tuple[Any, ...],
    build: Callable[[Candidate], keras.Model],
    num_trials: int,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Tries the first meshes of a plan; returns the plan with the fastest first.

    Only one model exists at a time: each fits on the devices, but several may not. If a mesh cannot
    train the model, its reason is recorded, and the next mesh is tried.

    Args:
        plan: The plan.
        batch: The batch of every step.
        build: Builds the task's model on a candidate's mesh, and compiles it.
        num_trials: Number of meshes to try.
        progress: Called with a description of each trial.

    Raises:
        TaskError: If no mesh can train the model.
    """
    started = time.perf_counter()
    trials: dict[str, float | str] = {}
    error: Exception | None = None
    fitting = (candidate for candidate in plan.ranked if candidate.why_not is None)
    while sum(isinstance(trial, float) for trial in trials.values()) < num_trials:
        candidate = next(fitting, None)
        if candidate is None:
            break
        progress(f"trying {candidate.name}")
        try:
            trials[candidate.name] = _trial(candidate, batch, build)
        except _REFUSALS as refusal:
            if isinstance(refusal, TaskError):
                raise
            trials[candidate.name], error = _reason(refusal), refusal
    if trials and all(isinstance(trial, str) for trial in trials.values()):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in trials.items())
        raise TaskError(f"No mesh could be trained. Received: {reasons}.") from error
    return dataclasses.replace(
        plan,
        ranked=with_trials(plan.ranked, trials),
        trial_seconds=time.perf_counter() - started,
    )


def _reason(error: Exception) -> str:
    """Returns the first sentence of an error."""
    if isinstance(error, tf.errors.ResourceExhaustedError):
        return "out of memory in the trial"
    return str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__


def _trial(candidate, batch, build) -> float:
    """Trains on a mesh briefly; returns the seconds per step."""
    model = None
    policy, is_shown = keras.config.dtype_policy(), keras.config.is_interactive_logging_enabled()
    try:
        with unnoticed():
            model = build(candidate)
        return _step_seconds(model, batch)
    finally:
        del model
        keras.backend.clear_session()  # It also resets the two settings below.
        keras.config.set_dtype_policy(policy)
        if not is_shown:
            keras.config.disable_interactive_logging()
        gc.collect()


def _step_seconds(model: keras.Model, batch: tuple[Any, ...]) -> float:
    """Returns the lower quartile of several steps of `fit`, after tracing and warm-up."""
    steps_of_a_call = model.steps_per_execution
    batches = batches_dataset([batch]).cache()

    def seconds(num_calls: int) -> list[float]:
        steps = StepTime()
        dataset = batches.repeat(steps_of_a_call * (1 + num_calls))
        model.fit(dataset, shuffle=False, verbose=0, callbacks=[steps])
        return [each / steps_of_a_call for each in steps.seconds[1:]]

    once = steps_of_a_call * min(seconds(2))
    num_calls = math.ceil(_SECONDS / max(once, 1e-6))
    return statistics.quantiles(seconds(min(max(num_calls, _LEAST_CALLS), _MOST_CALLS)))[0]
