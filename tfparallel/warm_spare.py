"""What a process does that is to become a worker later: it loads TensorFlow, and waits.

`launch --standby` starts it; see `tfparallel.cluster.warm_spares`.
"""

import importlib
import json
import os
import time

from tfparallel import startup
from tfparallel.cluster.warm_spares import STANDBY
from tfparallel.cluster.worker_error import WORKER_ERROR

__all__ = ["wait"]

_LOOK_SECONDS = 0.01


def wait() -> None:
    """Returns when this process is a worker, in its environment.

    The launcher ends one that it does not take; the reaper between them ends one whose launcher
    has ended.
    """
    path = os.environ.pop(STANDBY)
    startup.prepare()
    importlib.import_module("tfparallel.replication.data_parallel")
    with open(f"{path}.begun", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{path}.begun", f"{path}.ready")
    while not os.path.exists(path):
        time.sleep(_LOOK_SECONDS)
    with open(path) as file:
        changed = json.load(file)
    changed.pop(WORKER_ERROR, None)  # This process has taken it already.
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
