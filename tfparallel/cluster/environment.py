"""The environment of a worker: its place in the job, and its use of the host.

It has TF_CONFIG, torchrun's variables, and two of our own: TFPARALLEL_JOB_TOKEN, a secret shared
by all workers of a job, and TFPARALLEL_RESTART_COUNT, 0 in the first attempt.
"""

import math
import os
from collections.abc import Mapping, Sequence

from tfparallel.cluster.cgroup import cpu_quota
from tfparallel.cluster.tf_config import write

# The transport between workers, unless the program names one.
ALL_REDUCE = "TFPARALLEL_ALL_REDUCE"

# By default glibc returns large buffers to the kernel and faults them in again at each step.
# Keeping them makes a 64 MiB all-reduce two to four times as fast.
_MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_MMAP_THRESHOLD_": "4294967295",
    "MALLOC_TRIM_THRESHOLD_": "34359738368",
    "MALLOC_TOP_PAD_": "268435456",
}
# Linux's limit on one environment variable, including its name.
_MAX_VARIABLE_BYTES = 128 * 1024
NUM_THREADS = "TF_NUM_INTRAOP_THREADS"
_THREADS = ("OMP_NUM_THREADS", NUM_THREADS, "TF_NUM_INTEROP_THREADS")


def too_many_workers(addresses: Sequence[str]) -> str | None:
    """Returns why TF_CONFIG cannot name these workers, "host:port" each; None if it can."""
    config = write({"worker": addresses}, "worker", len(addresses) - 1)
    size = len(f"TF_CONFIG={config}")
    if size < _MAX_VARIABLE_BYTES:
        return None
    return (
        f"TF_CONFIG, which lists the workers for TensorFlow, is limited to {_MAX_VARIABLE_BYTES} "
        f"bytes on Linux. Received: {len(addresses)} workers, which need {size}. Start fewer "
        "workers per host, or use shorter host addresses (--local_addr)."
    )


def job_environment(
    inherited: Mapping[str, str], num_local_workers: int, token: str, restart_count: int
) -> dict[str, str]:
    """Returns the environment that all processes of a job share on a host.

    Values for threads, malloc and buffering that the user has set take precedence. Threads beyond a
    container's CPU quota would only be throttled.
    """
    num_cores = min(len(available_cores()), cpu_quota() or math.inf)
    num_threads = max(1, int(num_cores / num_local_workers))
    return {
        **_MALLOC,
        **thread_budget(num_threads),
        # Python block-buffers a pipe, and a crash would lose its last output.
        "PYTHONUNBUFFERED": "1",
        **inherited,
        "TFPARALLEL_RESTART_COUNT": str(restart_count),
        "TFPARALLEL_JOB_TOKEN": token,
    }


def thread_budget(num_threads: int) -> dict[str, str]:
    """Returns the variables that limit each of TensorFlow's thread pools."""
    return dict.fromkeys(_THREADS, str(num_threads))


def available_cores() -> list[int]:
    """Returns the CPU cores that this process can use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def core_shares(cores: Sequence[int], num_workers: int) -> list[Sequence[int]]:
    """Divides cores into equal contiguous runs, leaving the remainder; `ValueError` if too few."""
    size = len(cores) // num_workers
    if size == 0:
        raise ValueError(
            f"Cannot bind {num_workers} workers to {len(cores)} cores; each needs its own. "
            f"Received: cores {list(cores)}. Start fewer workers, or do not bind them."
        )
    return [cores[size * share : size * (share + 1)] for share in range(num_workers)]
