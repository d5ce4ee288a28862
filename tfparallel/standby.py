"""What a process does that is to become a worker later: it loads TensorFlow, and waits.

`launch --standby` starts it; see `tfparallel.cluster.standby`.
"""

import contextlib
import importlib
import json
import os
import time

from tfparallel import startup
from tfparallel.cluster.standby import STANDBY
from tfparallel.cluster.worker_error import WORKER_ERROR

__all__ = ["wait"]

_LOOK_SECONDS = 0.01


def wait() -> None:
    """Returns when this process is a worker, in its environment.

    If its launcher ends, the guardian between them ends it.
    """
    path = os.environ.pop(STANDBY)
    startup.prepare()
    importlib.import_module("tfparallel.replication.data_parallel")
    with contextlib.suppress(OSError), open(f"{path}.ready", "w"):
        pass
    while not os.path.exists(path):
        time.sleep(_LOOK_SECONDS)
    with open(path) as file:
        environment = json.load(file)
    os.remove(path)
    environment.pop(WORKER_ERROR, None)  # This process has taken it already.
    os.environ.update(environment)
