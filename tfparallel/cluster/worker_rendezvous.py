"""The workers' rendezvous before TensorFlow starts: checks that all are present and agree.

TensorFlow's multi-worker constructor waits without limit for a missing worker, and reports a taken
port only as "Could not start gRPC server". `meet` runs first: it listens on the port that
TensorFlow will use, and ends within its time limit, either with the facts of all workers or with
the same error on every worker.

```
worker k                                      worker 0, the chief
   | -- hello: k, workers, facts -------------> |   kept open: a break means a death
   | <- welcome ------------------------------- |
   |            ... until all have joined, and all agree ...
   | <- probe --------------------------------- |
   | <- who is there? --- (a new connection) -- |   back to k's own address
   | -- who is there? --> worker k + 1          |   around the ring that TensorFlow builds
   | -- reached ------------------------------> |
   | <- the facts of all, or the error -------- |
```

Callers that do not speak this protocol, or cannot prove that they know the job's token (wire.py),
are disconnected. Messages are not encrypted: they expose the facts to the network, but not the
token. Nothing remains when `meet` returns.
"""

import asyncio
import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tfparallel.cluster import differences, rendezvous_peer, wire
from tfparallel.cluster.acceptor import GREETING_SECONDS, RETRY_SECONDS
from tfparallel.cluster.address import address_problems
from tfparallel.cluster.config_error import refusal, shown
from tfparallel.cluster.connection import connect, reason, run
from tfparallel.cluster.wire import RefusedError

# Once two disagree, the others have this long to join and be compared too.
_GRACE_SECONDS = 10.0
# For the connections back and around the ring, once all have joined.
_PROBE_SECONDS = 5.0
# For sending the verdict, beyond the time limit of the rendezvous.
_VERDICT_SECONDS = 1.0
_SAME_CLUSTER = "Start all with the same TF_CONFIG cluster, code, versions and flags."


def meet(
    workers: Sequence[str],
    worker_index: int,
    facts: Mapping[str, Any],
    *,
    timeout_seconds: float = 120.0,
    token: str = "",
    may_differ: Collection[str] = (),
) -> tuple[dict[str, Any], ...]:
    """Waits until all workers have joined, can reach each other, and agree.

    Every worker calls it, in any order, with the same `workers` and its own index. Its port is free
    as soon as it returns. All workers raise the same error, except one that never reaches the
    chief.

    Args:
        workers: The workers' addresses by index, `"host:port"` or `"[::1]:port"`, with the ports
            that TensorFlow will use.
        worker_index: This process's index in `workers`.
        facts: JSON values that all must agree on: versions, seed, task file, batch size. `workers`
            itself is always compared.
        timeout_seconds: The time limit. The workers' earliest limit applies to all.
        token: The job's secret, which keeps strangers and other jobs out. Without one, only the
            list of workers identifies a job.
        may_differ: Keys of `facts` that are exchanged but not compared.

    Returns:
        The facts of every worker, by index.

    Raises:
        ValueError: If an argument is invalid; all problems in one message.
        RuntimeError: If the port is taken; a worker is missing, ends, or cannot be reached; two
            workers have the same index; or they disagree.
    """
    workers = list(workers)
    facts = _checked_facts(workers, worker_index, facts, timeout_seconds)
    role = _Chief if worker_index == 0 else _Worker
    part = role(workers, worker_index, facts, timeout_seconds, token, frozenset(may_differ))
    return run(part.hold())


def _checked_facts(workers, worker_index, facts, timeout_seconds):
    """Returns the facts after a JSON round trip; raises one error for all problems."""
    problems = [] if workers else ["the list of workers is empty"]
    problems += address_problems((f"workers[{i}]", address) for i, address in enumerate(workers))
    if isinstance(worker_index, bool) or not isinstance(worker_index, int):
        problems.append("worker_index is not an integer")
    elif not 0 <= worker_index < len(workers):
        problems.append(f"worker_index is not from 0 to {len(workers) - 1}")
    if not (math.isfinite(timeout_seconds) and timeout_seconds > 0):
        problems.append("timeout_seconds is not positive")
    try:
        line = wire.encoded({"workers": workers, "facts": dict(facts)})
        facts = json.loads(line)["facts"]
        # The hello has a few more fields.
        if len(line) > wire.MAX_BYTES - 1024:
            problems.append(f"facts take {len(line)} bytes; a message has at most {wire.MAX_BYTES}")
    except (TypeError, ValueError, RecursionError) as error:
        problems.append(f"facts are not JSON-serializable ({error})")
    if problems:
        received = dict(workers=workers, worker_index=worker_index, timeout_seconds=timeout_seconds)
        fix = (
            "Each worker needs a unique address, and its facts must be plain values; correct the "
            "cluster and the task index in TF_CONFIG."
        )
        raise refusal("Cannot hold a rendezvous", problems, shown(received), fix)
    return facts


