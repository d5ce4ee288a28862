"""The rendezvous of several hosts' launchers, once per attempt, to exchange addresses.

    node 1 ──{node_rank, ports, ...}──> node 0, which listens at the endpoint
    node 1 <──{nodes, nonce, ...}────── node 0, once all have joined, or {error}

Each launcher authenticates with the job's secret (wire.py), from which all derive the workers'
secret. The connections stay open as the control channel while the job runs (control_channel.py).
Node 0 listens (acceptor.py) on the endpoint's address alone, or on all if its name resolves to the
loopback there, and only until all have joined or the deadline. A launcher that cannot join gets an
error, and the others keep waiting.
"""

import asyncio
import contextlib
import dataclasses
import errno
import resource
import socket
from collections.abc import Sequence
from typing import Any

from tfparallel.cluster.acceptor import RETRY_SECONDS, Acceptor
from tfparallel.cluster.address import join_address, split_address
from tfparallel.cluster.connection import Connection, connect, reason, resolve, run
from tfparallel.cluster.control_channel import ControlChannel
from tfparallel.cluster.environment import too_many_workers
from tfparallel.cluster.listener import everywhere, is_loopback_here_only
from tfparallel.cluster.wire import RefusedError, Secret, new_nonce

_SEND_SECONDS = 2.0
_LOOK_SECONDS = 0.5
# The addresses of all workers fit into TF_CONFIG's 128 KiB, and an answer needs less than twice
# that.
_ANSWER_BYTES = 1 << 20
_MAX_TOLD = 3
_SPARE_DESCRIPTORS = 512  # For files and the pipes of workers, beyond one per node.
_INTEGERS = ("node_rank", "nnodes", "attempt")
_HUNG_UP = "it closed the connection (not a launcher, or a different version of tfparallel)"


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """The result of a rendezvous, known to all launchers.

    Attributes:
        addresses: The workers' "host:port" by node.
        master: A free "host:port" on node 0, for torchrun programs.
        token: The workers' secret for this attempt.
        news: The control channel to the other hosts; the job's runner closes it.
        node: This host's index.
    """

    addresses: Sequence[Sequence[str]]
    master: str
    token: str
    news: ControlChannel = dataclasses.field(default_factory=ControlChannel, compare=False)
    node: int = dataclasses.field(default=0, compare=False)


def meet(
    endpoint: str,
    *,
    nnodes: int,
    node_rank: int,
    ports: Sequence[int],
    master_port: int,
    attempt: int,
    token: str,
    job: str,
    timeout_seconds: float,
    local_address: str | None = None,
) -> Rendezvous:
    """Waits for the launchers of all nodes at the endpoint.

    Args:
        endpoint: "host:port" of node 0's launcher, the same on every node.
        nnodes: The number of nodes.
        node_rank: This node's index.
        ports: Free ports of this node, one per worker.
        master_port: One more free port; node 0's is used.
        attempt: The number of restarts so far; nodes of other attempts are rejected.
        token: The secret shared by all nodes.
        job: The name of the job, the same on every node.
        timeout_seconds: The time limit.
        local_address: This node's name or address for the others; by default the one that it
            connects from. Node 0 listens on it instead of the endpoint's address; or, if it is a
            gateway's, on all addresses of this node.

    Raises:
        RuntimeError: If nodes are missing at the deadline or disagree, or node 0 cannot listen.
    """
    hello = {
        "node_rank": node_rank,
        "nnodes": nnodes,
        "attempt": attempt,
        "ports": list(ports),
        "master_port": master_port,
        "local_address": local_address,
    }
    secret = Secret(token)
    if node_rank:
        meeting = _join(endpoint, hello, secret, job, timeout_seconds)
    else:
        meeting = _Host(endpoint, hello, secret, job, timeout_seconds).meet()
    answer, connections = run(meeting, in_another_thread=True)
    return Rendezvous(
        addresses=tuple(
            tuple(join_address(host, port) for port in ports) for host, ports in answer["nodes"]
        ),
        master=answer["master"],
        token=secret.derived(answer["nonce"]),
        news=ControlChannel(node_rank, nnodes, connections),
        node=node_rank,
    )


