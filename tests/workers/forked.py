"""Runs a function on the workers of large jobs, which one process forks.

    def main():                              # in program.py
        strategy = tfparallel.MultiWorkerMirroredStrategy()
        return tfparallel.worker_index()

    run_forked(HERE / "program.py", [11, 23])
    # [[0, 1, …, 10], [0, 1, …, 22]]

That process imports TensorFlow, once, and starts nothing of it; a worker costs a fork, and not five
to fifteen seconds. In a job of one worker no worker meets another: that is one device.
"""

import faulthandler
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any

from tfparallel import startup
from tfparallel.cluster.environment import Place, worker_environment
from tfparallel.cluster.ports import free_ports


def run_forked(
    program: pathlib.Path,
    numbers: Sequence[int],
    arguments: Sequence[Any] = (),
    timeout_seconds: float = 300.0,
) -> list[list[Any]]:
    """Runs `main(*arguments)` of a program on each worker of several jobs, one after the other.

    Args:
        program: The path of a Python file that defines `main`.
        numbers: How many workers each job has.
        arguments: What JSON can hold.
        timeout_seconds: How long all of it may take.

    Returns:
        For each job what `main` returned on each worker, as JSON holds it.

    Raises:
        RuntimeError: If a worker failed, or not all was done in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = json.dumps([str(program), folder, list(numbers), timeout_seconds, *arguments])
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.forked", call],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise RuntimeError(f"not done in {timeout_seconds} s:\n{output}") from None
        if process.returncode:
            raise RuntimeError(output)
        return [
            [
                json.loads(pathlib.Path(folder, f"{number}_{worker}.json").read_text())
                for worker in range(number)
            ]
            for number in numbers
        ]


def _fork_jobs(path, folder, numbers, timeout_seconds, *arguments):
    startup.prepare()
    main = runpy.run_path(path)["main"]
    for number in numbers:
        *ports, master = free_ports(number + 1)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        children = set()
        for worker in range(number):
            place = Place(
                addresses, worker, worker, number, 0, f"127.0.0.1:{master}", "secret", 0
            )
            if child := os.fork():
                children.add(child)
                continue
            os.environ.update(worker_environment(os.environ, place))
            _run_worker(main, arguments, pathlib.Path(folder, f"{number}_{worker}.json"))
        _wait_for(children)


def _run_worker(main, arguments, path):
    code = 1
    try:
        path.write_text(json.dumps(main(*arguments)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # Nothing of the process that forked this one is to run here.


def _wait_for(children):
    """Ends the others as soon as one has failed: they would wait for it."""
    while children:
        child, status = os.wait()
        children.discard(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a worker ended with status {status}")


if __name__ == "__main__":
    faulthandler.enable()
    _fork_jobs(*json.loads(sys.argv[1]))
