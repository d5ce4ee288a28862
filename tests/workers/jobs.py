"""Runs a function on the workers of a job: real processes, with a deadline.

    def main(name):                          # in program.py
        strategy = tfparallel.MultiWorkerMirroredStrategy()
        return {"index": tfparallel.worker_index(), "name": name}

    run_workers(HERE / "program.py", num_workers=2, arguments=["x"])
    # [{"index": 0, "name": "x"}, {"index": 1, "name": "x"}]

A worker that is not done at its deadline writes where each of its threads stands, and exits; the
others are stopped with it, and no process is left.
"""

import faulthandler
import json
import os
import pathlib
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from tfparallel.cluster.environment import Place, worker_environment
from tfparallel.cluster.ports import free_ports
from tfparallel.cluster.supervisor import Outcome, Program, run

ROOT = pathlib.Path(__file__).resolve().parents[2]


class JobFailed(Exception):
    """A job of which a worker failed; the message holds what all of them wrote."""

    def __init__(self, outcome: Outcome, output: str):
        super().__init__(f"{outcome.culprit.describe()}\n{output}")
        self.outcome = outcome


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
    written: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if isinstance(program, str):
            (folder / "program.py").write_text(program)
            program = folder / "program.py"
        call = [str(program), name, timeout_seconds, num_devices, *arguments]
        outcome = run(
            _programs(
                num_workers,
                [sys.executable, "-m", "tests.workers.jobs", json.dumps(call)],
                environment or {},
            ),
            on_output=lambda worker, _, text: written.append(
                "".join(f"[{worker}] {line}\n" for line in text.decode().splitlines())
            ),
        )
        if outcome.culprit is not None:
            raise JobFailed(outcome, "".join(written))
        paths = [folder / f"{worker}.json" for worker in range(num_workers)]
        return [json.loads(path.read_text()) for path in paths]


def _programs(
    num_workers: int, command: Sequence[str], environment: Mapping[str, str]
) -> list[Program]:
    *ports, master = free_ports(num_workers + 1)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    inherited = {**os.environ, **environment}
    programs = []
    for worker in range(num_workers):
        place = Place(
            addresses, worker, worker, num_workers, 0, f"127.0.0.1:{master}", "secret", 0
        )
        programs.append(Program(worker, command, worker_environment(inherited, place)))
    return programs


def _main_of_worker(path, folder, timeout_seconds, num_devices, *arguments):
    """What each worker runs."""
    # From a thread that needs no lock: a collective that hangs cannot hold it up.
    faulthandler.dump_traceback_later(timeout_seconds, exit=True)
    import tfparallel

    tfparallel.devices.split_cpu(num_devices)
    result = runpy.run_path(path)["main"](*arguments)
    text = json.dumps(result)
    pathlib.Path(folder, f"{os.environ['RANK']}.json").write_text(text)


if __name__ == "__main__":
    _main_of_worker(*json.loads(sys.argv[1]))
