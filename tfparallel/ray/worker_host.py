"""The Ray actor of one worker: starts the worker's process, a new one for each attempt.

    driver ──start, look, end──> actor ──> reaper ──> worker's process

TensorFlow cannot be reset within a process, so the actor never imports it. If Ray kills the actor,
the reaper kills the process and all its descendants.
"""

import dataclasses
import os
import pathlib
import queue
import threading
from collections.abc import Mapping, Sequence

import ray

from tfparallel.cluster.environment import thread_budget
from tfparallel.cluster.gpu_binding import BOUND
from tfparallel.cluster.launcher.local_workers import worker_environment
from tfparallel.cluster.launcher.sent_function import CALL, RESULT, module_path, program
from tfparallel.cluster.launcher.supervisor import Job, Program
from tfparallel.cluster.launcher_env import without_counts
from tfparallel.cluster.own_folder import OwnFolder
from tfparallel.cluster.ports import free_ports
from tfparallel.cluster.rendezvous import Rendezvous
from tfparallel.cluster.worker_exit import WorkerExit
from tfparallel.flight.culprit import lost_by
from tfparallel.flight.record import FOLDER

# Output waits here for the driver; then the worker waits, as for a slow terminal.
_MOST_MESSAGES = 1000
_LOOK_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an actor runs.

    Attributes:
        node: The Ray node's id.
        address: The address at which others reach it.
        sees_storage: Whether it has the marker of the storage path, if there is one.
    """

    node: str
    address: str
    sees_storage: bool


@dataclasses.dataclass(frozen=True)
class Part:
    """A worker's part in one attempt.

    Attributes:
        worker: The worker's index in the job.
        addresses: All workers' addresses, by Ray node.
        master: A free "host:port" on the chief's node.
        token: The job's secret for this attempt.
        node: The index of the Ray node in `addresses`.
        local_rank: The worker's index on this node.
        attempt: The number of earlier attempts.
        environment: Variables that the driver sets.
    """

    worker: int
    addresses: Sequence[Sequence[str]]
    master: str
    token: str
    node: int
    local_rank: int
    attempt: int
    environment: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of the worker's process, with the pickled result if it is the chief's."""

    exit: WorkerExit
    result: bytes | None


class WorkerHost:
    """The actor. Ray calls its methods in several threads.

    Args:
        driver_path: The driver's module path.
        folder: The driver's working folder, entered if this node has it.
        num_cpus: The reserved CPUs, which limit TensorFlow's threads.
        num_gpus: The reserved GPUs; without any, the worker sees none.
        marker: A file in the storage path, if there is one.
    """

    def __init__(
        self,
        driver_path: Sequence[str],
        folder: str,
        num_cpus: float,
        num_gpus: float,
        marker: str | None,
    ):
        self._marker = marker
        self._messages: queue.Queue = queue.Queue(_MOST_MESSAGES)
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._grace_seconds: float | None = None  # Once the attempt must end.
        # A folder that Ray has prepared for the job (`working_dir`) is the current one already.
        if "RAY_RUNTIME_ENV_CREATE_WORKING_DIR" not in os.environ and os.path.isdir(folder):
            os.chdir(folder)
        path = list(dict.fromkeys([*module_path(), *driver_path]))
        # Ray's nodes may themselves be tasks of Slurm, of which there are not as many as workers.
        self._inherited = thread_budget(max(1, int(num_cpus))) | without_counts(os.environ)
        self._inherited["PYTHONPATH"] = os.pathsep.join(path)
        if num_gpus >= 1:  # Ray has set CUDA_VISIBLE_DEVICES.
            self._inherited[BOUND] = "1"
        elif not num_gpus:
            self._inherited["CUDA_VISIBLE_DEVICES"] = "-1"

    def place(self) -> Place:
        """Returns where this actor runs."""
        sees_storage = self._marker is None or os.path.exists(self._marker)
        node = ray.get_runtime_context().get_node_id()
        return Place(node, ray.util.get_node_ip_address(), sees_storage)

    def free_ports(self, num_ports: int) -> list[int]:
        """Returns free ports of this host."""
        return free_ports(num_ports)

    def start(self, part: Part, command: Sequence[str] | None, call: bytes | None) -> None:
        """Starts the worker's process: a command, or the call that `pickled_call` returned."""
        self._job = self._grace_seconds = None
        threading.Thread(target=self._run, args=(part, command, call), daemon=True).start()

    def look(self) -> list[tuple[str, bytes] | Ended]:
        """Waits a moment for messages; returns output ("stdout" or "stderr", bytes) and the end."""
        messages = []
        try:
            messages.append(self._messages.get(timeout=_LOOK_SECONDS))
            while True:
                messages.append(self._messages.get_nowait())
        except queue.Empty:
            return messages

    def end(self, grace_seconds: float) -> None:
        """Stops the worker with SIGTERM, on which it may save; SIGKILL after the grace period."""
        with self._lock:
            self._grace_seconds = grace_seconds
            if self._job is not None:
                self._job.end(grace_seconds)

    def _run(self, part, command, call):
        exit_, result = WorkerExit(part.worker, 1, 0.0, stopped=False), None
        try:
            with OwnFolder("tfparallel_ray_") as folder:
                exit_ = self._wait(part, command, call, folder.path)
                path = pathlib.Path(folder.path, RESULT)
                result = path.read_bytes() if path.exists() else None
        except (OSError, RuntimeError) as error:
            exit_ = dataclasses.replace(exit_, tail=(f"The worker could not be started: {error}",))
        finally:
            # The driver must hear of the end in any case.
            self._messages.put(Ended(exit_, result))

    def _wait(self, part, command, call, folder):
        """Starts the process, and waits for its end; the folder is its own."""
        meeting = Rendezvous(part.addresses, part.master, part.token, node=part.node)
        inherited = {**self._inherited, **part.environment}
        environment = worker_environment(inherited, meeting, part.local_rank, part.attempt)
        environment.setdefault(FOLDER, folder)
        if call is not None:
            pathlib.Path(folder, CALL).write_bytes(call)
            command = program(folder)
        job = Job(
            [Program(part.worker, command, environment)],
            on_output=lambda worker, stream, text: self._messages.put((stream, text)),
            lost_by=lambda worker: lost_by(worker, environment[FOLDER], part.attempt, began=0.0),
        )
        with self._lock:
            self._job = job
            if self._grace_seconds is not None:
                job.end(self._grace_seconds)
        return job.wait().exits[0]
