"""The doctor's probe of workers: two processes of this host train, over its network.

    python -m tfparallel.diagnostics.cluster_probe ours [theirs]

prints a line of JSON. It loads no TensorFlow, which its workers do.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from tfparallel.cluster.spawn import spawn

__all__ = ["main"]

_SPAWN_SECONDS = 90
_ERROR_CHARACTERS = 2000


def main(whose: Sequence[str]) -> None:
    """Trains by each of these strategies, and prints how far from one device each ends."""
    # The doctor is asked beside a job too, whose cluster these workers are none of.
    for name in ("TF_CONFIG", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    found = {"probe": "two_workers", **{each: _tried(each) for each in whose}}
    print(json.dumps(found), flush=True)


def _tried(whose: str) -> dict[str, Any]:
    try:
        return spawn(_trained, args=(whose,), device_type="cpu", timeout_seconds=_SPAWN_SECONDS)
    # Whatever it is: it is what was asked for.
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]}


def _trained(whose: str) -> dict[str, Any]:
    probes = importlib.import_module("tfparallel.diagnostics.probes")
    return probes.trained_by_workers(whose)


if __name__ == "__main__":
    main(sys.argv[1:])
