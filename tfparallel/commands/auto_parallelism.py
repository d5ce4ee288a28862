"""`--parallel=auto`: what `tfparallel plan` puts first, and its devices."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras

from tfparallel import devices as device_lib
from tfparallel.cluster.spec import Cluster
from tfparallel.commands.exits import UsageError
from tfparallel.commands.options import TrainOptions
from tfparallel.commands.parallelism import Parallelism, hide_gpus_if_unused, start_parallelism
from tfparallel.commands.plan import nothing_fits, plan_task
from tfparallel.commands.precision import use_precision
from tfparallel.layout.mesh import Mesh
from tfparallel.planning.candidates import Candidate
from tfparallel.planning.plan import Plan
from tfparallel.task import load_task

__all__ = ["start_chosen_parallelism"]

_OF_A_PIPELINE = ("num_micro_batches", "schedule", "chunks_per_device", "recompute")


def start_chosen_parallelism(
    path: str, options: TrainOptions, facts: Mapping[str, Any]
) -> tuple[Parallelism, TrainOptions, Plan | None]:
    """Starts the parallelism that the flags name; under `--parallel=auto` the one that is planned.

    Args:
        path: The task file.
        options: What the flags say.
        facts: What all workers must agree on.

    Returns:
        The parallelism, the options with what was chosen, and the plan that it comes from, if it
        does.

    Raises:
        UsageError: If nothing fits; and as `start_parallelism`.
    """
    if options.parallel != "auto":
        return start_parallelism(options, facts), options, None
    devices = _devices(options)
    if len(devices) == 1 and options.device_memory is None:
        first, why, plan = Candidate(Mesh()), "there is one device", None
    else:
        plan = _planned(path, options, devices)
        first, why = plan.first, plan.why
        if first is None:
            raise UsageError(nothing_fits(plan))
    chosen = _chosen(options, first, devices)
    parallelism = start_parallelism(chosen, facts)
    if first.mesh.pipeline > 1:  # The very stages whose step was predicted.
        cut = {**parallelism.cut, "layers_per_stage": first.layers_per_stage}
        parallelism = dataclasses.replace(parallelism, cut=cut)
    parallelism.say(f"--parallel=auto takes {first.mesh} (--parallel={first.parallelism}): {why}")
    return parallelism, chosen, plan


def _devices(options) -> list[str]:
    """All devices there are to choose from; the CPU is split before anything starts TensorFlow."""
    try:
        cluster = Cluster.from_env()
        if cluster.num_workers > 1 and not options.allow_independent_workers:
            raise UsageError(
                "--parallel=auto chooses among the meshes of one process. Received: a process that "
                f"is one of {cluster.num_workers} workers ({cluster.source}). Name "
                "one, --parallel=data or hybrid, or add --allow_independent_workers."
            )
        hide_gpus_if_unused(options)
        if options.devices is not None:
            return device_lib.choose_devices(devices=options.devices)
        return device_lib.choose_devices(
            num_devices=options.num_devices, device_type=options.device_type
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _planned(path, options, devices) -> Plan:
    use_precision(options.precision)
    keras.utils.set_random_seed(options.seed)
    try:
        return plan_task(load_task(path), len(devices), options, devices)
    finally:
        # The model that is trained has the names that it would have had without a plan.
        keras.backend.clear_session()


def _chosen(options: TrainOptions, first: Candidate, devices: list[str]) -> TrainOptions:
    """The options as if what was chosen had been asked for."""
    mesh = first.mesh
    by_name = options.devices is not None
    chosen: dict[str, Any] = {
        "parallel": first.parallelism,
        "num_trials": 0,
        "devices": tuple(devices[: mesh.size]) if by_name else None,
        "num_devices": None if by_name else mesh.size,
    }
    if first.parallelism == "hybrid":
        chosen["mesh"] = mesh
    if mesh.pipeline > 1:
        chosen["num_micro_batches"] = first.num_micro_batches
    else:
        chosen |= dict.fromkeys(_OF_A_PIPELINE)
    if first.parallelism not in ("pipeline", "hybrid"):
        chosen["batch_normalization"] = None
    return dataclasses.replace(options, **chosen)
