"""Saved all-reduce measurements of this machine, for later runs.

One file per kind and number of ranks (devices of a process, or workers), in `$TFPARALLEL_PROFILES`,
else in `$XDG_CACHE_HOME/tfparallel` or `~/.cache/tfparallel`. It holds the environment of the
measurement (host, processor, ranks, versions) and, for each algorithm, the time at each size.
"""

import json
import math
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from tfparallel.installed import version_of

_VARIABLE = "TFPARALLEL_PROFILES"

# algorithm -> [(size in bytes, seconds), …]
Times = Mapping[str, Sequence[tuple[int, float]]]


def path_of(ranks: Sequence[str]) -> pathlib.Path:
    """Returns the path of the profile of these ranks ("CPU:0", …; "worker:HOST", …)."""
    folder = os.environ.get(_VARIABLE)
    if not folder:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = os.path.join(cache, "tfparallel")
    kind = ranks[0].partition(":")[0].lower()
    return pathlib.Path(folder, f"all_reduce_{kind}_{len(ranks)}.json")


def key_of(ranks: Sequence[str]) -> dict[str, Any]:
    """Returns the properties that must match for a profile to be valid."""
    return {
        "host": platform.node(),
        "cpu": f"{_cpu()}, {len(os.sched_getaffinity(0))} logical cores",
        "ranks": list(ranks),
        "tensorflow": version_of("tensorflow"),
    }


def save(ranks: Sequence[str], times: Times) -> pathlib.Path:
    """Writes a profile atomically and returns its path."""
    path = path_of(ranks)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    content = {"key": key_of(ranks), "seconds": {name: list(row) for name, row in times.items()}}
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(unfinished, path)
    return path


def load(ranks: Sequence[str]) -> dict[str, list[tuple[int, float]]] | None:
    """Returns the profile of these ranks, or None if none was saved.

    Raises:
        ValueError: If it was measured on another machine, with other ranks or versions, or is
            malformed.
    """
    path = path_of(ranks)
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not a profile ({error}). {_fix_hint(path)}") from error
    saved, expected = content.get("key", {}), key_of(ranks)
    differing = [
        f"{name} {saved.get(name)!r} instead of {value!r}"
        for name, value in expected.items()
        if saved.get(name) != value
    ]
    if differing:
        raise ValueError(
            "The profile was measured elsewhere, and may not apply here. A profile of this host, "
            f"these ranks and these versions is required. Received: {path} with "
            f"{'; '.join(differing)}. {_fix_hint(path)}"
        )
    return {name: [(size, time) for size, time in row] for name, row in content["seconds"].items()}


def seconds_at(row: Sequence[tuple[int, float]], size_bytes: float) -> float:
    """Returns the time at a size, by linear interpolation in log-log space.

    Beyond the largest measured size it grows in proportion; below the smallest it is constant.
    """
    ordered = sorted(row)
    if size_bytes <= ordered[0][0]:
        return ordered[0][1]
    for (low, before), (high, after) in zip(ordered[:-1], ordered[1:], strict=True):
        if size_bytes <= high:
            part = math.log(size_bytes / low) / math.log(high / low)
            return math.exp(math.log(before) * (1 - part) + math.log(after) * part)
    largest, time = ordered[-1]
    return time * size_bytes / largest


def _fix_hint(path):
    return (
        "Measure again with `tfparallel bench all_reduce --save_profile` and the same ranks, or "
        f"delete {path}."
    )


def _cpu():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
