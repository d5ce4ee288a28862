"""The doctor's probe of a Ray cluster: whether it takes this process, and what its nodes have.

    python -m tfparallel.diagnostics.ray_probe

prints a line of JSON. It connects as Ray itself would, by RAY_ADDRESS or to the cluster of this
host. As the main module, its functions are sent to the nodes whole: a node may lack tfparallel.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import platform
from typing import Any

_PACKAGES = ("tfparallel", "tensorflow", "keras")
_MOST_NODES = 64
_ANSWER_SECONDS = 60.0  # For a node to start a process, and to import the packages' metadata.


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
