"""A spare process, which loads TensorFlow and waits until it becomes a worker.

`launch --standby` starts it; see `tfparallel.cluster.launcher.warm_spares`.
"""

import importlib
import json
import os
import time

from tfparallel import startup
from tfparallel.cluster.launcher.warm_spares import STANDBY
from tfparallel.cluster.worker_error import WORKER_ERROR

_LOOK_SECONDS = 0.01


def wait() -> None:
    """Waits until this process becomes a worker, and sets its environment.

    The launcher ends a spare that it does not need; the reaper between them ends a spare whose
    launcher has exited.
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
    changed.pop(WORKER_ERROR, None)  # This process has already taken it.
    for name, value in changed.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
