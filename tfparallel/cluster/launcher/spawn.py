"""Runs a function or a task file as the workers of a job on this host: `tfparallel.spawn`.

    this process ──call.pickle──> N fresh processes (commands/spawned.py)
    this process <─result.pickle─ worker 0, the chief

Workers are never forked: a notebook kernel may have loaded TensorFlow, whose threads and devices
do not survive a fork. Workers inherit the module path, `sys.argv` and the working folder.
"""

import contextlib
import json
import numbers
import os
import pathlib
import pickle
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfparallel.chatter import has_nvidia_gpu, wants_quiet
from tfparallel.cluster.config_error import refusal, shown
from tfparallel.cluster.launcher.back_off import RestartBackOff
from tfparallel.cluster.launcher.local_workers import host_programs, meet_alone
from tfparallel.cluster.launcher.output import Prefixer, TextOutput
from tfparallel.cluster.launcher.output_filter import OutputFilter
from tfparallel.cluster.launcher.sent_function import (
    CALL,
    RESULT,
    module_path,
    pickled_call,
    program,
    refuse_inside_a_worker,
)
from tfparallel.cluster.launcher.supervisor import Job
from tfparallel.cluster.own_folder import OwnFolder
from tfparallel.cluster.worker_exit import Outcome

_DEVICE_TYPES = ("auto", "cpu", "gpu")
_USAGE_EXIT_CODE = 2


def spawn(
    function_or_task_file: Callable[..., Any] | str | os.PathLike,
    num_workers: int = 2,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_devices: int | None = None,
    device_type: str = "auto",
    max_restarts: int = 0,
    timeout_seconds: float | None = None,
) -> Any:
    """Runs a function in several new processes, the workers of one job.

    Use it in a notebook or a script; `tfparallel launch` is its command-line counterpart. Every
    worker calls the function with the same arguments, and joins the others through
    `tfparallel.data_parallel` or `tfparallel.MultiWorkerMirroredStrategy`. Worker output appears
    here, prefixed with the worker's index, `[0] `. If a worker fails, the others are stopped; no
    process outlives the call.

    The function may be defined in a notebook cell or a script. It is sent with the values of the
    globals that it uses: load data and build models inside the function, and pass paths, numbers
    and arrays. A tensor or a model would start TensorFlow before the workers have met.

    Args:
        function_or_task_file: The function; or the path of a task file to train, as with
            `tfparallel train`.
        num_workers: The number of processes.
        args: The function's arguments.
        kwargs: The function's keyword arguments; for a task file, the flags of `tfparallel train`,
            such as `{"epochs": 3, "seed": 7}`.
        num_devices: The number of devices per worker; the CPU is split as needed. Default: an
            equal share of the GPUs, or one CPU.
        device_type: `"cpu"` hides the GPUs, `"gpu"` requires one per worker, `"auto"` uses GPUs if
            there are any.
        max_restarts: How many times to restart all workers when one fails.
        timeout_seconds: The time limit of the whole call; None for no limit.

    Returns:
        The function's result in worker 0, the chief; for a task file, the report of
        `tfparallel train`.

    Raises:
        ValueError: If an argument is invalid, or the function or its arguments cannot be pickled;
            for a task file, also if the file or a flag is invalid.
        RuntimeError: If a worker failed, with its index, its exit code or signal and its last
            lines; if the time limit was exceeded; if the result cannot be sent back; or if this
            process is itself a worker.

    Example:
        >>> def train():
        ...     model = tfparallel.data_parallel(build_model)
        ...     model.compile(optimizer="adam", loss="mse")
        ...     return model.fit(*load_data(), batch_size=64).history
        >>> history = tfparallel.spawn(train, num_workers=2)
    """
    is_function = callable(function_or_task_file)
    flags = dict(kwargs or {})
    _check(
        function_or_task_file,
        flags,
        num_workers=num_workers,
        args=args,
        num_devices=num_devices,
        device_type=device_type,
        max_restarts=max_restarts,
        timeout_seconds=timeout_seconds,
    )
    refuse_inside_a_worker()
    with OwnFolder("tfparallel_spawn_") as temporary:
        folder = temporary.path
        if is_function:
            call = pickled_call(
                function_or_task_file, args, flags,
                num_devices=num_devices, device_type=device_type,
            )  # fmt: skip
            pathlib.Path(folder, CALL).write_bytes(call)
            command = program(folder)
            result_path, loads = os.path.join(folder, RESULT), pickle.loads
        else:
            path = os.fspath(function_or_task_file)
            result_path = flags.setdefault("report", os.path.join(folder, "report.json"))
            if num_devices is not None:
                flags["num_devices"] = num_devices
            flags["device_type"] = device_type
            command = [sys.executable, "-P", "-m", "tfparallel", "train", path]
            command += _flag_arguments(flags)
            result_path, loads = os.fspath(result_path), json.loads
        outcome = _run(command, num_workers, device_type, max_restarts, timeout_seconds)
        if outcome.timed_out:
            raise RuntimeError(_too_slow(outcome, timeout_seconds))
        if outcome.culprit is not None:
            if not is_function and outcome.culprit.returncode == _USAGE_EXIT_CODE:
                raise ValueError("\n".join(outcome.culprit.tail))
            raise RuntimeError(_failure(outcome))
        if not os.path.exists(result_path):
            raise RuntimeError(
                "Worker 0 exited without a result, for example through sys.exit() or os._exit(); "
                "the function must return. Received: exit code 0."
            )
        result = loads(pathlib.Path(result_path).read_bytes())
        if os.path.dirname(result_path) == folder and not is_function:
            del result["configuration"]["report"]
        return result


