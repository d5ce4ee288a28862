"""The environment of a worker: who it is, and how it uses its host.

The variables are TensorFlow's (TF_CONFIG), those of torchrun, and our own two:
TFPARALLEL_JOB_TOKEN, a secret that all workers of one job share, and
TFPARALLEL_RESTART_COUNT, 0 in the first attempt.
"""

import os
from collections.abc import Mapping, Sequence

from tfparallel.cluster.tf_config import write

__all__ = [
    "ALL_REDUCE",
    "available_cores",
    "core_shares",
    "job_environment",
    "too_many_workers",
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


def too_many_workers(addresses: Sequence[str]) -> str | None:
    """Returns why TF_CONFIG cannot name these workers, "host:port" each; None if it can."""
    config = write({"worker": addresses}, "worker", len(addresses) - 1)
    size = len(f"TF_CONFIG={config}")
    if size < _MAX_VARIABLE_BYTES:
        return None
    return (
        f"TF_CONFIG, in which TensorFlow finds the workers, can hold {_MAX_VARIABLE_BYTES} "
        f"bytes on Linux. Received: {len(addresses)} workers, which need {size}. "
        "Start fewer workers on each host, or name hosts by shorter addresses (--local_addr)."
    )


def job_environment(
    inherited: Mapping[str, str], num_local_workers: int, token: str, restart_count: int
) -> dict[str, str]:
    """Returns what is the same for all processes of a job on a host.

    Of the inherited environment, the user's own values for threads, malloc and buffering are kept.
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
    """Deals out cores in equal runs of neighbours, and leaves the rest; `ValueError` if too few."""
    size = len(cores) // num_workers
    if size == 0:
        raise ValueError(
            f"Cannot bind {num_workers} workers to {len(cores)} cores; each needs its own. "
            f"Received: cores {list(cores)}. Start fewer workers, or do not bind them."
        )
    return [cores[size * share : size * (share + 1)] for share in range(num_workers)]
