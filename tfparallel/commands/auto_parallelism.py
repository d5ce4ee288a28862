"""`--parallel=auto`: what `tfparallel plan` puts first, and its devices."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
from absl import flags

from tfparallel import devices as device_lib
from tfparallel.cluster.spec import Cluster
from tfparallel.commands.flags import UsageError
from tfparallel.commands.parallelism import Parallelism, hide_gpus_if_unused, start_parallelism
from tfparallel.commands.planning_meshes import nothing_fits, plan_task
from tfparallel.commands.precision import use_precision
from tfparallel.hybrid.mesh_plan import MeshPlan
from tfparallel.layout.mesh import Mesh
from tfparallel.layout.ranking import Candidate
from tfparallel.task import load_task

__all__ = ["start_chosen_parallelism"]

_OF_A_PIPELINE = ("num_micro_batches", "schedule", "chunks_per_device", "recompute")


def start_chosen_parallelism(
    path: str, values: flags.FlagValues, facts: Callable[[], Mapping[str, Any]]
) -> tuple[Parallelism, MeshPlan | None]:
    """Starts the parallelism that the flags name; under `--parallel=auto` the one that is planned.

    Args:
        path: The task file.
        values: The flags. After "auto" they say what was chosen.
        facts: What all workers must agree on.

    Returns:
        The parallelism, and the plan that it comes from, if it does.

    Raises:
        UsageError: If nothing fits; and as `start_parallelism`.
    """
    if values.parallel != "auto":
        return start_parallelism(values, facts()), None
    devices = _devices(values)
    if len(devices) == 1 and values.device_memory is None:
        first, why, plan = Candidate(Mesh()), "there is one device", None
    else:
        plan = _planned(path, values, devices)
        first, why = plan.first, plan.why
        if first is None:
            raise UsageError(nothing_fits(plan))
    _name_form(values, first, devices)
    parallelism = start_parallelism(values, facts())
    if first.mesh.pipeline > 1:  # The very stages whose step was predicted.
        cut = {**parallelism.cut, "layers_per_stage": first.layers_per_stage}
        parallelism = dataclasses.replace(parallelism, cut=cut)
    parallelism.say(f"--parallel=auto takes {first.mesh} (--parallel={first.parallelism}): {why}")
    return parallelism, plan


def _devices(values) -> list[str]:
    """All devices there are to choose from; the CPU is split before anything starts TensorFlow."""
    try:
        cluster = Cluster.from_env()
        if cluster.num_workers > 1 and not values.allow_independent_workers:
            raise UsageError(
                "--parallel=auto chooses among the meshes of one process. Received: a process that "
                f"is one of {cluster.num_workers} workers ({cluster.source}). Name "
                "one, --parallel=data or hybrid, or add --allow_independent_workers."
            )
        hide_gpus_if_unused(values)
        if values.devices is not None:
            return device_lib.choose_devices(devices=values.devices)
        return device_lib.choose_devices(
            num_devices=values.num_devices, device_type=values.device_type
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _planned(path, values, devices) -> MeshPlan:
    use_precision(values.precision)
    keras.utils.set_random_seed(values.seed)
    try:
        return plan_task(load_task(path), len(devices), values, devices)
    finally:
        # The model that is trained has the names that it would have had without a plan.
        keras.backend.clear_session()


def _name_form(values: flags.FlagValues, first: Candidate, devices: list[str]) -> None:
    """Has the flags say what was chosen, as if it had been asked for."""
    mesh = first.mesh
    values.parallel, values.num_trials = first.parallelism, 0
    if values.devices is not None:
        values.devices = devices[: mesh.size]
    else:
        values.num_devices = mesh.size
    if first.parallelism == "hybrid":
        values.mesh = str(mesh).replace(" ", "")
    if mesh.pipeline > 1:
        values.num_micro_batches = first.num_micro_batches
    else:
        for name in _OF_A_PIPELINE:
            setattr(values, name, None)
    if first.parallelism not in ("pipeline", "hybrid"):
        values.batch_normalization = None
