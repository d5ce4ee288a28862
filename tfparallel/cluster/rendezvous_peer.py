"""What every worker does at a rendezvous, the chief or not.

It listens at its own address, says who it is when one of the job asks, hangs
up on everybody else, and looks for the other workers at theirs. What the chief
and the others say to each other stands in `worker_rendezvous`, and how, in `wire`.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Coroutine
from typing import Any

from tfparallel.cluster import differences, listener, messages, wire
from tfparallel.cluster.address import split_address
from tfparallel.cluster.wire import Secret

__all__ = ["GREETING_SECONDS", "RETRY_SECONDS", "STRANGER", "Participant", "RendezvousPeer", "why"]

# A caller has this long to say who it is, and a listener to answer.
GREETING_SECONDS = 5.0
RETRY_SECONDS = 0.2
_SURVEY_SECONDS = 0.5
# Callers that have not said who they are; beyond it the oldest is disconnected.
_MAX_STRANGERS = 256
_MAX_INTRUDERS = 3
# What all jobs' workers call themselves before the token tells whose they are; with the version.
_JOB = "tfparallel-workers-4"
_NOBODY = "nothing listens there"
STRANGER = "what listens there is no tfparallel worker"


@dataclasses.dataclass(frozen=True)
class Participant:
    """A worker as it describes itself, and how to reach it: None for the chief itself.

    Its facts are what it goes by; `seconds` is how long it is ready to wait.
    """

    index: int
    workers: list[str]
    facts: dict[str, Any]
    host: str
    pid: int
    seconds: float
    connection: messages.Connection | None = None

    @classmethod
    def from_hello(
        cls, hello: dict[str, Any], connection: messages.Connection
    ) -> "Participant":
        """Reads a hello, which may hold anything; `ValueError` unless it is whole."""
        kinds = dict(index=int, workers=list, facts=dict, host=str, pid=int, seconds=float)
        fields = {name: hello.get(name) for name in kinds}
        whole = all(type(fields[name]) is kind for name, kind in kinds.items())
        # The name of the host is printed.
        if not (whole and fields["index"] >= 0 and fields["host"].isprintable()):
            raise ValueError("a hello that is not whole")
        return cls(**fields, connection=connection)

    @property
    def whereabouts(self) -> str:
        """Where to look for it: `"process 4711 on host a"`."""
        return f"process {self.pid} on host {self.host[:64]}"


class RendezvousPeer:
    """One worker's side of a rendezvous; its subclass does its part in `take_part`."""

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
        # What looking for a worker at its address last gave: "" if it is there.
        self.found: dict[int, str] = {}
        # Workers of other jobs that came to this one.
        self.intruders: list[str] = []
        self._ports = {split_address(address)[1] for address in workers}
        self._tasks: set[asyncio.Task] = set()
        # In the order in which they came.
        self._strangers: dict[asyncio.Task, None] = {}

    async def hold(self) -> tuple[dict[str, Any], ...]:
        """Listens, takes part, and leaves nothing behind; returns the facts of all workers."""
        own_port = await listener.listen(
            self.workers, self.index, timeout_seconds=self.remaining()
        )
        loop = asyncio.get_running_loop()
        with own_port:
            try:
                loop.add_reader(own_port, self._accept, own_port)
                return tuple(await self.take_part())
            finally:
                loop.remove_reader(own_port)
                tasks = list(self._tasks)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task:
        """Starts a task that ends with the meeting at the latest."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def remaining(self) -> float:
        """Seconds until the time limit."""
        return max(0.0, self.deadline - time.monotonic())

    def name(self, index: int) -> str:
        """A worker with its address, for an error."""
        return differences.name_worker(self.workers, index)

    async def introduce(self, connection: messages.Connection) -> None:
        """Exchanges nonces with one that listens; `ValueError` for a stranger."""
        own = wire.greeting(_JOB)
        await connection.send(own)
        answer = await connection.receive()
        if not wire.is_greeting(answer) or answer["job"] != _JOB:
            raise ValueError("no tfparallel worker")
        nonces = own["nonce"], answer["nonce"]
        connection.session = wire.Session(self.secret, _JOB, nonces, is_caller=True)

    def _accept(self, own_port):
        """Takes a caller in; `loop.sock_accept` loses the one that comes as it is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            caller, _ = own_port.accept()
        except OSError:
            # The caller has gone; or this process is out of descriptors, and must not spin.
            loop.remove_reader(own_port)
            self.spawn(self._listen_on(own_port))
            return
        if len(self._strangers) >= _MAX_STRANGERS + len(self.workers):
            next(iter(self._strangers)).cancel()
        connection = messages.Connection(caller)
        task = self.spawn(self._pick_up(connection))
        self._strangers[task] = None
        task.add_done_callback(lambda done: self._strangers.pop(done, None))
        # Also of a task that is cancelled before it begins.
        task.add_done_callback(lambda done: connection.close())

    async def _listen_on(self, own_port):
        await asyncio.sleep(RETRY_SECONDS)
        asyncio.get_running_loop().add_reader(own_port, self._accept, own_port)

    async def _pick_up(self, connection):
        """Answers a caller of this job, and hangs up on any other."""
        with contextlib.suppress(OSError, ValueError):
            async with asyncio.timeout(GREETING_SECONDS):
                greeting = await connection.receive()
                if not wire.is_greeting(greeting) or greeting["job"] != _JOB:
                    return
                own = wire.greeting(_JOB)
                await connection.send(own)
                line = await connection.receive_line()
            nonces = greeting["nonce"], own["nonce"]
            session = wire.Session(self.secret, _JOB, nonces, is_caller=False)
            call = session.opened(line)
            if call is None:
                said = wire.unproved(line)
                if said.get("call") == "hello":
                    self._note(Participant.from_hello(said, connection))
                await connection.send({"refused": _JOB})
                return
            connection.session = session
            if call.get("call") == "probe":
                await connection.send({"index": self.index})
            elif call.get("call") == "hello":
                self._strangers.pop(asyncio.current_task(), None)
                await self.greet(Participant.from_hello(call, connection))

    async def greet(self, participant: Participant) -> None:
        """Answers a hello; to any but the chief it comes from another list of workers."""
        self._note(participant)
        await participant.connection.send({"not_the_chief": self.workers})

    def _note(self, intruder):
        if len(self.intruders) < _MAX_INTRUDERS:
            self.intruders.append(f"{intruder.whereabouts} came as worker {intruder.index}")

    async def probe(self, index: int, timeout_seconds: float) -> str:
        """Asks who is at a worker's address; "" if that worker, else what is found there."""
        try:
            async with asyncio.timeout(timeout_seconds):
                with await messages.connect(self.workers[index], self._ports) as connection:
                    await self.introduce(connection)
                    await connection.send({"call": "probe"})
                    answer = await connection.receive()
        except wire.RefusedError as error:
            is_worker = error.job == _JOB
            return "its port is used by another tfparallel job" if is_worker else STRANGER
        except (OSError, ValueError) as error:
            return why(error)
        if answer.get("index") != index:
            return f"the process there says that it is worker {answer.get('index')}"
        return ""

    async def survey(self, absent: Callable[[], list[int]]) -> None:
        """Keeps looking for the workers that `absent()` lists, so that an error can say why."""

        async def look_for(index):
            # What stands if the time limit comes before an answer.
            self.found.setdefault(index, "no answer")
            self.found[index] = await self.probe(index, GREETING_SECONDS)

        while True:
            await asyncio.sleep(_SURVEY_SECONDS)
            await asyncio.gather(*(look_for(index) for index in absent()))

    def error(self, what: str, how_to_fix: str) -> RuntimeError:
        """The one form of all that goes wrong here."""
        return RuntimeError(
            f"The job cannot start: {what}. All {len(self.workers)} workers must start within the "
            "time limit, agree, reach each other, and stay. "
            f"Received: workers={self.workers}. {how_to_fix}"
        )

    def missing(self, reasons: dict[int, str]) -> RuntimeError:
        """The error for workers that did not come: for each index, what is at its address."""
        seconds = time.monotonic() - self.started
        named = "; ".join(f"{self.name(i)} did not come ({reasons[i]})" for i in sorted(reasons))
        uninvited = "".join(f"; {intruder} of another job" for intruder in self.intruders)
        return self.error(
            f"after {seconds:.3g} s {named}{uninvited}",
            "Look at the output of what is missing, or allow more time (--start_timeout).",
        )


def why(error: Exception) -> str:
    """What a failed connection tells about the worker that should be at the other end."""
    if isinstance(error, ConnectionRefusedError):
        return _NOBODY
    return STRANGER if isinstance(error, ValueError) else messages.reason(error)
