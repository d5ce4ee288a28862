"""`--num_trials`: the first meshes of a plan, each trained for a moment on the task's own data."""

import dataclasses
import gc
import math
import statistics
from collections.abc import Sequence

import keras
import tensorflow as tf
from absl import flags

from tfparallel.activity import Activity
from tfparallel.callbacks.step_time import StepTime
from tfparallel.commands.flags import UsageError
from tfparallel.commands.forms import Form
from tfparallel.commands.numbers_of_task import compiling
from tfparallel.commands.pipeline_flags import pipeline_choices
from tfparallel.data.batches import first_batches
from tfparallel.hybrid.mesh_plan import MeshPlan
from tfparallel.layout.mesh import Mesh
from tfparallel.layout.ranking import Candidate, with_trials
from tfparallel.notice import unnoticed
from tfparallel.task import Task, TaskError

__all__ = ["after_trials"]

_SECONDS, _LEAST_STEPS, _MOST_STEPS = 1.0, 5, 50  # Of a trial, behind the steps that warm it up.


def after_trials(
    found: MeshPlan,
    task: Task,
    devices: Sequence[str],
    values: flags.FlagValues,
    activity: Activity,
) -> MeshPlan:
    """Returns a plan whose first meshes have been tried, the fastest of these ahead.

    One is held at a time: each fits the devices, but several may not. A mesh that cannot be trained
    is listed with the reason, and the next one is tried.

    Args:
        found: The plan.
        task: The task.
        devices: Those that it was made for.
        values: The flags.
        activity: Shows what is tried.

    Raises:
        TaskError: If the task's data is none of what `train` takes.
    """
    data, _ = task.load_data()
    try:
        (batch,) = first_batches(
            data, global_batch_size=values.global_batch_size, seed=0, num_batches=1
        )
    except ValueError as error:
        raise TaskError(str(error)) from error
    trials: dict[Mesh, float | str] = {}
    fitting = (candidate for candidate in found.ranked if candidate.why_not is None)
    while sum(isinstance(trial, float) for trial in trials.values()) < values.num_trials:
        candidate = next(fitting, None)
        if candidate is None:
            break
        activity.say(f"trying {candidate.mesh}")
        trials[candidate.mesh] = _trial(candidate, task, batch, devices, values)
    return dataclasses.replace(found, ranked=with_trials(found.ranked, trials))


def _trial(candidate, task, batch, devices, values) -> float | str:
    """A step's seconds, or why there is none."""
    form = _form(candidate, devices, values)
    try:
        with unnoticed():
            model = form.build(task.build_model)
        jit_compile = values.jit_compile if "jit_compile" in values else None
        compiling(task.compile_model, jit_compile)(model)
        return _step_seconds(model, tf.data.Dataset.from_tensors(batch))
    except tf.errors.ResourceExhaustedError:
        return "out of memory when it was tried"
    except (UsageError, ValueError) as error:
        return str(error).partition(". ")[0].partition("\n")[0]
    finally:
        model = None
        keras.backend.clear_session()
        gc.collect()


def _form(candidate: Candidate, devices: Sequence[str], values: flags.FlagValues) -> Form:
    """The form that `--parallel=auto` starts for the mesh."""
    mesh, cut = candidate.mesh, {}
    if candidate.form in ("pipeline", "hybrid"):
        cut = {
            **pipeline_choices(values),
            "num_micro_batches": candidate.num_micro_batches,
            "layers_per_stage": candidate.layers_per_stage,
        }
    if candidate.form == "hybrid":
        cut |= {"mesh": mesh, "allow_independent_workers": True}
    return Form(candidate.form, list(devices[: mesh.size]), cut=cut)


def _step_seconds(model: keras.Model, batches: tf.data.Dataset) -> float:
    """The lower quartile of some steps of `fit`, behind those that trace it and warm it up."""

    def seconds(num_steps: int) -> list[float]:
        steps = StepTime()
        dataset = batches.repeat(num_steps + 1)
        model.fit(dataset, shuffle=False, verbose=0, callbacks=[steps])
        return steps.seconds[1:]

    once = min(seconds(2))
    number = math.ceil(_SECONDS / max(once, 1e-6))
    return statistics.quantiles(seconds(min(max(number, _LEAST_STEPS), _MOST_STEPS)))[0]
