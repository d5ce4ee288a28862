"""Warm spares: processes that have loaded TensorFlow, and wait to replace the workers of a restart.

Loading Python and TensorFlow takes some three seconds of a core, most of the cost of a restart.
With `launch --standby`, each worker has a spare process that stops at `import tfparallel`, and
continues as the worker of the next attempt.

    launcher ── starts it, TFPARALLEL_STANDBY=FILE ──> import tfparallel
                                        writes its pid into FILE.ready, and waits for FILE
    launcher ── writes FILE: the changes to its environment ─────────────────────> continues

Only a process that is ready, and is the worker's own process rather than a child of it, becomes a
worker. One that is not ready in time runs some other program, and is ended.
"""

import ast
import contextlib
import dataclasses
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Sequence

from tfparallel.cluster.launcher.worker_process import Program, WorkerProcess
from tfparallel.cluster.own_folder import OwnFolder

# The path of the file that a waiting process reads.
STANDBY = "TFPARALLEL_STANDBY"
# The job itself starts first: loading takes a core.
_DELAY_SECONDS = 10.0
_LOADING_SECONDS = 60.0
_LOOK_SECONDS = 0.02
_END_SECONDS = 10.0


def imports_tfparallel(command: Sequence[str]) -> bool:
    """Whether a command imports tfparallel: `tfparallel …`, or Python with such a script."""
    name, *arguments = command
    if os.path.basename(name) == "tfparallel":
        return True
    if not os.path.basename(name).startswith("python"):
        return False
    if arguments[:2] == ["-m", "tfparallel"]:
        return True
    script = next((each for each in arguments if each.endswith(".py")), None)
    try:
        with open(script or "", "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return False
    modules = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.append(node.module)
    return any(module.partition(".")[0] == "tfparallel" for module in modules)


class WarmSpares:
    """The warm spares of a launcher. A context manager: leaving it ends them.

    Args:
        delay_seconds: The time between the start of the job and that of the spares.
        loading_seconds: How long a spare may take to be ready.
        tell: Called with a sentence when some spares became workers.
    """

    def __init__(
        self,
        delay_seconds: float = _DELAY_SECONDS,
        loading_seconds: float = _LOADING_SECONDS,
        tell: Callable[[str], None] = lambda text: None,
    ):
        self._delay_seconds, self._loading_seconds = delay_seconds, loading_seconds
        self._tell = tell
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._timer: threading.Timer | None = None
        self._prepares = True
        self._num_taken = 0
        self._temporary = OwnFolder("tfparallel_standby_")
        self._numbers = itertools.count()

    def __enter__(self) -> "WarmSpares":
        return self

    def __exit__(self, *_) -> None:
        with self._lock:
            self._prepares = False
            if self._timer is not None:
                self._timer.cancel()
            waiting = list(self._waiting.values())
            self._waiting.clear()
        _end(waiting)
        self._temporary.__exit__()

    def prepare(self, programs: Sequence[Program]) -> None:
        """Starts a spare for each program that has none, after `delay_seconds`."""
        with self._lock:
            num_taken, self._num_taken = self._num_taken, 0
            if self._timer is not None:
                self._timer.cancel()
            if self._prepares:
                self._timer = threading.Timer(self._delay_seconds, self.prepare_now, [programs])
                self._timer.daemon = True
                self._timer.start()
        if num_taken:
            self._tell(
                f"{num_taken} of {len(programs)} workers on this host start in a standby process"
            )

    def prepare_now(self, programs: Sequence[Program]) -> None:
        """Starts the spares at once, and waits until they are ready or out of time."""
        started = {}
        for position, program in enumerate(programs):
            with self._lock:
                if position in self._waiting:
                    started[position] = self._waiting[position]
                    continue
                if not self._prepares:
                    break
                path = os.path.join(self._temporary.path, str(next(self._numbers)))
                environment = {**program.environment, STANDBY: path}
                waits = dataclasses.replace(program, environment=environment)
                with contextlib.suppress(OSError):  # The next attempt then starts a new process.
                    started[position] = _Waiting(path, WorkerProcess(waits))
                    self._waiting[position] = started[position]
        deadline = time.monotonic() + self._loading_seconds
        while (loading := self._loading(started)) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        with self._lock:
            overdue = [
                self._waiting.pop(position)
                for position, each in loading.items()
                if self._waiting.get(position) is each
            ]
        _end(overdue)

    def stop_preparing(self) -> None:
        """Starts no more spares: the job will not restart."""
        with self._lock:
            self._prepares = False

    def take(self, position: int, program: Program) -> WorkerProcess | None:
        """Turns the spare at this position on the host into the program.

        Returns:
            The worker; None if there is no spare, or if it has ended, runs some other program, or
            is not ready.
        """
        with self._lock:
            waiting = self._waiting.pop(position, None)
        if waiting is None:
            return None
        if waiting.is_ready() and waiting.runs(program):
            with contextlib.suppress(OSError):  # On a full disk a new process is started.
                worker = waiting.become(program)
                self._num_taken += 1
                return worker
        _end([waiting])
        return None

    def _loading(self, started):
        """The spares that are still wanted and not ready yet."""
        with self._lock:
            return {
                position: each
                for position, each in started.items()
                if self._waiting.get(position) is each and not each.is_ready()
            }


@dataclasses.dataclass
class _Waiting:
    """A spare that is loading, or waiting for the file at `path`."""

    path: str
    worker: WorkerProcess

    def is_ready(self) -> bool:
        """Whether the worker's own process waits for the file."""
        try:
            with open(f"{self.path}.ready") as file:
                number = file.read()
        except OSError:
            return False
        if not self.worker.gone:
            self.worker.listen()
        return self.worker.returncode is None and number == str(self.worker.pid)

    def runs(self, program: Program) -> bool:
        """Whether it was started with this program's command and cores."""
        current = self.worker.program
        return (current.command, current.cores) == (program.command, program.cores)

    def become(self, program: Program) -> WorkerProcess:
        """Makes it continue as this program."""
        # Variables that the program itself has set before it began to wait are kept.
        before, after = dict(self.worker.program.environment), dict(program.environment)
        before.pop(STANDBY)
        changed = {name: value for name, value in after.items() if before.get(name) != value}
        changed |= dict.fromkeys(before.keys() - after.keys())
        with open(f"{self.path}.part", "w") as file:
            json.dump(changed, file)
        os.rename(f"{self.path}.part", self.path)
        self.worker.program = program
        return self.worker


def _end(waiting):
    for each in waiting:
        each.worker.order_death()
    for each in waiting:
        worker = each.worker
        with contextlib.suppress(Exception):
            worker.reaper.wait(_END_SECONDS)
            while not worker.gone and worker.listen():  # Its return code, then the reaper's end.
                time.sleep(_LOOK_SECONDS)
        worker.close()
        for stream in (worker.reaper.stdout, worker.reaper.stderr):
            stream.close()
