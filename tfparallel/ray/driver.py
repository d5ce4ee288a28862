"""The driver of a job on Ray: connects to the cluster, and sends the workers what they run."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

import ray

from tfparallel.cluster.launcher.supervisor import StopRequest
from tfparallel.cluster.preemption import SIGNALS, TRY_AGAIN
from tfparallel.ray.attempt import Work
from tfparallel.ray.job import run_job
from tfparallel.ray.options import RayOptions
from tfparallel.ray.screen import Screen
from tfparallel.ray.stop_signals import StopSignals


def connect() -> None:
    """Connects this process to a running cluster, that of RAY_ADDRESS or of this host.

    Raises:
        RuntimeError: If there is none.
    """
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError as error:
        raise RuntimeError(
            "A running Ray cluster is required. Received: none at RAY_ADDRESS, nor on this host. "
            f"Start one with `ray start --head`, or submit the command with `ray job submit`. "
            f"({error})"
        ) from error


def run_call(call: bytes, options: RayOptions, say: Callable[[str], None]) -> bytes | None:
    """Runs a pickled call on all workers; returns the chief's pickled result.

    Raises:
        SystemExit: After a signal that announces preemption, with the code that `launch` returns.
    """
    if not ray.is_initialized():
        ray.init()
    work = Work(None, ray.put(call), _settings())
    try:
        with StopSignals(SIGNALS) as signals:
            return run_job(work, options, Screen(say), signals.check)
    except StopRequest as request:
        saved = "; the workers saved their state" * request.has_saved
        say(f"stopped by {signal.Signals(request.signum).name}{saved}")
        sys.exit(TRY_AGAIN if request.has_saved else 128 + request.signum)


def run_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    options: RayOptions,
    say: Callable[[str], None],
    log_dir: str | None,
    check: Callable[[], None],
) -> None:
    """Runs a command as each worker; `connect` was called. `check` raises to stop the job."""
    work = Work(command, None, _settings() | environment)
    run_job(work, options, Screen(say, log_dir), check)


def _settings():
    """The driver's variables that concern the workers; Ray's `runtime_env` sends others."""
    return {name: value for name, value in os.environ.items() if name.startswith("TFPARALLEL_")}
