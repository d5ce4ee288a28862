"""The environment of a worker: who it is, and how it uses its host.

The variables are TensorFlow's (TF_CONFIG), those of torchrun, and our own two:
TFPARALLEL_JOB_TOKEN, a secret that all workers of one job share, and
TFPARALLEL_RESTART_COUNT, 0 in the first attempt.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence

__all__ = [
    "ALL_REDUCE",
    "Place",
    "available_cores",
    "core_shares",
    "job_environment",
    "too_many_workers",
    "worker_environment",
]

# Says what carries tensors between workers where a program does not.
ALL_REDUCE = "TFPARALLEL_ALL_REDUCE"

# glibc gives large buffers back to the kernel and faults them in again at each
# step; kept, a 64 MiB all-reduce is two to four times as fast.
_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_MMAP_THRESHOLD_": "4294967295",
    "MALLOC_TRIM_THRESHOLD_": "34359738368",
    "MALLOC_TOP_PAD_": "268435456",
}
# Of one variable, with its name: Linux starts no process that is given more.
_MAX_VARIABLE_BYTES = 128 * 1024
_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a worker stands in its job.

    Attributes:
        addresses: Every worker's "host:port", in the order of their indices.
        worker: This worker's index.
        local_rank: Its index among the workers of its host.
        num_local_workers: How many its host has.
        node_rank: Its host's index.
        master: "host:port" of worker 0's host, where programs of torchrun meet.
        token: The job's secret.
        restart_count: How often the job has been restarted.
    """

    addresses: Sequence[str]
    worker: int
    local_rank: int
    num_local_workers: int
    node_rank: int
    master: str
    token: str
    restart_count: int


def worker_environment(inherited: Mapping[str, str], place: Place) -> dict[str, str]:
    """Returns a worker's whole environment.

    Args:
        inherited: The launcher's environment. Its values for threads, malloc and buffering are
            the user's own and are kept.
        place: The worker's place.

    Raises:
        RuntimeError: If there are more workers than a variable can name.
    """
    master_host, _, master_port = place.master.rpartition(":")
    shared = job_environment(inherited, place.num_local_workers, place.token, place.restart_count)
    if problem := too_many_workers(place.addresses):
        raise RuntimeError(problem)
    return shared | {
        "TF_CONFIG": _config(place.addresses, place.worker),
        "RANK": str(place.worker),
        "WORLD_SIZE": str(len(place.addresses)),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.num_local_workers),
        "GROUP_RANK": str(place.node_rank),
        "MASTER_ADDR": master_host.strip("[]"),
        "MASTER_PORT": master_port,
        "TORCHELASTIC_RESTART_COUNT": str(place.restart_count),
    }


def too_many_workers(addresses: Sequence[str]) -> str | None:
    """Returns why TF_CONFIG cannot name these workers, "host:port" each; None if it can."""
    size = len(f"TF_CONFIG={_config(addresses, len(addresses) - 1)}")
    if size < _MAX_VARIABLE_BYTES:
        return None
    return (
        f"TF_CONFIG, in which TensorFlow finds the workers, can hold {_MAX_VARIABLE_BYTES} "
        f"bytes on Linux. Received: {len(addresses)} workers, which need {size}. "
        "Start fewer workers on each host, or name hosts by shorter addresses (--local_addr)."
    )


def _config(addresses, worker):
    task = {"type": "worker", "index": worker}
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": task})


def job_environment(
    inherited: Mapping[str, str], num_local_workers: int, token: str, restart_count: int
) -> dict[str, str]:
    """Returns what is the same for all processes of a job on a host.

    Args:
        inherited: As for `worker_environment`.
        num_local_workers: How many share the host's cores.
        token: The job's secret.
        restart_count: How often the job has been restarted.
    """
    num_threads = max(1, len(available_cores()) // num_local_workers)
    return {
        **_MALLOC,
        **dict.fromkeys(_THREADS, str(num_threads)),
        # Into a pipe Python would write in blocks, and its last words would be lost in a crash.
        "PYTHONUNBUFFERED": "1",
        **inherited,
        "TFPARALLEL_RESTART_COUNT": str(restart_count),
        "TFPARALLEL_JOB_TOKEN": token,
    }


def available_cores() -> list[int]:
    """Returns the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def core_shares(cores: Sequence[int], num_workers: int) -> list[Sequence[int]]:
    """Deals out cores in equal runs of neighbours; what does not divide stays unused.

    Args:
        cores: The cores.
        num_workers: How many shares.

    Returns:
        One share for each worker.

    Raises:
        ValueError: If there are more workers than cores.
    """
    size = len(cores) // num_workers
    if size == 0:
        raise ValueError(
            f"Cannot bind {num_workers} workers to {len(cores)} cores; each needs its own. "
            f"Received: cores {list(cores)}. Start fewer workers, or do not bind them."
        )
    return [cores[size * share : size * (share + 1)] for share in range(num_workers)]
