"""The program of a `tfparallel.spawn` worker: `python -m tfparallel.commands.spawned FOLDER`."""

import importlib
import linecache
import os
import pickle
import sys
import traceback
from typing import Any

import cloudpickle

from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.cluster.launcher.sent_function import CALL, RESULT
from tfparallel.startup import has_nvidia_gpu, prepare


def main(folder: str) -> int:
    """Calls the function stored in the folder; the chief writes its result there.

    Returns:
        The exit code: 1 if the function raised.
    """
    cluster = Cluster.from_env()
    with open(os.path.join(folder, CALL), "rb") as file:
        settings = pickle.load(file)
        # Hide GPUs before TensorFlow looks for them.
        if settings["device_type"] != "cpu" and has_nvidia_gpu():
            os.environ.update(cluster.device_environment())
        sys.argv[:] = settings["argv"]
        linecache.cache.update(settings["sources"])
        if settings["names_tensorflow"]:
            # Load TensorFlow now, quietly; otherwise unpickling would load it, with its chatter.
            prepare()
        _set_up_devices(settings["num_devices"], settings["device_type"])
        function, args, kwargs = pickle.load(file)
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        # Start at the function's own frame.
        traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
        return 1
    if cluster.is_chief:
        _write_result(folder, result)
    return 0


def _set_up_devices(num_devices, device_type):
    if num_devices is None and device_type != "gpu":
        # A function that does not use TensorFlow need not wait for it.
        return
    devices = importlib.import_module("tfparallel.devices")
    if device_type == "cpu":
        devices.hide_gpus()
    names = devices.choose_devices(num_devices=num_devices, device_type=device_type)
    if names[0].startswith("GPU"):
        devices.hide_other_gpus(names)


def _write_result(folder: str, result: Any) -> None:
    path = os.path.join(folder, RESULT)
    try:
        with open(f"{path}.unfinished", "wb") as file:
            cloudpickle.dump(result, file)
    # A class's own pickling code may raise anything.
    except Exception as error:
        raise RuntimeError(
            "The function's return value must be picklable, since it is sent to another process. "
            f"Received: a {type(result).__name__} ({error}). Return numbers, arrays or "
            "`model.get_weights()`, or save to a file and return its path."
        ) from error
    os.replace(f"{path}.unfinished", path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