async def _join(endpoint, hello, secret, job, timeout_seconds):
    """Other nodes: connects until node 0 listens. Returns its answer and the connection."""
    problem = "no answer"
    _, port = split_address(endpoint)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_seconds):
            while True:
                try:
                    with contextlib.ExitStack() as unless_answered:
                        connection = unless_answered.enter_context(await connect(endpoint, {port}))
                        await connection.introduce(secret, job)
                        await connection.send(hello)
                        answer = await connection.receive(_ANSWER_BYTES)
                        if "error" in answer:
                            raise RuntimeError(answer["error"])
                        unless_answered.pop_all()
                        return answer, {0: connection}
                except (ConnectionResetError, BrokenPipeError, ValueError):
                    problem = _HUNG_UP
                except OSError as error:
                    problem = reason(error)
                await asyncio.sleep(RETRY_SECONDS)
    raise RuntimeError(
        f"Node {hello['node_rank']} waited {timeout_seconds:g} s for node 0's launcher at "
        f"{endpoint}, which must listen there and admit all nodes. Received: {problem}. Start the "
        "launcher with --node_rank=0 on the host of --rdzv_endpoint, and check that its port is "
        "reachable from here."
    )


class _Host:
    """Node 0, which collects the other launchers, and answers them."""

    def __init__(self, endpoint, hello, secret, job, timeout_seconds):
        self._endpoint, self._hello = endpoint, hello
        self._secret, self._job, self._timeout_seconds = secret, job, timeout_seconds
        self._present: dict[int, tuple[Connection, dict[str, Any]]] = {}
        self._joined = asyncio.Event()
        self._turned_away: list[str] = []

    async def meet(self):
        """Returns the answer, and the connections by node."""
        host, port = split_address(self._endpoint)
        host = self._hello["local_address"] or host
        num_others = self._hello["nnodes"] - 1
        _allow_connections(num_others)
        listening = await self._listen(host, port)
        with contextlib.ExitStack() as unless_answered:
            unless_answered.callback(lambda: self._drop(list(self._present)))
            answer = None
            async with Acceptor(
                listening, self._secret, self._job, self._admit, self._refused, num_others
            ):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._timeout_seconds):
                        while not self._are_all_here(num_others):
                            self._joined.clear()
                            await self._joined.wait()
                        answer = self._answer(host)
            # Nobody joins any more.
            answer = answer or {"error": self._missing()}
            connections = {node: connection for node, (connection, _) in self._present.items()}
            await asyncio.gather(*(_tell(each, answer) for each in connections.values()))
            if "error" in answer:
                raise RuntimeError(answer["error"])
            unless_answered.pop_all()
        return answer, connections

    async def _listen(self, host, port):
        listen_host = (self._hello["local_address"] and everywhere(host)) or host
        try:
            async with asyncio.timeout(self._timeout_seconds):
                places = await resolve(join_address(listen_host, port))
            family, location = places[0]
            if is_loopback_here_only(listen_host, places):
                family, location = socket.AF_INET, ("0.0.0.0", port)
            return socket.create_server(location, family=family)
        except OSError as error:
            place, by = join_address(host, port), ""
            if error.errno == errno.EADDRINUSE:
                by = await _who_listens(place, self._secret, self._job)
            raise RuntimeError(
                "Node 0 cannot listen on the rendezvous endpoint, which must be an address of this "
                f"host with a free port. Received: {place} ({reason(error)}{by}). Choose another "
                "port, or start node 0 on that host; if the address belongs to a gateway that "
                f"forwards here, add --local_addr={host}."
            ) from error

    def _are_all_here(self, num_others):
        if len(self._present) == num_others:
            # A launcher that has ended meanwhile may be restarted.
            self._drop([node for node, (each, _) in self._present.items() if each.has_hung_up])
        return len(self._present) == num_others

    def _drop(self, nodes):
        for node in nodes:
            self._present.pop(node)[0].close()

    async def _admit(self, connection, hello):
        """Admits a launcher, or sends it the reason why it cannot join."""
        if not _is_hello(hello):
            return False
        node = hello["node_rank"]
        if node in self._present and self._present[node][0].has_hung_up:
            self._drop([node])
        if problem := _disagreement(hello, self._hello, {0, *self._present}):
            self._refused(connection, problem)
            await _tell(connection, {"error": problem})
            return False
        self._present[node] = connection, hello
        self._joined.set()
        return True

    def _refused(self, connection, why, claim=None):
        entry = f"{connection.address}: {why}"
        if entry not in self._turned_away and len(self._turned_away) < _MAX_TOLD:
            self._turned_away.append(entry)

    def _answer(self, host):
        """The answer to all launchers, with the addresses of all workers."""
        nodes = [(host, self._hello["ports"])]
        for _, (connection, hello) in sorted(self._present.items()):
            nodes.append((hello["local_address"] or connection.address, hello["ports"]))
        workers = [join_address(name, port) for name, ports in nodes for port in ports]
        if problem := too_many_workers(workers):
            return {"error": problem}
        master = join_address(host, self._hello["master_port"])
        return {"nodes": nodes, "master": master, "nonce": new_nonce()}

    def _missing(self):
        """The error at the deadline."""
        nnodes, joined = self._hello["nnodes"], {0, *self._present}
        missing = sorted(set(range(nnodes)) - joined)
        rejected = "".join(f" Rejected {entry.rstrip('.')}." for entry in self._turned_away)
        return (
            f"{_nodes(missing)} did not connect to {self._endpoint} within "
            f"{self._timeout_seconds:g} s; all {nnodes} nodes are required. Received: "
            f"{_nodes(sorted(joined))}.{rejected} Start `tfparallel launch` there with the same "
            "--nnodes, --rdzv_endpoint, --job_name and TFPARALLEL_JOB_TOKEN."
        )


