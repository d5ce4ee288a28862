"""Elastic rendezvous: the launchers meet again whenever the number of hosts changes.

    round 0   A ◄── B, C        A listens at the endpoint, and is node 0
              A is killed: its connections close
    round 1   B ◄── C           whichever of them can listen there now
              D connects; the workers of B and C save their state, and end
    round 2   B ◄── C, D

The first round begins when all hosts have joined, or when enough have and no other joins for a
while. Later rounds begin as soon as the remaining hosts are back, if they have a quorum
(membership.py). Node 0's acceptor stays open while the workers run; if a host joins and fails, the
next one to join must wait (back_off.py). If the host of the first endpoint is lost, another takes
over at the next endpoint in the list. A launcher that listens at a later endpoint moves to an
earlier one as soon as another launcher listens there.
"""

import contextlib
import socket
import time
from collections.abc import Sequence

from tfparallel.cluster.acceptor import Acceptor, allow_connections
from tfparallel.cluster.address import join_address, split_address
from tfparallel.cluster.back_off import BackOff
from tfparallel.cluster.channel import Call
from tfparallel.cluster.control_channel import ControlChannel
from tfparallel.cluster.environment import too_many_workers
from tfparallel.cluster.membership import Present, are_all_back, has_quorum, may_run, num_needed
from tfparallel.cluster.rendezvous import Rendezvous
from tfparallel.cluster.wire import RefusedError, Secret, new_nonce

__all__ = ["ElasticMeetings", "JobEndedError"]

_CONNECT_SECONDS = 2.0
_RETRY_SECONDS = 0.2
_KNOCK_SECONDS = 1.0
_MAX_WAITING = 64  # Beyond the job's maximum number of hosts.
_FIRST_CALL_SECONDS = 10.0  # Hosts do not start at the same moment;
_LAST_CALL_SECONDS = 3.0  # running launchers come back at once.


class JobEndedError(Exception):
    """The job that this launcher was about to join has succeeded."""


