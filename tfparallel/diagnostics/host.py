"""Examines this host for the doctor: free disk and memory, cores, and the limits of its job."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator

from tfparallel.cluster.cgroup import cpu_quota, free_memory_bytes
from tfparallel.cluster.environment import NUM_THREADS, available_cores
from tfparallel.diagnostics.report import Finding

_MIB = 2**20
_ENOUGH_DISK_MIB = 1024
WORKER_MIB = 1024  # Free memory that a worker needs; it uses 500 before it loads data.


def examine_disk(folder: str | None, min_free_mib: float | None) -> Iterator[Finding]:
    """Examines whether checkpoints can be written, and how much space there is.

    Args:
        folder: The checkpoint folder, which need not exist; by default the working folder.
        min_free_mib: Space that the job needs; less is "broken". By default, little space is a
            warning.
    """
    folder = os.path.abspath(folder or os.curdir)
    existing = folder
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    try:
        # Write a file: access rights do not reveal a read-only mount or a full disk.
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        yield Finding(
            "disk",
            "broken",
            f"{folder} is not writable ({error.strerror}): checkpoints cannot be saved",
            "choose a writable --checkpoint_dir, or free some space",
        )
        return
    free_mib = shutil.disk_usage(existing).free / _MIB
    text = f"{_size(free_mib)} free for {folder}"
    if min_free_mib is not None and free_mib < min_free_mib:
        text += f", but {_size(min_free_mib)} are required (--min_free_mib)"
        yield Finding("disk", "broken", text, "free some space, or choose another --checkpoint_dir")
    elif min_free_mib is None and free_mib < _ENOUGH_DISK_MIB:
        text += ": a checkpoint holds the weights and, with Adam, twice as much again"
        yield Finding("disk", "warn", text, "free some space, or choose another --checkpoint_dir")
    else:
        yield Finding("disk", "ok", text)


def examine_memory(num_local_workers: int) -> Iterator[Finding]:
    """Examines the free memory of the host and within the container's limit."""
    free = _free_memory()
    if not free:
        return
    name = min(free, key=free.get)
    text = f"{_size(free[name])} free {name}"
    if num_local_workers > 1:
        text += f", for {num_local_workers} workers on this host"
    if free[name] < WORKER_MIB * num_local_workers:
        advice = "stop other programs, start fewer workers, or raise the limit"
        text += ": a worker uses about 500 MiB before it loads any data"
        yield Finding("memory", "warn", text, advice)
    else:
        yield Finding("memory", "ok", text)


def free_memory_mib() -> float | None:
    """Returns the free memory, within the container's limit; None if unknown."""
    return min(_free_memory().values(), default=None)


def examine_cores(num_local_workers: int) -> Iterator[Finding]:
    """Examines the number of cores, and whether a CPU quota limits their use."""
    num_cores, quota = len(available_cores()), cpu_quota()
    set_threads = os.environ.get(NUM_THREADS, "")
    num_threads = (set_threads.isdecimal() and int(set_threads)) or num_cores
    text = f"{num_cores} core{'s' * (num_cores > 1)}"
    if quota is not None and quota < min(num_cores, num_threads * num_local_workers):
        num_fitting = max(1, int(quota / num_local_workers))
        threads = f"{num_threads} thread{'s' * (num_threads > 1)}"
        yield Finding(
            "cores",
            "warn",
            f"{text}, but the CPU quota of this container or job is {quota:g}: TensorFlow starts "
            f"{threads} in each worker, and is throttled",
            f"set {NUM_THREADS}={num_fitting} and OMP_NUM_THREADS={num_fitting}",
        )
    elif num_local_workers > num_cores:
        yield Finding(
            "cores",
            "warn",
            f"{text} for {num_local_workers} workers on this host: they take turns",
            "start at most one worker per core",
        )
    else:
        yield Finding("cores", "ok", text)


def _free_memory() -> dict[str, float]:
    free = {
        "on the host": _free_of_host(),
        "within the limit of this container or job": free_memory_bytes(),
    }
    return {name: value / _MIB for name, value in free.items() if value is not None}


def _free_of_host() -> int | None:
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _size(mib):
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"