def _check(function_or_task_file, flags, **values):
    """Raises one error for all invalid arguments of `spawn`."""
    problems = []
    is_path = isinstance(function_or_task_file, str | os.PathLike)
    received = {"function_or_task_file": function_or_task_file}
    if is_path and not os.path.isfile(function_or_task_file):
        problems.append("the task file does not exist")
    elif is_path and values["args"]:
        problems.append("a task file takes no args; pass its flags as kwargs")
    elif not is_path and not callable(function_or_task_file):
        problems.append("a function or the path of a task file is required")
    if is_path:
        misplaced = sorted({"num_devices", "device_type", "num_workers"} & set(flags))
        if misplaced:
            problems.append(f"{', '.join(misplaced)} must be an argument of spawn, not in kwargs")
    counts = {"num_workers": 1, "num_devices": 1, "max_restarts": 0}
    for name, least in counts.items():
        value = values[name]
        if name == "num_devices" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
            problems.append(f"{name} must be a whole number of at least {least}")
    if values["device_type"] not in _DEVICE_TYPES:
        problems.append(f"device_type must be one of {', '.join(_DEVICE_TYPES)}")
    seconds = values["timeout_seconds"]
    if seconds is not None and not (isinstance(seconds, numbers.Real) and seconds > 0):
        problems.append("timeout_seconds must be positive, or None")
    if isinstance(values["args"], str) or not isinstance(values["args"], Sequence):
        problems.append("args must be a sequence of the function's arguments")
    if problems:
        raise refusal("Cannot spawn workers", problems, shown(received | values))


def _environment(device_type):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(module_path())}
    if device_type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
    return environment


def _flag_arguments(flags):
    for name, value in flags.items():
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no{name}"
        elif isinstance(value, list | tuple):
            yield f"--{name}={','.join(map(str, value))}"
        elif value is not None:
            yield f"--{name}={value}"


def _run(command, num_workers, device_type, max_restarts, timeout_seconds):
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    back_off = RestartBackOff()
    for attempt in range(max_restarts + 1):
        programs = host_programs(
            meet_alone(num_workers), command, _environment(device_type), restart_count=attempt
        )
        screen = Prefixer(TextOutput("stdout"), TextOutput("stderr"))
        output_filter = OutputFilter(screen.write, has_gpu=has_nvidia_gpu(), is_quiet=wants_quiet())
        try:
            job = Job(programs, on_output=output_filter.write)
            outcome = job.wait(None if deadline is None else max(0, deadline - time.monotonic()))
        finally:
            with contextlib.suppress(OSError):
                output_filter.finish()
                screen.finish()
        if outcome.culprit is None or attempt == max_restarts:
            return outcome
        seconds = back_off.failed(outcome.culprit.time_seconds)
        if deadline is not None:
            seconds = min(seconds, max(0.0, deadline - time.monotonic()))
        when = f" in {seconds:.0f} s" if seconds else ""
        print(
            f"tfparallel.spawn: {outcome.culprit.describe()}; "
            f"restarting all workers{when} ({attempt + 1} of {max_restarts})",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(seconds)


def _failure(outcome: Outcome) -> str:
    text = outcome.culprit.explain()
    stopped = [str(exit_.worker) for exit_ in outcome.exits if exit_.stopped]
    if stopped:
        text += f"\nStopped worker{'s' * (len(stopped) > 1)} {', '.join(stopped)}."
    return f"{text[0].upper()}{text[1:]}"


def _too_slow(outcome, timeout_seconds):
    running = [exit_ for exit_ in outcome.exits if exit_.stopped]
    names = ", ".join(str(exit_.worker) for exit_ in running)
    text = (
        f"The workers did not finish in time; {names} {'were' if len(running) > 1 else 'was'} "
        f"still running and had to be stopped. Received: timeout_seconds={timeout_seconds}. The "
        "last lines:"
    )
    lines = [f"    [{exit_.worker}] {line}" for exit_ in running for line in exit_.tail[-5:]]
    return "\n".join([text, *(lines or ["    (none)"])])