class _Worker(rendezvous_peer.RendezvousPeer):
    """A worker other than the chief: it connects to the chief and follows its orders."""

    async def take_part(self):
        # If the chief is missing, each worker must find out which others are, too.
        survey = self.spawn(self.survey(self._not_seen))
        trouble = "no answer"
        while self.remaining() > 0:
            try:
                async with asyncio.timeout(min(GREETING_SECONDS, self.remaining())):
                    connection = await connect(self.workers[0], self._ports)
                with connection:
                    # Never ask a slow chief twice: it would take the first connection for dead.
                    async with asyncio.timeout(self.remaining()):
                        await self.introduce(connection)
                        await connection.send(self._hello())
                        answer = await connection.receive()
                    if "not_the_chief" in answer:
                        raise self._another_list(answer["not_the_chief"])
                    survey.cancel()
                    return await self._follow(connection)
            except RefusedError as error:
                if error.job is not None:
                    raise self._another_job() from None
                trouble = rendezvous_peer.STRANGER
            except (OSError, ValueError) as error:
                # If cut short by the time limit, keep the earlier problem.
                trouble = rendezvous_peer.why(error) if self.remaining() > 0 else trouble
            await asyncio.sleep(min(RETRY_SECONDS, self.remaining()))
        raise self.missing({0: trouble} | {i: why for i, why in self.probe_results.items() if why})

    def _not_seen(self):
        """Workers never seen. One that was seen once counts as present: it may time out first."""
        others = set(range(1, len(self.workers))) - {self.index}
        return [index for index in sorted(others) if self.probe_results.get(index) != ""]

    def _hello(self):
        return {
            "call": "hello",
            "index": self.index,
            "workers": self.workers,
            "facts": self.facts,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "seconds": self.remaining(),
        }

    async def _follow(self, connection):
        """Follows the chief's orders until the verdict."""
        try:
            async with asyncio.timeout(self.remaining() + 2 * _VERDICT_SECONDS):
                while True:
                    order = await connection.receive(wire.MAX_BYTES * len(self.workers))
                    if "probe" in order:
                        await connection.send({"reached": await self._reach_next(order["probe"])})
                    elif "error" in order:
                        raise RuntimeError(str(order["error"]))
                    elif len(facts := list(order.get("facts", ()))) == len(self.workers):
                        return facts
        except TimeoutError:
            how = "stopped responding"
        except (OSError, ValueError, TypeError) as error:
            how = f"ended during the rendezvous ({reason(error)})"
        raise self.error(f"{self.name(0)} {how}", "Look at the output of worker 0.")

    async def _reach_next(self, seconds):
        following = (self.index + 1) % len(self.workers)
        # Worker 0 is reachable: it sent this order.
        return await self.probe(following, min(float(seconds), _PROBE_SECONDS)) if following else ""

    def _another_job(self):
        return self.error(
            f"the address of {self.name(0)} is used by another tfparallel job, with a different "
            "token or version",
            "Choose different ports for this job, or give all its workers the same token.",
        )

    def _another_list(self, workers):
        lists = {0: {"workers": workers}, self.index: {"workers": self.workers}}
        return self.error(
            f"the process at the address of {self.name(0)} has a different list of workers, in "
            f"which it is not the first; {'; '.join(differences.differences(lists))}",
            _SAME_CLUSTER,
        )


