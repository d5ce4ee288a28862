"""Runs a function on the workers of a job: real processes, with a deadline.

    def main(name):                          # in program.py
        strategy = tfparallel.MultiWorkerMirroredStrategy()
        return {"index": tfparallel.worker_index(), "name": name}

    run_workers(HERE / "program.py", num_workers=2, arguments=["x"])
    # [{"index": 0, "name": "x"}, {"index": 1, "name": "x"}]

A worker that is not done at its deadline writes where each of its threads stands, and exits; the
others are stopped with it, and no process is left.
"""

import contextlib
import faulthandler
import json
import os
import pathlib
import runpy
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.forked import Forked, wait_for_first
from tfparallel.cluster.launcher.local_workers import meet_alone, worker_environment

ROOT = pathlib.Path(__file__).resolve().parents[2]
# TensorFlow's survivors of a lost peer notice it within seconds.
_LAST_WORDS_SECONDS = 3.0


class JobFailed(Exception):
    """A job of which a worker failed; the message holds what all of them wrote."""


def run_workers(
    program: str | pathlib.Path,
    num_workers: int = 2,
    num_devices: int = 1,
    arguments: Sequence[Any] = (),
    timeout_seconds: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs `main(*arguments)` of a program on each worker.

    Args:
        program: The path of a Python file that defines `main`, or its text.
        num_workers: How many workers.
        num_devices: How many logical CPU devices each of them has.
        arguments: What JSON can hold.
        timeout_seconds: How long a worker may take, its start included.
        environment: Further variables of the workers.

    Returns:
        What `main` returned on each worker, as JSON holds it.

    Raises:
        JobFailed: If a worker failed, or was not done in time.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if isinstance(program, str):
            (folder / "program.py").write_text(program)
            program = folder / "program.py"
        call = [str(program), name, timeout_seconds, num_devices, *arguments]
        # A worker that is late writes where its threads stand; give it the time to do so.
        failure = run_job(_main_of_worker, call, num_workers, timeout_seconds + 10.0, environment)
        if failure:
            raise JobFailed(failure)
        paths = [folder / f"{worker}.json" for worker in range(num_workers)]
        return [json.loads(path.read_text()) for path in paths]


def run_job(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    num_workers: int,
    timeout_seconds: float,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Calls a function in each worker of a new job on this host, each a process of its own.

    Args:
        function: A function of a module, which has no runtime to start before it is called.
        arguments: What can be pickled.
        num_workers: How many workers.
        timeout_seconds: When the job is killed.
        environment: Further variables of the workers.

    Returns:
        Which worker failed first, or was late, and what all of them wrote; "" if none did.
    """
    with contextlib.ExitStack() as stack:
        workers = []
        meeting = meet_alone(num_workers)
        for worker in range(num_workers):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            variables = worker_environment(os.environ, meeting, worker) | (environment or {})
            forked = Forked(function, arguments, folder, environment=variables, joined=True)
            workers.append(stack.enter_context(forked))
        failed = wait_for_first(workers, timeout_seconds)
        if failed is None:
            return ""
        for forked in workers:  # The others may say why.
            with contextlib.suppress(subprocess.TimeoutExpired):
                forked.wait(_LAST_WORDS_SECONDS)
        written = [
            f"[{worker}] {line}"
            for worker, forked in enumerate(workers)
            for line in forked.written()[0].splitlines()
        ]
        return "\n".join([f"Worker {workers.index(failed)} failed.", *written])


def _main_of_worker(path, folder, timeout_seconds, num_devices, *arguments):
    """What each worker runs."""
    # From a thread that needs no lock: a collective that hangs cannot hold it up.
    faulthandler.dump_traceback_later(timeout_seconds, exit=True)
    import tfparallel

    tfparallel.devices.split_cpu(num_devices)
    result = runpy.run_path(path)["main"](*arguments)
    text = json.dumps(result)
    pathlib.Path(folder, f"{os.environ['RANK']}.json").write_text(text)
