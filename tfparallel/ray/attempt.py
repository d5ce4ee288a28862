"""One attempt of a job: the processes of all workers, from their start to the end of the last."""

import dataclasses
import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayError

from tfparallel.cluster.address import join_address
from tfparallel.cluster.preemption import TRY_AGAIN
from tfparallel.cluster.worker_exit import Outcome, WorkerExit, root_cause_first
from tfparallel.ray.crew import Crew, Member
from tfparallel.ray.worker_host import Ended, Part

# Once a worker is lost, the others cannot save: saving takes all workers.
_LOST_SECONDS = 1.0
# A failure heard this soon after the first may have happened before it.
_SETTLE_SECONDS = 0.25
# An actor kills its worker within 10 s of the grace period; then its node counts as lost.
_SILENT_SECONDS = 12.0
_START_SECONDS = 30.0
_LISTEN_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Work:
    """What every worker runs: a command, or a reference to a pickled call; and variables for it."""

    command: Sequence[str] | None
    call: ray.ObjectRef | None
    environment: Mapping[str, str]


class Attempt:
    """The workers of an attempt, by index: the members in order.

    Args:
        members: The actors, those of a node side by side.
        work: What they run.
        number: The number of earlier attempts.
        show: Called with the worker, "stdout" or "stderr", and output.

    Attributes:
        exits: How workers ended, in the order in which the driver heard of it.
        lost: Why the actors of other workers are lost, by worker.
        result: The chief's pickled result.
    """

    def __init__(
        self,
        members: Sequence[Member],
        work: Work,
        number: int,
        show: Callable[[int, str, bytes], None],
    ):
        self.exits: dict[int, WorkerExit] = {}
        self.lost: dict[int, str] = {}
        self.result: bytes | None = None
        self._members, self._show = members, show
        self._doubtful: set[int] = set()  # Of the lost workers.
        self._is_stopping = False
        self._began = time.monotonic()
        self._looks: dict[ray.ObjectRef, int] = {}
        started = [
            members[part.worker].actor.start.remote(part, work.command, work.call)
            for part in self._parts(number, work.environment)
        ]
        if started:
            ray.wait(started, num_returns=len(started), timeout=_START_SECONDS)
            for worker in range(len(members)):
                self._look(worker)

    @property
    def is_running(self) -> bool:
        """Whether any worker is running."""
        return bool(self._looks)

    @property
    def has_failed(self) -> bool:
        """Whether a worker has failed or is lost."""
        return bool(self.lost) or any(exit_.returncode for exit_ in self.exits.values())

    @property
    def has_saved(self) -> bool:
        """Whether all workers ended so that the same command continues their work."""
        saved = [exit_.returncode == TRY_AGAIN for exit_ in self.exits.values()]
        return len(saved) == len(self._members) and all(saved)

    @property
    def lasted_seconds(self) -> float:
        """The time since the start."""
        return time.monotonic() - self._began

    def listen(self, seconds: float = _LISTEN_SECONDS) -> None:
        """Reads the workers' messages; waits for them if there are none."""
        ray.wait(list(self._looks), timeout=seconds)
        for look in ray.wait(list(self._looks), num_returns=len(self._looks), timeout=0)[0]:
            worker = self._looks.pop(look)
            try:
                messages = ray.get(look)
            except RayError as error:
                self._lose(worker, error)
                continue
            for message in messages:
                if isinstance(message, Ended):
                    stopped = self._is_stopping
                    where = self._members[worker].place.address
                    self.exits[worker] = dataclasses.replace(
                        message.exit, stopped=stopped, name=f"worker {worker} on {where}"
                    )
                    self.result = message.result if worker == 0 else self.result
                else:
                    self._show(worker, *message)
            if worker not in self.exits:
                self._look(worker)

    def stop(self, grace_seconds: float) -> None:
        """Ends the workers that still run; those that do not answer count as lost."""
        if self.has_failed:
            self._listen_until(time.monotonic() + _SETTLE_SECONDS)
        can_save = not self.lost and all(
            exit_.returncode in (0, TRY_AGAIN) for exit_ in self.exits.values()
        )
        seconds = grace_seconds if can_save else min(grace_seconds, _LOST_SECONDS)
        self._is_stopping = True
        for worker in self._looks.values():
            self._members[worker].actor.end.remote(seconds)
        self._listen_until(time.monotonic() + seconds + _SILENT_SECONDS)
        for worker in self._looks.values():
            self._lose(worker, None)
        self._looks.clear()

    def outcome(self) -> Outcome:
        """Returns the exits, and the worker that failed first."""
        heard = {worker: at for at, worker in enumerate(self.exits)}
        failed = [exit_ for exit_ in self.exits.values() if exit_.returncode and not exit_.stopped]
        failed.sort(key=lambda exit_: root_cause_first(exit_.returncode, heard[exit_.worker]))
        exits = tuple(self.exits[worker] for worker in sorted(self.exits))
        return Outcome(exits, failed[0] if failed else None)

    def describe_lost(self) -> str:
        """Returns one line about the workers whose actors are lost."""
        names = [
            f"worker {worker} on {self._members[worker].place.address} was lost ({why})"
            for worker, why in sorted(self.lost.items())
        ]
        return "; ".join(names)

    def drop_lost(self, crew: Crew) -> None:
        """Makes the crew replace the lost actors."""
        for worker in self.lost:
            crew.drop(self._members[worker], node_may_be_dead=worker in self._doubtful)

    def _parts(self, number, environment):
        """Returns each worker's part; none if an actor is lost meanwhile."""
        by_host: dict[str, list[int]] = {}
        for worker, member in enumerate(self._members):
            by_host.setdefault(member.place.address, []).append(worker)
        # One actor finds all ports of a host, to avoid duplicates; one more is the master's.
        ports_of_hosts = {
            host: self._members[workers[0]].actor.free_ports.remote(len(workers) + 1)
            for host, workers in by_host.items()
        }
        addresses, master = {}, ""
        for host, workers in by_host.items():
            try:
                *ports, last = ray.get(ports_of_hosts[host], timeout=_START_SECONDS)
            except RayError as error:
                self._lose(workers[0], error)
                return []
            addresses |= {
                worker: join_address(host, port)
                for worker, port in zip(workers, ports, strict=True)
            }
            master = join_address(host, last) if 0 in workers else master
        by_node = [
            list(workers)
            for _, workers in itertools.groupby(
                range(len(self._members)), lambda worker: self._members[worker].node
            )
        ]
        of_nodes = [[addresses[worker] for worker in workers] for workers in by_node]
        token = secrets.token_hex(16)
        return [
            Part(worker, of_nodes, master, token, node, local_rank, number, environment)
            for node, workers in enumerate(by_node)
            for local_rank, worker in enumerate(workers)
        ]

    def _look(self, worker):
        self._looks[self._members[worker].actor.look.remote()] = worker

    def _listen_until(self, deadline):
        while self._looks and (remaining := deadline - time.monotonic()) > 0:
            self.listen(min(remaining, _LISTEN_SECONDS))

    def _lose(self, worker, error):
        if error is None:
            self.lost[worker] = "its Ray actor does not answer"
        else:
            self.lost[worker] = _short(error)
        if error is None or isinstance(error, ActorUnavailableError | GetTimeoutError):
            self._doubtful.add(worker)


def _short(error: RayError) -> str:
    """Returns why an actor is lost, in one sentence."""
    if isinstance(error, ActorUnavailableError | GetTimeoutError):
        return "its Ray actor cannot be reached: it or its node has died, or the network failed"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if "because" in line]
    return (causes or lines or [type(error).__name__])[0].rstrip(".")
