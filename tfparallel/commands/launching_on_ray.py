"""The body of `tfparallel launch --on=ray`."""

import importlib
import signal
from collections.abc import Sequence

from absl import flags

from tfparallel.cluster.environment import ALL_REDUCE
from tfparallel.cluster.preemption import SIGNALS
from tfparallel.cluster.worker_error import WORKER_ERROR
from tfparallel.commands.launching import say
from tfparallel.ray.options import RayOptions, parse_num_workers, parse_resources
from tfparallel.ray.stop_signals import StopSignals

_GRACE_SECONDS = 60.0  # When a node arrives, all workers save.


def launched_on_ray(values: flags.FlagValues, command: Sequence[str]) -> int:
    """Runs the workers on Ray, and returns the exit code of `launch`.

    Raises:
        RuntimeError: If Ray cannot place the workers.
        StopRequest: On a signal.
    """
    environment = {WORKER_ERROR: "1"}
    if values.transport is not None:
        environment[ALL_REDUCE] = values.transport
    options = RayOptions(
        num_workers=parse_num_workers(values.num_workers),
        resources=parse_resources(values.resources_per_worker or "CPU=1"),
        max_failures=values.max_restarts,
        grace_seconds=values.grace_seconds if values["grace_seconds"].present else _GRACE_SECONDS,
        start_timeout_seconds=values.start_timeout,
        storage_path=values.storage_path,
    )
    driver = importlib.import_module("tfparallel.ray.driver")
    job_error = importlib.import_module("tfparallel.ray.job").RayJobError
    driver.connect()
    try:
        with StopSignals((signal.SIGINT, signal.SIGHUP, *SIGNALS)) as signals:
            driver.run_command(command, environment, options, say, values.log_dir, signals.check)
    except job_error as error:
        say(str(error))
        return error.exit_code
    return 0
