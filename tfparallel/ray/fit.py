"""Runs a function as the workers of a job on a Ray cluster: `tfparallel.ray.fit`.

    driver ──placement groups──> Ray ──> one actor per worker ──> a fresh process per attempt

Ray decides where workers run, and reports nodes that are lost or arrive. Workers find each other
through TF_CONFIG, as under every launcher, and train to the weights of one device on any number
of workers.
"""

import importlib
import importlib.util
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfparallel.cluster.config_error import refusal, shown
from tfparallel.cluster.launcher.sent_function import pickled_call, refuse_inside_a_worker
from tfparallel.ray.options import RayOptions

MISSING = (
    "Jobs on Ray need the package ray, which is not installed. Received: no module named 'ray'. "
    "Install it with `pip install 'tfparallel[ray]'`, on every node of the cluster."
)


def fit(
    train_function: Callable[..., Any],
    num_workers: int | tuple[int, int] = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    resources_per_worker: Mapping[str, float] | None = None,
    placement_strategy: str = "PACK",
    max_failures: int = 0,
    grace_seconds: float = 60.0,
    start_timeout_seconds: float = 600.0,
    storage_path: str | os.PathLike | None = None,
) -> Any:
    """Runs a function on several workers of a Ray cluster.

    Every worker calls the function with the same arguments, in a process of its own, and joins the
    others through `tfparallel.data_parallel` or `tfparallel.MultiWorkerMirroredStrategy`. Worker
    output appears here, prefixed with the worker's index, `[0] `. If Ray is not initialized,
    `ray.init()` is called, which uses RAY_ADDRESS.

    With a range, `num_workers=(2, 4)`, the job runs on as many workers as Ray has room for. When an
    actor or a node is lost, it restarts on the others; when a node arrives, all workers save and
    continue on more. Use `tfparallel.callbacks.Checkpoint` and `Preemption`, with a folder that all
    nodes share: each restart then continues with the same examples, to the same weights.

    Args:
        train_function: The function. It is sent by value with the globals that it uses, so build
            models and load data inside it.
        num_workers: The number of workers, or the least and the largest number.
        args: The function's arguments.
        kwargs: The function's keyword arguments.
        resources_per_worker: What Ray reserves for each worker, such as `{"CPU": 4, "GPU": 1}`.
            CPUs also limit TensorFlow's threads. Default: one CPU.
        placement_strategy: Ray's strategy for the least number of workers: `"PACK"`, `"SPREAD"`,
            `"STRICT_PACK"` or `"STRICT_SPREAD"`.
        max_failures: How many times to restart all workers when one fails; -1 for no limit. With a
            range, lost actors and nodes are not counted.
        grace_seconds: How long a save may take when the workers are stopped.
        start_timeout_seconds: How long to wait for Ray to place the least number of workers.
        storage_path: The folder of the checkpoints. Before the workers start, every node must see
            it; a node that arrives later and does not see it is left out.

    Returns:
        The function's result in worker 0, the chief.

    Raises:
        ImportError: If Ray is not installed.
        ValueError: If an argument is invalid, or the call cannot be pickled.
        RuntimeError: If a worker failed more often than allowed, with the root cause first; if Ray
            cannot place the workers; if a node does not see `storage_path`; or if this process is
            itself a worker.
        SystemExit: On SIGTERM or SIGUSR1, with code 75 once all workers have saved: the same call
            then continues their work.

    Example:
        >>> def train(folder):
        ...     model = tfparallel.data_parallel(build_model)
        ...     model.compile(optimizer="adam", loss="mse")
        ...     checkpoint = tfparallel.callbacks.Checkpoint(folder)
        ...     with tfparallel.callbacks.Preemption(checkpoint) as preemption:
        ...         callbacks = [checkpoint, preemption]
        ...         return model.fit(*load_data(), batch_size=64, callbacks=callbacks).history
        >>> history = tfparallel.ray.fit(train, num_workers=(2, 4), args=["/shared/run"])
    """
    if not callable(train_function) or isinstance(args, str) or not isinstance(args, Sequence):
        problems = ["a function and a sequence of its arguments are required"]
        received = shown({"train_function": train_function, "args": args})
        raise refusal("Cannot start a job on Ray", problems, received)
    is_range = isinstance(num_workers, Sequence) and len(num_workers) == 2
    options = RayOptions(
        num_workers=tuple(num_workers) if is_range else (num_workers, num_workers),
        resources={"CPU": 1} if resources_per_worker is None else dict(resources_per_worker),
        placement_strategy=placement_strategy,
        max_failures=max_failures,
        grace_seconds=grace_seconds,
        start_timeout_seconds=start_timeout_seconds,
        storage_path=storage_path,
    )
    refuse_inside_a_worker()
    call = pickled_call(train_function, args, kwargs or {})
    if importlib.util.find_spec("ray") is None:
        raise ImportError(MISSING)
    result = importlib.import_module("tfparallel.ray.driver").run_call(call, options, _say)
    if result is None:
        raise RuntimeError(
            "Worker 0 exited without a result, for example through sys.exit() or os._exit(); the "
            "function must return. Received: exit code 0."
        )
    return pickle.loads(result)


def _say(text):
    print(f"tfparallel.ray: {text}", file=sys.stderr, flush=True)
