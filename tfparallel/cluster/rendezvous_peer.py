"""The part of the workers' rendezvous that all workers share, including the chief.

Each worker listens at its own address, identifies itself to callers of the same job, hangs up on
all others, and probes the other workers' addresses. `worker_rendezvous` has the protocol between
the chief and the others, `wire` its encoding.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine
from typing import Any

from tfparallel.cluster import acceptor, differences, listener
from tfparallel.cluster.address import split_address
from tfparallel.cluster.connection import Connection, connect, reason
from tfparallel.cluster.wire import RefusedError, Secret

_SURVEY_SECONDS = 0.5
_MAX_INTRUDERS = 3
# The name, with its version, used by the workers of all jobs before the token identifies the job.
_JOB = "tfparallel-workers-4"
_NOBODY = "nothing listens there"
STRANGER = "the listener there is not a tfparallel worker"


@dataclasses.dataclass(frozen=True)
class Participant:
    """A worker's self-description and the connection to it: None for the chief itself.

    `facts` are the values to compare; `seconds` is how long it will wait.
    """

    index: int
    workers: list[str]
    facts: dict[str, Any]
    host: str
    pid: int
    seconds: float
    connection: Connection | None = None

    @classmethod
    def from_hello(cls, hello: dict[str, Any], connection: Connection) -> "Participant":
        """Parses a hello, which is untrusted; `ValueError` if it is malformed."""
        kinds = dict(index=int, workers=list, facts=dict, host=str, pid=int, seconds=float)
        fields = {name: hello.get(name) for name in kinds}
        is_complete = all(type(fields[name]) is kind for name, kind in kinds.items())
        # The host name is printed later.
        if not (is_complete and fields["index"] >= 0 and fields["host"].isprintable()):
            raise ValueError("an incomplete hello")
        return cls(**fields, connection=connection)

    @property
    def whereabouts(self) -> str:
        """Its process and host: `"process 4711 on host a"`."""
        return f"process {self.pid} on host {self.host[:64]}"


class RendezvousPeer:
    """One worker's side of a rendezvous; subclasses implement `take_part`."""

    def __init__(
        self,
        workers: list[str],
        index: int,
        facts: dict[str, Any],
        timeout_seconds: float,
        token: str,
        may_differ: frozenset[str],
    ):
        self.workers = workers
        self.index = index
        self.facts = facts
        self.secret = Secret(token)
        self.may_differ = may_differ
        self.started = time.monotonic()
        self.deadline = self.started + timeout_seconds
        # The last probe's result by worker: "" if the worker is there.
        self.probe_results: dict[int, str] = {}
        # Workers of other jobs that connected to this one.
        self.intruders: list[str] = []
        self._ports = {split_address(address)[1] for address in workers}

    async def hold(self) -> tuple[dict[str, Any], ...]:
        """Listens, takes part, and cleans up; returns the facts of all workers."""
        listening = await listener.listen(
            self.workers, self.index, timeout_seconds=self.remaining()
        )
        async with acceptor.Acceptor(
            listening, self.secret, _JOB, self._admit, self._refused, len(self.workers)
        ) as self._acceptor:
            return tuple(await self.take_part())

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task:
        """Starts a task that is cancelled when the rendezvous ends."""
        return self._acceptor.spawn(coroutine)

    def remaining(self) -> float:
        """Seconds until the time limit."""
        return max(0.0, self.deadline - time.monotonic())

    def name(self, index: int) -> str:
        """Returns a worker's name with its address, for an error."""
        return differences.name_worker(self.workers, index)

    async def introduce(self, connection: Connection) -> None:
        """Exchanges nonces with a listener; `RefusedError` if it is not of this job."""
        await connection.introduce(self.secret, _JOB)

    async def _admit(self, connection, message):
        """Answers a caller of this job."""
        if message.get("call") == "probe":
            await connection.send({"index": self.index})
        elif message.get("call") == "hello":
            await self.greet(Participant.from_hello(message, connection))

    async def greet(self, participant: Participant) -> None:
        """Answers a hello; only the chief expects one, so the caller has another worker list."""
        self._note(participant)
        await participant.connection.send({"not_the_chief": self.workers})

    def _refused(self, connection, _, claim):
        if claim.get("call") == "hello":
            self._note(Participant.from_hello(claim, connection))

    def _note(self, intruder):
        if len(self.intruders) < _MAX_INTRUDERS:
            self.intruders.append(f"{intruder.whereabouts} connected as worker {intruder.index}")

    async def probe(self, index: int, timeout_seconds: float) -> str:
        """Probes a worker's address; returns "" if that worker answers, else the problem."""
        try:
            async with asyncio.timeout(timeout_seconds):
                with await connect(self.workers[index], self._ports) as connection:
                    await self.introduce(connection)
                    await connection.send({"call": "probe"})
                    answer = await connection.receive()
        except RefusedError as error:
            is_worker = error.job == _JOB
            return "its port is used by another tfparallel job" if is_worker else STRANGER
        except (OSError, ValueError) as error:
            return why(error)
        if answer.get("index") != index:
            return f"the process there claims to be worker {answer.get('index')}"
        return ""

    async def survey(self, absent: Callable[[], list[int]]) -> None:
        """Keeps probing the workers in `absent()`, to explain their absence in an error."""

        async def look_for(index):
            # The result if the time limit comes before an answer.
            self.probe_results.setdefault(index, "no answer")
            self.probe_results[index] = await self.probe(index, acceptor.GREETING_SECONDS)

        while True:
            await asyncio.sleep(_SURVEY_SECONDS)
            await asyncio.gather(*(look_for(index) for index in absent()))

    def error(self, what: str, how_to_fix: str) -> RuntimeError:
        """Returns an error of the rendezvous."""
        return RuntimeError(
            f"The job cannot start: {what}. All {len(self.workers)} workers must start within the "
            "time limit, agree, reach each other, and keep running. Received: "
            f"workers={self.workers}. {how_to_fix}"
        )

    def missing(self, reasons: dict[int, str]) -> RuntimeError:
        """Returns the error for missing workers; `reasons` has each one's last probe result."""
        seconds = time.monotonic() - self.started
        named = "; ".join(f"{self.name(i)} had not joined ({reasons[i]})" for i in sorted(reasons))
        uninvited = "".join(f"; {intruder} of another job" for intruder in self.intruders)
        return self.error(
            f"after {seconds:.3g} s, {named}{uninvited}",
            "Look at the output of the missing workers, or allow more time (--start_timeout).",
        )


def why(error: Exception) -> str:
    """Returns why the worker at the other end of a failed connection is missing."""
    if isinstance(error, ConnectionRefusedError):
        return _NOBODY
    return STRANGER if isinstance(error, ValueError) else reason(error)
