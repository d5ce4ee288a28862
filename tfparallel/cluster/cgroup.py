"""The limits of the control groups that this process is in: memory, and processor time.

In a container the outermost folder is usually its own group. Slurm's groups are nested, as in
`job_7/step_0/user/task_1`, and each level may have a limit.
"""

import pathlib
from collections.abc import Iterator

_ROOT, _MEMBERSHIP = pathlib.Path("/sys/fs/cgroup"), pathlib.Path("/proc/self/cgroup")
_NO_LIMIT = 2**60  # In version 1, a number near 2**63.


def free_memory_bytes() -> int | None:
    """Returns the memory left within the tightest limit; None without a limit."""
    free = []
    for folder in _folders("memory"):
        limit = _read(folder, "memory.max", "memory.limit_in_bytes")
        used = _read(folder, "memory.current", "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT:
            free.append(int(limit) - int(used))
    return min(free, default=None)


def cpu_quota() -> float | None:
    """Returns the smallest quota of processor time, in cores; None without a quota."""
    quotas = []
    for folder in _folders("cpu"):
        quota, _, period = _read(folder, "cpu.max").partition(" ")
        if not period:
            quota = _read(folder, "cpu.cfs_quota_us")
            period = _read(folder, "cpu.cfs_period_us")
        # "max", or in version 1 "-1", means no quota.
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _folders(controller: str) -> Iterator[pathlib.Path]:
    """Yields the groups of this process, from its own to the outermost."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:  # Not Linux.
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # Version 2 has one hierarchy, without a name.
        root = _ROOT / controller if controllers else _ROOT
        for folder in (root / path.lstrip("/"), *(root / path.lstrip("/")).parents):
            yield folder
            if folder == root:
                break


def _read(folder: pathlib.Path, *names: str) -> str:
    """Returns the text of the first of these files that is readable, else ""."""
    for name in names:
        try:
            return (folder / name).read_text().strip()
        except OSError:
            continue
    return ""
