"""Examines the Ray cluster that this process is told of, for the doctor.

Ray takes no process of another Ray or Python, and runs a worker with what its node has installed.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

from tfparallel.diagnostics.reach import answer
from tfparallel.diagnostics.report import Finding

_ADDRESS_FILE = "/tmp/ray/ray_current_cluster"  # `ray start` writes it.


def names_ray() -> bool:
    """Whether this process, or its host, is told of a Ray cluster."""
    return bool(os.environ.get("RAY_ADDRESS")) or os.path.exists(_ADDRESS_FILE)


def examine_ray(
    run_probe: Callable[[], tuple[list[dict[str, Any]], str]], timeout_seconds: float
) -> Iterator[Finding]:
    """Examines the cluster that `names_ray` has found.

    Args:
        run_probe: Runs `ray_probe.py`; returns its lines, and the reason of a failure or "".
        timeout_seconds: How long the cluster's head may take to answer.
    """
    address, verdict = os.environ.get("RAY_ADDRESS"), "broken"
    source = f"RAY_ADDRESS={address}"
    if not address:
        with open(_ADDRESS_FILE) as file:
            address = file.read().strip()
        # The file may be left over from a cluster that has ended.
        source, verdict = f"{_ADDRESS_FILE} ({address})", "warn"
    if importlib.util.find_spec("ray") is None:
        text = f"{source} names a cluster, but ray is not installed in this environment"
        yield Finding("Ray", verdict, text, "pip install ray, in the cluster's version")
        return
    result, problem = {}, _why_unreachable(address, timeout_seconds)
    if problem is None:
        lines, error = run_probe()
        result = lines[-1] if lines else {"error": error or "the probe printed nothing"}
        problem = result.get("error")
    if problem is None:
        yield from _node_findings(result)
        return
    is_other = "mismatch" in problem
    advice = "use the cluster's Ray and Python" if is_other else "check it with `ray status`"
    yield Finding("Ray", verdict, f"{source} names a cluster, but {problem}", advice)


def _why_unreachable(address: str, timeout_seconds: float) -> str | None:
    """Returns why there is no cluster at this address; Ray itself would wait for minutes."""
    try:
        problem = answer(address.removeprefix("ray://"), timeout_seconds)
    except ValueError:  # Another form, such as "auto".
        return None
    return None if problem == "listening" else f"it cannot be reached: {problem}"


def _node_findings(result: dict[str, Any]) -> Iterator[Finding]:
    here, num_alike = result["here"], 0
    for node in result["silent"]:
        yield Finding(
            f"Ray node {node}", "broken", "it started no process in time", "check the node's logs"
        )
    for node, there in result["nodes"]:
        differing = [
            f"{name} {there.get(name, 'is missing')} ({version} here)"
            for name, version in here.items()
            if there.get(name) != version
        ]
        num_alike += not differing
        if differing:
            yield Finding(
                f"Ray node {node}",
                "warn" if here.keys() <= there.keys() else "broken",
                ", ".join(differing),
                "install the same versions there, or pass them in runtime_env",
            )
    text = f"{result['ray']}, {num_alike} of {result['num_nodes']} nodes have the versions of this "
    yield Finding("Ray", "ok", f"{text}environment")