class ElasticMeetings:
    """The rounds of one launcher. A context manager, which closes its acceptor.

    Args:
        endpoints: The rendezvous endpoints, "host:port" each, the same on every host.
        min_nodes, max_nodes: The minimum and maximum number of hosts.
        node_rank: This host's index, which orders new hosts; or None.
        token, job: The secret shared by all nodes, and the job's name.
        timeout_seconds: How long to wait for enough hosts in each round.
        local_address: This host's address for the others; by default, the one it connects from.
        back_off: How long joining hosts wait after a host that joined has failed.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        min_nodes: int,
        max_nodes: int,
        node_rank: int | None = None,
        token: str,
        job: str,
        timeout_seconds: float = 120.0,
        local_address: str | None = None,
        back_off: BackOff | None = None,
    ):
        self._endpoints = [split_address(endpoint) for endpoint in endpoints]
        self._min_nodes, self._max_nodes = min_nodes, max_nodes
        self._secret, self._job = Secret(token), job
        self._timeout_seconds = timeout_seconds
        nnodes = [min_nodes, max_nodes]
        self._hello = {"nnodes": nnodes, "node_rank": node_rank, "local_address": local_address}
        self._acceptor: Acceptor | None = None
        self._why_closed = self._why_refused = ""
        self._place = 0  # The acceptor's index in the endpoints.
        self._waiting: list[Present] = []
        self._round = -1
        self._last: ControlChannel | None = None
        self._back_off = back_off or BackOff()
        self._joined: frozenset[int] = frozenset()  # The nodes that are new in this round.
        self._began = 0.0

    def __enter__(self) -> "ElasticMeetings":
        return self

    def __exit__(self, *_):
        self._close_acceptor()

    def meet(self, ports: Sequence[int], master_port: int) -> Rendezvous:
        """Waits until a round begins; the caller closes the rendezvous's `news`.

        Args:
            ports: Free ports of this host, one per worker.
            master_port: One more free port.

        Raises:
            RuntimeError: If there are too few hosts at the deadline, or this host's flags disagree.
            JobEndedError: If the job has succeeded.
        """
        deadline = time.monotonic() + self._timeout_seconds
        hello = {
            **self._hello,
            "ports": list(ports),
            "master_port": master_port,
            "last_node": None if self._last is None else self._last.node,
            "attempt": self._round,
            "may_run": self._may_run(),
        }
        while True:
            if self._acceptor is None:
                rendezvous = self._join(hello, deadline, self._endpoints)
                if rendezvous is None and not self._open():
                    if time.monotonic() > deadline:
                        raise RuntimeError(self._no_listener())
                    time.sleep(_RETRY_SECONDS)
            else:
                rendezvous = self._gather(hello, deadline)
            if rendezvous is not None:
                self._last = rendezvous.news
                self._round = rendezvous.attempt
                self._began = time.monotonic()
                return rendezvous

    def note_failure(self, node: int) -> float:
        """Records that a round failed at a node; returns how long joining hosts must wait."""
        if node not in self._joined:
            return 0.0
        now = time.monotonic()
        return self._back_off.failed(now - self._began, now)

    def end(self) -> None:
        """Notifies the launchers waiting at this acceptor that the job has succeeded."""
        if self._acceptor is not None:
            self._admit(0)
        for other in self._waiting:
            other.caller.send({"ended": True})
            other.caller.close()
        self._waiting.clear()

    def _close_acceptor(self):
        for other in self._waiting:
            other.caller.close()
        self._waiting.clear()
        if self._acceptor is not None:
            self._acceptor.close()
        self._acceptor = None

    def _open(self) -> bool:
        """Listens at the first endpoint that belongs to this host; returns whether it could."""
        allow_connections(self._max_nodes + _MAX_WAITING)
        rank, local_address = self._hello["node_rank"], self._hello["local_address"]
        for place, (host, port) in enumerate(self._endpoints):
            # The endpoint may be the address of a gateway in front of node 0.
            for name in [host, local_address] if rank == 0 and local_address else [host]:
                may_be_gateway = rank in (None, 0) and name == local_address
                try:
                    self._acceptor = Acceptor(
                        name, port, self._secret, self._job, may_be_gateway=may_be_gateway
                    )
                    self._place = place
                    return True
                except OSError as error:
                    self._why_closed = str(error)
        return False

    def _join(self, hello, deadline, endpoints, patience=None) -> Rendezvous | None:
        """Joins a launcher that listens at an endpoint; None if there is none, or it hung up.

        With `patience`, in seconds, only if a round begins within that time, or a job is running.
        """
        for address in endpoints:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            try:
                caller = socket.create_connection(address, min(_CONNECT_SECONDS, remaining))
            except OSError:
                continue
            with contextlib.ExitStack() as stack:
                stack.callback(caller.close)
                if caller.getsockname() == caller.getpeername():
                    continue  # Connecting to a free local port may connect to itself.
                until = deadline if patience is None else time.monotonic() + patience
                call = stack.enter_context(Call(caller, self._secret, self._job))
                try:
                    call.ask(hello, until)
                    answer = call.answer(until)
                    if answer is not None and "running" in answer:
                        self._close_acceptor()  # We will be admitted to the running job.
                        until, patience = deadline, None
                        answer = call.answer(until)
                except RefusedError as error:
                    self._why_refused = f"; at {join_address(*address)}, {error}"
                    continue
                except OSError:
                    continue
                if answer is None:
                    if patience is not None:
                        continue
                    raise RuntimeError(self._no_round(join_address(*address)))
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                if "ended" in answer:
                    raise JobEndedError
                if "nodes" in answer:
                    self._close_acceptor()
                    stack.pop_all()
                    return self._meeting(answer, answer["rank"], {0: call}, None)
        return None

    def _gather(self, hello, deadline) -> Rendezvous | None:
        """Node 0: waits for the others, and answers them; None if it must join elsewhere."""
        this_launcher = Present(None, self._hello["local_address"] or self._acceptor.host, hello)
        quiet_since = last_look = time.monotonic()
        patience = _FIRST_CALL_SECONDS if self._last is None else _LAST_CALL_SECONDS
        while True:
            self._drop_gone()
            now = time.monotonic()
            present = sorted([this_launcher, *self._waiting], key=lambda each: each.order)
            returning = [each for each in present if each is this_launcher or each.was_there]
            is_backing_off = self._back_off.remaining(now) > 0
            if is_backing_off and len(returning) >= self._min_nodes and has_quorum(returning):
                present = returning
            is_enough = len(present) >= self._min_nodes and has_quorum(present)
            has_all = len(present) >= self._max_nodes or are_all_back(present)
            if is_enough and (has_all or now - quiet_since >= patience):
                break
            if now > deadline:
                raise _refused(present, self._too_few(present))
            if now - last_look > _KNOCK_SECONDS:
                last_look = now
                if self._place and self._has_earlier_listener():
                    self._close_acceptor()  # The waiting launchers reconnect there.
                    return None
                others = [each for each in self._endpoints if each != self._endpoints[self._place]]
                # A running job may have been unreachable before.
                if others and not any(each.was_there for each in present):
                    rendezvous = self._join(hello, deadline, others, patience=_RETRY_SECONDS)
                    if rendezvous is not None or self._acceptor is None:
                        return rendezvous
            if self._admit(min(_RETRY_SECONDS, max(0.0, deadline - now))):
                quiet_since = time.monotonic()
        taking_part = present[: self._max_nodes]
        workers = [join_address(e.address, port) for e in taking_part for port in e.hello["ports"]]
        if problem := too_many_workers(workers):
            raise _refused(present, problem)
        self._waiting = [other for other in self._waiting if other not in taking_part]
        was_there = [each.was_there for each in taking_part]
        answer = {
            "nodes": [[each.address, each.hello["ports"]] for each in taking_part],
            "master": join_address(this_launcher.address, hello["master_port"]),
            "nonce": new_nonce(),
            "attempt": 1 + max(each.hello["attempt"] for each in taking_part),
            # The nodes that join a running job.
            "joined": [node for node, was in enumerate(was_there) if any(was_there) and not was],
        }
        connections = {}
        for rank, other in enumerate(taking_part[1:], 1):
            other.caller.send(answer | {"rank": rank})
            connections[rank] = other.caller
        return self._meeting(answer, 0, connections, _Newcomers(self))

    def _meeting(self, answer, rank, connections, newcomers):
        self._joined = frozenset(answer.get("joined", ()))
        news = ControlChannel(rank, len(answer["nodes"]), connections, newcomers)
        if newcomers is not None:
            newcomers.news = news
        return Rendezvous.agreed(answer, self._secret, news, answer["attempt"])

    def _admit(self, seconds, is_running=False) -> bool:
        """Admits launchers to the waiting list; returns whether there were any."""
        has_come = False
        self._drop_gone()
        for visitor in self._acceptor.wait(seconds):
            hello = visitor.hello
            if hello["nnodes"] != self._hello["nnodes"] or hello["attempt"] is None:
                visitor.send({"error": self._disagreement(hello)})
                visitor.close()
            elif len(self._waiting) >= self._max_nodes + _MAX_WAITING:
                visitor.close()
            else:
                if is_running:
                    visitor.send({"running": True})
                address = hello["local_address"] or visitor.address
                self._waiting.append(Present(visitor, address, hello))
                has_come = True
        return has_come

    def _drop_gone(self):
        for gone in [other for other in self._waiting if other.has_hung_up]:
            gone.caller.close()
            self._waiting.remove(gone)

    def _has_earlier_listener(self):
        for address in self._endpoints[: self._place]:
            with contextlib.suppress(OSError):
                socket.create_connection(address, _RETRY_SECONDS).close()
                return True
        return False

    def _may_run(self) -> int | None:
        """The number of hosts of the last round that may still run: silent ones count."""
        last = self._last
        return None if last is None else last.num_nodes - len(last.gone - last.silent)

    def _too_few(self, present):
        number = len(present)
        requirement = f"--nnodes={self._min_nodes}:{self._max_nodes} requires {self._min_nodes}"
        if number >= self._min_nodes:
            requirement = (
                f"{num_needed(present)} of the {may_run(present)} hosts of the last round are "
                "required, since the others may still be running behind a broken link"
            )
        return (
            f"The job has {number} host{'s' * (number > 1)} after {self._timeout_seconds:g} s at "
            f"{self._places()}; {requirement}.{self._acceptor.who_was_turned_away()} Start "
            "`tfparallel launch` on more hosts, or raise --start_timeout."
        )

    def _no_round(self, endpoint):
        return (
            f"No round of the job began within {self._timeout_seconds:g} s. Received: a launcher "
            f"at {endpoint} that admitted no host; the job may already have its {self._max_nodes} "
            "hosts, still have too few, or be making this one wait because other newcomers failed."
        )

    def _no_listener(self):
        return (
            f"A launcher must listen at {self._places()}, but none did within "
            f"{self._timeout_seconds:g} s, and this one cannot. Received: "
            f"{self._why_closed}{self._why_refused}. Start one on a host of --rdzv_endpoint. With "
            "several endpoints, HOST:PORT,HOST:PORT, another host takes over if the first is lost."
        )

    def _places(self):
        return ", ".join(join_address(*endpoint) for endpoint in self._endpoints)

    def _disagreement(self, hello):
        nnodes = hello["nnodes"]
        nnodes = ":".join(map(str, nnodes)) if isinstance(nnodes, list) else nnodes
        return (
            f"All hosts must agree on --nnodes. Received: {self._min_nodes}:{self._max_nodes} on "
            f"the listening host, {nnodes} here."
        )


def _refused(present: Sequence[Present], problem: str) -> RuntimeError:
    """Sends the problem to the others, and returns the error for this launcher."""
    for other in present[1:]:
        other.caller.send({"error": problem})
    return RuntimeError(problem)


class _Newcomers:
    """The acceptor while the workers run: a line of `ControlChannel`, which does not close it."""

    def __init__(self, meetings: ElasticMeetings):
        self._meetings = meetings
        self.news: ControlChannel | None = None

    def fileno(self):
        return self._meetings._acceptor.fileno()

    def listen(self):
        """Admits new launchers; `look` decides whether a round begins for them."""
        self._meetings._admit(0, is_running=True)
        return True

    def look(self) -> float | None:
        """Announces a joining host once it may join; returns in how many seconds to look again."""
        meetings = self._meetings
        waiting = [other for other in meetings._waiting if not other.has_hung_up]
        has_room = self.news.num_nodes < meetings._max_nodes
        if self.news.has_newcomer or not (waiting and has_room):
            return None
        remaining = meetings._back_off.remaining(time.monotonic())
        if remaining and not any(other.was_there for other in waiting):
            return remaining
        self.news.tell_newcomer()
        return 0.0
