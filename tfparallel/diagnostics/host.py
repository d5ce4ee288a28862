"""Examines this host for the doctor: free disk and memory, cores, and container limits."""

import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from tfparallel.cluster.environment import available_cores
from tfparallel.diagnostics.report import Finding

__all__ = ["WORKER_MIB", "examine_cores", "examine_disk", "examine_memory", "free_memory_mib"]

_MIB = 2**20
_ENOUGH_DISK_MIB = 1024
WORKER_MIB = 1024  # Free memory that a worker needs; it uses 500 before it loads data.
_CGROUP = pathlib.Path("/sys/fs/cgroup")


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
    num_cores, quota = len(available_cores()), _cpu_quota()
    text = f"{num_cores} core{'s' * (num_cores > 1)}"
    if quota is not None and quota < num_cores:
        num_threads = max(1, int(quota / num_local_workers))
        yield Finding(
            "cores",
            "warn",
            f"{text}, but this container's CPU quota is {quota:g}: TensorFlow starts one thread "
            "per core, and is throttled",
            f"set TF_NUM_INTRAOP_THREADS={num_threads} and OMP_NUM_THREADS={num_threads}",
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


def _free_memory():
    free = {
        "on the host": _free_of_host(),
        "within this container's limit": _free_of_cgroup(),
    }
    return {name: value for name, value in free.items() if value is not None}


def _free_of_host():
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024
    return None


def _free_of_cgroup():
    limit = _read(_CGROUP / "memory.max", _CGROUP / "memory" / "memory.limit_in_bytes").strip()
    used = _read(_CGROUP / "memory.current", _CGROUP / "memory" / "memory.usage_in_bytes").strip()
    # "max", or in cgroup v1 a number near 2**63, means no limit.
    if not limit.isdigit() or not used.isdigit() or int(limit) >= 2**60:
        return None
    return (int(limit) - int(used)) / _MIB


def _cpu_quota():
    quota, _, period = _read(_CGROUP / "cpu.max").strip().partition(" ")
    if not period:
        quota = _read(_CGROUP / "cpu" / "cpu.cfs_quota_us").strip()
        period = _read(_CGROUP / "cpu" / "cpu.cfs_period_us").strip()
    # "max", or in cgroup v1 "-1", means no quota.
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _read(*paths):
    """Returns the text of the first of these files that is readable, else ""."""
    for path in paths:
        try:
            return pathlib.Path(path).read_text()
        except OSError:
            continue
    return ""


def _size(mib):
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"