async def _tell(connection, message):
    """Sends a message; a launcher that does not read it is missed later."""
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_SEND_SECONDS):
            await connection.send(message)


async def _who_listens(address, secret, job) -> str:
    """Returns the job of the launcher at an address, for an error; "" if there is none."""
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            with await connect(address) as connection:
                await connection.introduce(secret, job)
    except RefusedError as error:
        job = error.job
    except (OSError, ValueError):
        return ""
    return f" by a launcher of job {job!r}" if job else ""


def _allow_connections(number: int) -> None:
    """Raises the limit on open files, if permitted, to allow one connection per node."""
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = number + _SPARE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and limit < required:
        required = required if hard_limit == resource.RLIM_INFINITY else min(required, hard_limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (required, hard_limit))


def _is_hello(message):
    def is_port(value):
        return type(value) is int and 0 < value < 65536

    address, ports = message.get("local_address"), message.get("ports")
    is_address = isinstance(address, str) and address.isascii() and address.isprintable()
    return (
        all(type(message.get(name)) is int for name in _INTEGERS)
        and (address is None or is_address)
        and isinstance(ports, list)
        and all(map(is_port, [*ports, message.get("master_port")]))
    )


def _disagreement(message, hello, present):
    """Returns why a launcher cannot join, or None."""
    node = message["node_rank"]
    for name, flag in (("nnodes", "--nnodes"), ("attempt", "the number of restarts")):
        if message[name] != hello[name]:
            return (
                f"All nodes must agree on {flag}. Received: {hello[name]} on node 0, "
                f"{message[name]} on node {node}."
            )
    if not 0 <= node < hello["nnodes"] or node in present:
        taken = ", which another launcher already has" if node in present else ""
        return (
            f"Every node needs a unique --node_rank from 0 to {hello['nnodes'] - 1}. Received: "
            f"--node_rank={node}{taken}."
        )
    return None


def _nodes(ranks):
    return ("node " if len(ranks) == 1 else "nodes ") + ", ".join(map(str, ranks))
