"""The form that `--parallel` names: its devices and workers, and the model built under it."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
from absl import flags

from tfparallel import devices as device_lib
from tfparallel.cluster.spec import Cluster
from tfparallel.commands.flags import UsageError
from tfparallel.replication.data_parallel import data_parallel
from tfparallel.replication.drop_in import MultiWorkerMirroredStrategy
from tfparallel.startup import has_nvidia_gpu, quiet_stderr

__all__ = ["Form", "start_form"]


@dataclasses.dataclass(frozen=True)
class Form:
    """Where a model is trained.

    Attributes:
        name: What `--parallel` says.
        devices: The devices of this worker.
        strategy: What joins the workers of a job; None for one process.
    """

    name: str
    devices: list[str]
    strategy: MultiWorkerMirroredStrategy | None = None

    @property
    def workers(self):
        """The workers' collectives, or None for one worker."""
        return self.strategy.workers if self.strategy is not None else None

    @property
    def is_chief(self) -> bool:
        """Whether this process speaks and writes for all workers."""
        return self.workers is None or self.workers.worker_index == 0

    def build(self, build_model: Callable[[], keras.Model]) -> keras.Model:
        """Returns the model, built under the form."""
        if self.name == "none":
            return build_model()
        if self.strategy is not None:
            return data_parallel(build_model, self.strategy)
        return data_parallel(build_model, devices=self.devices)

    def __str__(self):
        names = ", ".join(self.devices)
        if self.name == "none":
            return f"one device ({names})"
        number = f"{len(self.devices)} device{'s' * (len(self.devices) > 1)}"
        if self.workers is not None:
            return f"data parallel on {self.workers.num_workers} workers, {number} each ({names})"
        return f"data parallel on {number} ({names})"


def start_form(values: flags.FlagValues, facts: Mapping[str, Any]) -> Form:
    """Finds or makes the devices that the flags ask for, and meets the other workers.

    Args:
        values: The flags.
        facts: What all workers must agree on.

    Raises:
        UsageError: If the flags do not fit this machine, or the job that the process is part of.
        RuntimeError: If the other workers are missing or do not agree.
    """
    try:
        cluster = Cluster.from_env()
        if cluster.num_workers > 1 and values.parallel == "data" and values.strategy != "mirrored":
            return _start_worker(values, cluster, facts)
        _check_independent(values, cluster)
        if values.devices is not None:
            return Form(values.parallel, device_lib.choose_devices(devices=values.devices))
        num_devices = 1 if values.parallel == "none" else values.num_devices
        return Form(
            values.parallel,
            device_lib.choose_devices(num_devices=num_devices, device_type=values.device_type),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _start_worker(values, cluster: Cluster, facts) -> Form:
    if values.devices is not None:
        raise UsageError(
            "A worker of a job takes its devices by number, the same on all workers. Received: "
            f"--devices={','.join(values.devices)} in a job of {cluster.num_workers} workers "
            f"({cluster.source}). Use --num_devices, with --device_type."
        )
    if values.device_type == "cpu":
        device_lib.hide_gpus()
    elif has_nvidia_gpu():
        os.environ.update(cluster.device_environment())
    if values.num_devices is not None and (values.device_type == "cpu" or not has_nvidia_gpu()):
        device_lib.split_cpu(values.num_devices)
    with quiet_stderr():
        strategy = MultiWorkerMirroredStrategy.of_process(
            start_timeout=values.start_timeout,
            facts={"devices a worker": values.num_devices, **facts},
        )
    return Form(values.parallel, [device_lib.canonical(d) for d in strategy.devices], strategy)


def _check_independent(values, cluster: Cluster) -> None:
    if cluster.num_workers > 1 and not values.allow_independent_workers:
        asked = "--parallel=none" if values.parallel == "none" else "--strategy=mirrored"
        raise UsageError(
            f"This process is one of {cluster.num_workers} workers ({cluster.source}), and "
            f"{asked} would train {cluster.num_workers} separate models. --parallel=data "
            f"--strategy=multi_worker trains one. Received: {asked}. If separate models are meant, "
            "add --allow_independent_workers."
        )
    if values.strategy == "multi_worker":
        raise UsageError(
            "No other workers are known, and --strategy=multi_worker needs some. A cluster in the "
            "environment (TF_CONFIG, Slurm, MPI, Kubernetes, torchrun) is required. Received: "
            "none. Start the job with `tfparallel launch --nproc_per_node=2 -- …`."
        )
