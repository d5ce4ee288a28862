"""Finds workers that trained a model alone: N models of N workers, where one was wanted.

A plain Keras script imports nothing of this package, and nothing of Keras or TensorFlow is changed
for it. The launcher puts a folder with a copy of this file, as the module `sitecustomize`, onto
PYTHONPATH; Python imports it when a worker starts. At its exit the worker looks at its models, and
leaves a file in that folder if one was trained alone:

| | |
| --- | --- |
| trained | it has a `train_function`, which Keras creates in `fit` and `train_on_batch` |
| alone | TensorFlow has devices of this process only, nor does MPI or Horovod connect it |
| not on purpose | neither the model nor its strategy is of this package, which asks by itself |

A model that was deleted before the exit is missed. A worker that only evaluates is not reported,
and the launcher accepts one worker that trains while the others do not (`if rank == 0`).
"""

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Mapping

_PREFIX = "trained_alone_"
_PACKAGE = "tfparallel"
_KERAS = ("keras", "tf_keras")
# What may sum gradients between workers without TensorFlow's knowledge; and the commands of this
# package, which check who trains what.
_OTHERS = ("horovod", "byteps", "mpi4py.MPI", "tfparallel.commands.main")


def watched(folder: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of workers that tell, in `folder`, if they trained alone.

    Args:
        folder: A folder for this purpose alone, which is created.
        environment: The environment of the workers.
    """
    os.makedirs(folder)
    path = os.path.join(folder, "sitecustomize.py")
    with open(__file__, "rb") as source, open(path, "wb") as copy:
        copy.write(source.read())
    paths = [folder, *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


def trained_alone(folder: str) -> list[int]:
    """Returns the indices of the workers of this host that trained a model alone."""
    names = [name for name in os.listdir(folder) if name.startswith(_PREFIX)]
    return sorted(int(name.removeprefix(_PREFIX)) for name in names)


def _begin(folder):
    """Looks at exit. Then imports the `sitecustomize` that this one hides, if there is one."""
    atexit.register(_look, folder)
    sys.path[:] = [path for path in sys.path if path != folder]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in paths if path != folder]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    else:
        os.environ.pop("PYTHONPATH", None)
    this = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", this)


def _look(folder):
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or any(name in sys.modules for name in _OTHERS):
        return
    classes = {getattr(sys.modules.get(name), "Model", None) for name in _KERAS} - {None}
    objects = gc.get_objects() if classes else []
    kinds = {kind for kind in set(map(type, objects)) if classes.intersection(kind.__mro__)}
    if not any(_is_plain(each) for each in objects if type(each) in kinds):
        return
    # "/device:CPU:0" of a process alone, "/job:worker/replica:0/task:1/device:CPU:0" of a job.
    names = [device.name for device in tensorflow.config.list_logical_devices()]
    if not any("/job:" in name and "/job:localhost" not in name for name in names):
        with contextlib.suppress(OSError):  # The launcher has gone.
            with open(os.path.join(folder, _PREFIX + os.environ["RANK"]), "w"):
                pass


def _is_plain(model):
    """Whether a model was trained, and this package does not know of it."""
    if vars(model).get("train_function") is None:
        return False
    strategy = getattr(model, "distribute_strategy", None)
    kinds = [*type(model).__mro__, *type(strategy).__mro__]
    return not any(kind.__module__.partition(".")[0] == _PACKAGE for kind in kinds)


if __name__ == "sitecustomize":
    _begin(os.path.dirname(os.path.abspath(__file__)))
