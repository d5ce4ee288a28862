"""The rendezvous of several hosts' launchers, once per attempt, to exchange addresses.

    node 1 ──{node_rank, ports, ...}──> node 0, which listens at the endpoint
    node 1 <──{nodes, nonce, ...}────── node 0, once all have joined, or {error}

Each launcher authenticates with the job's secret (wire.py), from which all derive the workers'
secret. The connections stay open as the control channel while the job runs (control_channel.py).
Node 0 listens (acceptor.py) on the endpoint's address alone, and only until all have joined or the
deadline. A launcher that cannot join gets an error, and the others keep waiting. Elastic jobs use
elastic.py instead.
"""

import contextlib
import dataclasses
import socket
import time
from collections.abc import Sequence
from typing import Any

from tfparallel.cluster.acceptor import Visitor, allow_connections, open_acceptor
from tfparallel.cluster.address import join_address, split_address
from tfparallel.cluster.channel import Call
from tfparallel.cluster.control_channel import ControlChannel
from tfparallel.cluster.environment import too_many_workers
from tfparallel.cluster.wire import Secret, new_nonce

__all__ = ["Rendezvous", "meet"]

_RETRY_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Rendezvous:
    """The result of a rendezvous, known to all launchers.

    Attributes:
        addresses: The workers' "host:port" by node.
        master: A free "host:port" on node 0, for torchrun programs.
        token: The workers' secret for this attempt.
        news: The control channel to the other hosts; the job's runner closes it.
        node: This host's index.
        attempt: The number of previous attempts.
    """

    addresses: Sequence[Sequence[str]]
    master: str
    token: str
    news: ControlChannel = dataclasses.field(default_factory=ControlChannel, compare=False)
    node: int = dataclasses.field(default=0, compare=False)
    attempt: int = 0

    @classmethod
    def agreed(
        cls, answer: dict[str, Any], secret: Secret, news: ControlChannel, attempt: int
    ) -> "Rendezvous":
        """Builds it from node 0's answer."""
        return cls(
            addresses=tuple(
                tuple(join_address(host, port) for port in ports) for host, ports in answer["nodes"]
            ),
            master=answer["master"],
            token=secret.derived(answer["nonce"]),
            news=news,
            node=news.node,
            attempt=attempt,
        )


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
    deadline = time.monotonic() + timeout_seconds
    hello = {
        "node_rank": node_rank,
        "nnodes": nnodes,
        "attempt": attempt,
        "ports": list(ports),
        "master_port": master_port,
        "local_address": local_address,
    }
    secret = Secret(token)
    take_part = _join if node_rank else _host
    answer, connections = take_part(endpoint, hello, secret, job, deadline, timeout_seconds)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    news = ControlChannel(node_rank, nnodes, connections)
    return Rendezvous.agreed(answer, secret, news, attempt)


def _host(endpoint, hello, secret, job, deadline, timeout_seconds):
    """Node 0: collects the others, then answers them. Returns the answer and the connections."""
    host, port = split_address(endpoint)
    may_be_gateway = hello["local_address"] is not None
    host = hello["local_address"] or host
    nnodes = hello["nnodes"]
    allow_connections(nnodes)
    with contextlib.ExitStack() as stack:
        acceptor = stack.enter_context(
            open_acceptor(host, port, secret, job, may_be_gateway=may_be_gateway)
        )
        present: dict[int, Visitor] = {}
        stack.callback(lambda: [visitor.close() for visitor in present.values()])
        while True:
            if len(present) == nnodes - 1:
                # A launcher that has ended meanwhile may be restarted.
                for node in [node for node, each in present.items() if each.has_hung_up]:
                    present.pop(node).close()
                if len(present) == nnodes - 1:
                    break
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                answer = {"error": _missing(endpoint, hello, present, acceptor, timeout_seconds)}
                for visitor in present.values():
                    visitor.send(answer)
                return answer, {}
            for visitor in acceptor.wait(remaining):
                _admit(visitor, hello, present, acceptor)
        callers = [present[node] for node in range(1, nnodes)]
        nodes = [(host, hello["ports"])]
        for each in callers:
            nodes.append((each.hello["local_address"] or each.address, each.hello["ports"]))
        workers = [join_address(name, each) for name, ports in nodes for each in ports]
        if problem := too_many_workers(workers):
            for caller in callers:
                caller.send({"error": problem})
            return {"error": problem}, {}
        answer = {
            "nodes": nodes,
            "master": join_address(host, hello["master_port"]),
            "nonce": new_nonce(),
        }
        for caller in callers:
            caller.send(answer)
        connections = dict(present)
        present.clear()  # Keeps the connections open.
        return answer, connections


def _admit(visitor, hello, present, acceptor):
    """Admits a launcher, or sends it the reason why it cannot join."""
    node = visitor.hello["node_rank"]
    if node in present and present[node].has_hung_up:
        present.pop(node).close()
    if problem := _disagreement(visitor.hello, hello, {0, *present}):
        acceptor.turn_away(visitor.address, problem)
        visitor.send({"error": problem})
        visitor.close()
    else:
        present[node] = visitor


def _missing(endpoint, hello, present, acceptor, timeout_seconds):
    """The error of node 0 at the deadline."""
    joined = {0, *present}
    missing = sorted(set(range(hello["nnodes"])) - joined)
    return (
        f"{_nodes(missing)} did not connect to {endpoint} within {timeout_seconds:g} s; all "
        f"{hello['nnodes']} nodes are required. Received: "
        f"{_nodes(sorted(joined))}.{acceptor.who_was_turned_away()} Start `tfparallel launch` "
        "there with the same --nnodes, --rdzv_endpoint, --job_name and TFPARALLEL_JOB_TOKEN."
    )


def _join(endpoint, hello, secret, job, deadline, timeout_seconds):
    """Other nodes: connects until node 0 listens. Returns its answer and the connection."""
    address = split_address(endpoint)
    problem = "no answer"
    while (remaining := deadline - time.monotonic()) > 0:
        with contextlib.ExitStack() as stack:
            try:
                connected = socket.create_connection(address, timeout=remaining)
                call = stack.enter_context(Call(connected, secret, job))
                call.ask(hello, deadline)
                answer = call.answer(deadline)
            except TimeoutError:
                pass  # Cut short by the deadline: keep the earlier problem.
            except OSError as error:
                problem = error.strerror or str(error)
            else:
                if answer is None:
                    break
                if "error" in answer:
                    return answer, {}
                stack.pop_all()
                return answer, {0: call}
        time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))
    raise RuntimeError(
        f"Node {hello['node_rank']} waited {timeout_seconds:g} s for node 0's launcher at "
        f"{endpoint}, which must listen there and admit all nodes. Received: {problem}. Start the "
        "launcher with --node_rank=0 on the host of --rdzv_endpoint, and check that its port is "
        "reachable from here."
    )


def _disagreement(message, hello, present):
    """Returns why a launcher cannot join, or None."""
    node = message["node_rank"]
    if node is None:
        return "Every node needs a --node_rank. Received: a launcher without one."
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
