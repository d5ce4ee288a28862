"""Processes that have loaded TensorFlow, and wait to become a worker of a job that starts again.

Python and TensorFlow take some three seconds of a core to load: most of what a restart costs. With
`launch --standby` each worker has a process beside it that has got as far as `import tfparallel`,
holds there, and goes on as the worker of the next attempt.

    launcher ── starts it, TFPARALLEL_STANDBY=FILE ──> import tfparallel
                                                           ... writes FILE.ready, waits for FILE
    launcher ── writes FILE: the worker's environment ────────────────────────────────> goes on
"""

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence

from tfparallel.cluster.guarded import GuardedWorker, Program

__all__ = ["STANDBY", "Standbys"]

# Names the file that a waiting process reads.
STANDBY = "TFPARALLEL_STANDBY"
# The job itself is to start first: loading takes a core.
_DELAY_SECONDS = 10.0
_LOADING_SECONDS = 60.0
_LOOK_SECONDS = 0.02


class Standbys:
    """The waiting processes of a launcher. A context manager: leaving it ends them.

    Args:
        delay_seconds: How long after a job's start they are started.
    """

    def __init__(self, delay_seconds: float = _DELAY_SECONDS):
        self._delay_seconds = delay_seconds
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[str, GuardedWorker]] = {}
        self._timer: threading.Timer | None = None
        self._is_closed = False
        self._folder = tempfile.mkdtemp(prefix="tfparallel_standby_")
        self._count = 0

    def __enter__(self) -> "Standbys":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def prepare(self, programs: Sequence[Program]) -> None:
        """Starts, after a while, a process for each program that has none.

        Args:
            programs: What the workers of this host run now.
        """
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(self._delay_seconds, self._start, [list(programs)])
            self._timer.daemon = True
            self._timer.start()

    def prepare_now(self, programs: Sequence[Program]) -> None:
        """Starts such processes at once, and waits until they have loaded, for a minute at most.

        So a host that joins a running job loads before it stops the others for it.

        Args:
            programs: What the workers of this host will run, in any environment.
        """
        self._start(programs)
        with self._lock:
            waiting = list(self._waiting.values())
        deadline = time.monotonic() + _LOADING_SECONDS
        while time.monotonic() < deadline:
            left = [w for path, w in waiting if not os.path.exists(f"{path}.ready")]
            if not any(worker.listen() and worker.returncode is None for worker in left):
                return
            time.sleep(_LOOK_SECONDS)

    def take(self, position: int, program: Program) -> GuardedWorker | None:
        """Returns the process that waits for this place, told to go on as the program.

        Args:
            position: The worker's place on this host.
            program: What it is to run.

        Returns:
            It; None if none waits, or if it has ended, or runs something else.
        """
        with self._lock:
            path, worker = self._waiting.pop(position, (None, None))
        if worker is None:
            return None
        while worker.listen() and worker.pid is None:
            pass
        runs_this = (worker.program.command, worker.program.cores) == (
            program.command,
            program.cores,
        )
        if worker.gone or worker.returncode is not None or not runs_this:
            _end([worker])
            return None
        worker.program = program
        with open(f"{path}.part", "w") as file:
            json.dump(dict(program.environment), file)
        os.rename(f"{path}.part", path)
        return worker

    def close(self) -> None:
        """Ends all that still wait."""
        with self._lock:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
            waiting = [worker for _, worker in self._waiting.values()]
            self._waiting.clear()
        _end(waiting)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, programs):
        for position, program in enumerate(programs):
            with self._lock:
                if self._is_closed or position in self._waiting:
                    continue
                self._count += 1
                path = os.path.join(self._folder, str(self._count))
                environment = {**program.environment, STANDBY: path}
                waits = dataclasses.replace(program, environment=environment)
                with contextlib.suppress(OSError):  # Then the next attempt starts afresh.
                    self._waiting[position] = (path, GuardedWorker(waits))


def _end(workers):
    for worker in workers:
        worker.order_death()
    for worker in workers:
        with contextlib.suppress(Exception):
            worker.guardian.wait(10)
        worker.close()
        for stream in (worker.guardian.stdout, worker.guardian.stderr):
            stream.close()
