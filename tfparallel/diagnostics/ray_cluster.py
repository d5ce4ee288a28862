"""Examines the Ray cluster that this process is told of, for the doctor.

Ray takes no process of another Ray or Python, and runs a worker with what its node has installed.

    python -m tfparallel.diagnostics.ray_cluster

is the probe of such a cluster: whether it takes this process, and what its nodes have. It connects
as Ray itself would, by RAY_ADDRESS or to the cluster of this host, and prints a line of JSON. As
those of the main module, its functions are sent to the nodes whole: a node may lack tfparallel.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

from tfparallel.diagnostics.reach import answer
from tfparallel.diagnostics.report import Finding

_ADDRESS_FILE = "/tmp/ray/ray_current_cluster"  # `ray start` writes it.
_PACKAGES = ("tfparallel", "tensorflow", "keras")
_MOST_NODES = 64
_ANSWER_SECONDS = 60.0  # For a node to start a process, and to import the packages' metadata.


def names_ray() -> bool:
    """Whether this process, or its host, is told of a Ray cluster."""
    return bool(os.environ.get("RAY_ADDRESS")) or os.path.exists(_ADDRESS_FILE)


def examine_ray(
    run_probe: Callable[[], tuple[list[dict[str, Any]], str]], timeout_seconds: float
) -> Iterator[Finding]:
    """Examines the cluster that `names_ray` has found.

    Args:
        run_probe: Runs the probe; returns its lines, and the reason of a failure or "".
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


def main() -> None:
    """Connects, and prints the installed versions of each node."""
    print(json.dumps({"probe": "ray", **_look()}), flush=True)


def _look() -> dict[str, Any]:
    ray = importlib.import_module("ray")
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    try:
        ray.init("auto", log_to_driver=False, logging_level="error")
    # Ray raises several kinds, and all of them mean that it cannot be used from here.
    except Exception as error:
        return {"error": " ".join(str(error).split())}
    nodes = [node for node in ray.nodes() if node["Alive"]]
    node_of = {}
    for node in nodes[:_MOST_NODES]:
        there = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ask = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(_installed)
        node_of[ask.remote()] = node["NodeManagerAddress"]
    answered, silent = ray.wait(list(node_of), num_returns=len(node_of), timeout=_ANSWER_SECONDS)
    return {
        "ray": ray.__version__,
        "num_nodes": len(nodes),
        "here": _installed(),
        "nodes": [[node_of[answer], ray.get(answer)] for answer in answered],
        "silent": [node_of[answer] for answer in silent],
    }


def _installed() -> dict[str, str]:
    """Returns the versions of Python and of those packages that can be imported."""
    versions = {"Python": platform.python_version()}
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:  # Not merely a folder of this name.
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:  # Importable from a folder.
                versions[name] = "of an unknown version"
    return versions


if __name__ == "__main__":
    main()
