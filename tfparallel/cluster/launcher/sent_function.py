"""A function call that is sent to worker processes: `tfparallel.spawn`, `tfparallel.ray.fit`.

cloudpickle sends functions that cannot be imported (notebook cells, `__main__`, lambdas) by value,
so a script needs no `__main__` guard. `commands/spawned.py` is the program of the workers.
"""

import io
import linecache
import os
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from tfparallel.cluster.cluster_spec import Cluster

CALL, RESULT = "call.pickle", "result.pickle"  # Files in the folder of `program`.


def refuse_inside_a_worker() -> None:
    """Raises `RuntimeError` if this process is itself one of several workers."""
    cluster = Cluster.from_env()
    if cluster.num_workers > 1:
        raise RuntimeError(
            f"This process is already one of {cluster.num_workers} workers, and each of them would "
            f"start its own workers. Received: worker {cluster.worker_index} from "
            f"{cluster.source}. Call the function directly, or unset the variables if they are "
            "stale."
        )


def pickled_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    num_devices: int | None = None,
    device_type: str = "auto",
) -> bytes:
    """Returns the content of the file CALL; `ValueError` if the call cannot be pickled."""
    try:
        call = pickled((function, tuple(args), dict(kwargs)))
    # A class's own pickling code may raise anything.
    except Exception as error:
        raise ValueError(
            "The function, its arguments and the globals that it uses must be picklable, since "
            f"they are sent to other processes. Received: {function!r} ({error}). Open files and "
            "connections, and create locks and models, inside the function."
        ) from error
    # Separate from the call: unpickling it may import TensorFlow, which these configure.
    settings = {
        "num_devices": num_devices,
        "device_type": device_type,
        "argv": sys.argv,
        "sources": _sources_of_cells(),
        # Modules are pickled by name.
        "names_tensorflow": b"tensorflow" in call or b"keras" in call,
    }
    return pickle.dumps(settings) + call


def program(folder: str) -> list[str]:
    """Returns the command of a worker that makes the call in the folder."""
    # -P: the working folder is on the module path only if it is in this process.
    return [sys.executable, "-P", "-m", "tfparallel.commands.spawned", folder]


def module_path() -> list[str]:
    """Returns this process's module path, for the PYTHONPATH of its workers."""
    # An empty entry, such as a notebook's first, means the working folder.
    return list(dict.fromkeys(os.path.abspath(entry) for entry in sys.path))


def pickled(value: Any) -> bytes:
    """Returns bytes from which `pickle.loads` restores `value` in another process."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _reduced(code):
    make, arguments = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return _named, (make, arguments, code.co_filename)


def _named(make, arguments, filename):
    return make(*arguments).replace(co_filename=filename)


class _Pickler(cloudpickle.Pickler):
    """Keeps the file names of pickled functions.

    Since 3.1.3 cloudpickle renames each file to "<dynamic-code>", which hides the source of
    notebook cells and the lines of a traceback.
    """

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({types.CodeType: _reduced})


def _sources_of_cells():
    """The source of notebook cells, which tf.function reads to convert `if` and `for`."""
    loaded = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4}
    return {name: entry for name, entry in loaded.items() if not os.path.exists(name)}