class _Chief(rendezvous_peer.RendezvousPeer):
    """Worker 0: accepts the others' connections, and sends them the verdict."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        myself = rendezvous_peer.Participant(
            self.index, self.workers, self.facts, socket.gethostname(), os.getpid(), math.inf
        )
        self._participants = {0: myself}
        # (participant, message) pairs; the message None means that the participant has left.
        self._inbox = asyncio.Queue()
        self._connected = {}

    async def take_part(self):
        try:
            await self._gather()
            await self._try_all_connections()
        except RuntimeError as error:
            await self._tell_all({"error": str(error)})
            raise
        facts = [self._participants[index].facts for index in range(len(self.workers))]
        await self._tell_all({"facts": facts})
        return facts

    async def greet(self, participant):
        """Reads a participant's messages until it leaves."""
        await participant.connection.send({"welcome": participant.index})
        staying = asyncio.current_task()
        self._connected[staying] = participant
        staying.add_done_callback(self._connected.pop)
        self._inbox.put_nowait((participant, {"hello": True}))
        with contextlib.suppress(OSError, ValueError):
            while True:
                self._inbox.put_nowait((participant, await participant.connection.receive()))
        self._inbox.put_nowait((participant, None))

    async def _gather(self):
        """Waits until all have joined; raises if one is missing or two disagree."""
        self.spawn(self.survey(self._absent))
        closing = math.inf
        while self._absent():
            try:
                async with asyncio.timeout(min(self.deadline, closing) - time.monotonic()):
                    participant, _ = await self._next_message()
            except TimeoutError:
                break
            # The first worker to time out ends the job for all.
            self.deadline = min(self.deadline, time.monotonic() + participant.seconds)
            if closing == math.inf and self._differences():
                closing = time.monotonic() + _GRACE_SECONDS
        self._check_agreement()
        if absent := self._absent():
            raise self.missing({index: self._reason(index) for index in absent})

    async def _next_message(self):
        """Returns a participant and its next message, first its hello; raises if it has left."""
        participant, message = await self._inbox.get()
        if message is None:
            raise self.error(
                f"{self.name(participant.index)}, {participant.whereabouts}, ended during the "
                "rendezvous",
                f"Look at the output of worker {participant.index}.",
            )
        present = self._participants.setdefault(participant.index, participant)
        if present is not participant:
            raise self.error(
                f"two processes claim to be {self.name(participant.index)}: {present.whereabouts} "
                f"and {participant.whereabouts}",
                "Give each worker a unique index in TF_CONFIG.",
            )
        return participant, message

    def _check_agreement(self):
        if lines := self._differences():
            absent = self._absent()
            missing = f"; {differences.name_workers(absent)} had not joined yet" if absent else ""
            raise self.error(f"the workers disagree: {'; '.join(lines)}{missing}", _SAME_CLUSTER)

    async def _try_all_connections(self):
        """Connects back to every worker, and makes each connect to the next in the ring."""
        others = range(1, len(self.workers))
        seconds = min(_PROBE_SECONDS, max(_VERDICT_SECONDS, self.remaining()))
        for index in others:
            self.spawn(self._order(self._participants[index], {"probe": seconds}))
        calls = self.spawn(self._call_back(others, seconds))
        problems = []
        silent = set(others)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds + _VERDICT_SECONDS / 2):
                while silent:
                    participant, message = await self._next_message()
                    # A late participant has a longer list of workers.
                    self._check_agreement()
                    silent.discard(participant.index)
                    if trouble := message.get("reached"):
                        problems.append((participant.index, participant.index + 1, trouble))
        problems.extend((0, index, trouble) for index, trouble in await calls if trouble)
        what = [
            f"{self.name(source)} cannot reach {self.name(target)} ({trouble})"
            for source, target, trouble in sorted(problems)
        ]
        what.extend(f"{self.name(index)} stopped responding" for index in sorted(silent))
        if what:
            raise self.error(
                "; ".join(what), "Open the workers' ports to each other, or correct the addresses."
            )

    async def _call_back(self, indices, seconds):
        results = await asyncio.gather(*(self.probe(index, seconds) for index in indices))
        return list(zip(indices, results, strict=True))

    async def _order(self, participant, message):
        """Sends a message; `greet` reports a participant that has left."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_VERDICT_SECONDS):
                await participant.connection.send(message)

    async def _tell_all(self, verdict):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_VERDICT_SECONDS):
                staying, connected = list(self._connected), list(self._connected.values())
                await asyncio.gather(*(self._order(peer, verdict) for peer in connected))
                # They hang up after reading it; hanging up first could cut it off.
                if staying:
                    await asyncio.wait(staying)

    def _absent(self):
        return [index for index in range(len(self.workers)) if index not in self._participants]

    def _reason(self, index):
        if self.probe_results.get(index) == "":
            return f"it listens there, but cannot reach {self.name(0)}"
        return self.probe_results.get(index, "not probed yet")

    def _differences(self):
        """The differences between the participants, the list of workers first."""
        participants = self._participants.items()
        lists = {index: {"workers": participant.workers} for index, participant in participants}
        facts = {index: participant.facts for index, participant in participants}
        return differences.differences(lists) + differences.differences(facts, self.may_differ)
