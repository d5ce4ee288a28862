"""Suggests a command for this machine, for `tfparallel doctor --suggest`."""

import dataclasses
import importlib.util

from tfparallel import cuda_driver
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.cluster.environment import available_cores
from tfparallel.diagnostics.host import WORKER_MIB, free_memory_mib

_TRAIN = "tfparallel train TASK.py"


@dataclasses.dataclass(frozen=True)
class Machine:
    """The properties of a machine that determine the suggestion.

    Attributes:
        num_gpus: GPUs available to this process.
        num_cores: CPU cores available to it.
        free_mib: Free memory, or None if unknown.
        has_mpi: Whether MPI can carry tensors between workers.
        num_workers: Number of workers in the job that the environment describes; 1 without a job.
        source: Where the environment describes it.
    """

    num_gpus: int
    num_cores: int
    free_mib: float | None
    has_mpi: bool
    num_workers: int = 1
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A suggested command, with a one-line reason.

    Attributes:
        command: The command to paste, with the path of a task file.
        why: The reason.
        then: A command that verifies the suggestion, and what it reports.
    """

    command: str
    why: str
    then: str


def this_machine() -> Machine:
    """Examines this host, its GPU driver and the environment, without TensorFlow.

    Raises:
        ValueError: If the environment describes an invalid cluster.
    """
    cluster = Cluster.from_env()
    return Machine(
        cuda_driver.num_gpus(),
        len(available_cores()),
        free_memory_mib(),
        importlib.util.find_spec("mpi4py") is not None,
        cluster.num_workers,
        str(cluster.source),
    )


def suggested(machine: Machine) -> Suggestion:
    """Returns the command for a model that fits on one device: devices, workers, transport."""
    fits = (
        f"tfparallel plan TASK.py --num_devices={max(machine.num_gpus, 2)}",
        "the time and memory of every other parallelism, and where to cut a model that does not "
        "fit",
    )
    if machine.num_workers > 1:
        return Suggestion(
            f"{_TRAIN} --parallel=data --strategy=multi_worker",
            f"this process is one of {machine.num_workers} workers ({machine.source}): each "
            "trains on its share of the batch",
            _then("tfparallel doctor", "whether the other workers can be reached"),
        )
    if machine.num_gpus > 1:
        return Suggestion(
            f"{_TRAIN} --parallel=data --num_devices={machine.num_gpus} --device_type=gpu",
            f"{machine.num_gpus} GPUs: one replica on each, in one process; NCCL sums the "
            "gradients",
            _then(*fits),
        )
    if machine.num_gpus == 1:
        return Suggestion(
            f"{_TRAIN} --parallel=none --device_type=gpu",
            "one GPU: nothing to parallelize; several devices on it would take turns",
            _then(*fits),
        )
    number = machine.num_cores
    if machine.free_mib is not None:
        number = min(number, int(machine.free_mib // WORKER_MIB))
    if number < 2:
        shortage = "one core" if machine.num_cores < 2 else "memory for one worker"
        return Suggestion(
            f"{_TRAIN} --parallel=none",
            f"no GPU and {shortage}: more workers would take turns",
            _then(*fits),
        )
    transport, why = ("mpi", "MPI is the fastest between CPU workers on one host")
    if not machine.has_mpi:
        transport = "tensorflow"
        why = "MPI would be faster than gRPC between them: pip install 'tfparallel[mpi]'"
    of_memory = "" if number == machine.num_cores else ", as many as fit in memory"
    return Suggestion(
        f"tfparallel launch --nproc_per_node={number} --transport={transport} -- {_TRAIN} "
        "--parallel=data",
        f"{machine.num_cores} cores and no GPU: {number} workers{of_memory}; {why}",
        _then(
            f"tfparallel bench train TASK.py --nproc_per_node=1,{number}",
            "whether they are faster than one process, in which large layers already use all cores",
        ),
    )


def _then(command: str, tells: str) -> str:
    return f"{command}\n  shows {tells}"
