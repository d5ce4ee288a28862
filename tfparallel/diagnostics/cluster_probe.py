"""The doctor's probe of multi-worker training: two processes on this host train together.

    python -m tfparallel.diagnostics.cluster_probe ours [theirs]

prints a line of JSON. Only its workers load TensorFlow.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from tfparallel.cluster.launcher.spawn import spawn
from tfparallel.cluster.launcher_env import without_counts

_OF_A_WORKER = ("TF_CONFIG", "TFPARALLEL_WORKERS", "RANK", "WORLD_SIZE", "JOB_COMPLETION_INDEX")
_SPAWN_SECONDS = 90
_ERROR_CHARACTERS = 2000


def main(whose: Sequence[str]) -> None:
    """Trains with each of these strategies, and prints the deviation from one device."""
    # The doctor may run inside a job, whose cluster these workers must not join.
    counts = os.environ.keys() - without_counts(os.environ).keys()
    for name in {*_OF_A_WORKER, *counts}:
        os.environ.pop(name, None)
    result = {"probe": "two_workers", **{each: _result_of(each) for each in whose}}
    print(json.dumps(result), flush=True)


def _result_of(whose: str) -> dict[str, Any]:
    try:
        return spawn(_train, args=(whose,), device_type="cpu", timeout_seconds=_SPAWN_SECONDS)
    # Any error is a valid outcome of the probe.
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]}


def _train(whose: str) -> dict[str, Any]:
    probes = importlib.import_module("tfparallel.diagnostics.probes")
    return probes.trained_by_workers(whose)


if __name__ == "__main__":
    main(sys.argv[1:])
