"""The launchers of several hosts meet, once for each attempt, and learn each other's addresses.

    node 1 ──{node_rank, ports, ...}──> node 0, which listens at the endpoint
    node 1 <──{nodes, token, ...}────── node 0, once all have come, or {error}

The connections stay, for what the launchers have to tell each other while the
job runs (node_news.py). Node 0 listens (door.py) on the address of the endpoint alone, and
only until all are there or the time is up. Where the number of hosts may change, launchers
meet as elastic.py says.
"""

import contextlib
import dataclasses
import secrets
import socket
import time
from collections.abc import Sequence

from tfparallel.cluster.address import join_address, split_address
from tfparallel.cluster.door import open_door, receive, send
from tfparallel.cluster.node_news import NodeNews

__all__ = ["NodeMeeting", "meet"]

_RETRY_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class NodeMeeting:
    """What all launchers know after they have met.

    Attributes:
        addresses: For each node its workers' "host:port".
        master: "host:port" on node 0 that is free for programs of torchrun.
        token: The job's secret.
        news: How the other hosts fare from now on; whoever runs the job closes it.
        node: This host's index.
        attempt: How often the job has been started before.
    """

    addresses: Sequence[Sequence[str]]
    master: str
    token: str
    news: NodeNews = dataclasses.field(default_factory=NodeNews, compare=False)
    node: int = dataclasses.field(default=0, compare=False)
    attempt: int = 0


def meet(
    endpoint: str,
    *,
    nnodes: int,
    node_rank: int,
    ports: Sequence[int],
    master_port: int,
    attempt: int,
    token: str,
    timeout_seconds: float,
    local_address: str | None = None,
) -> NodeMeeting:
    """Waits for all nodes' launchers at the endpoint.

    Args:
        endpoint: "host:port" of node 0's launcher, the same on every node.
        nnodes: How many nodes the job has.
        node_rank: This node's index.
        ports: This node's free ports, one for each of its workers.
        master_port: One more; node 0's is used.
        attempt: How often the job has been restarted; nodes of other attempts are refused.
        token: A secret that all nodes know beforehand, or "".
        timeout_seconds: The deadline.
        local_address: This node's name or address, as the others reach it; by default the one
            that it calls from. Node 0 listens on it, and not on the endpoint's; or, if it is a
            gateway's, on all that this node has.

    Returns:
        What all nodes know now.

    Raises:
        RuntimeError: If nodes are missing at the deadline, contradict each other, or node 0
            cannot listen.
    """
    deadline = time.monotonic() + timeout_seconds
    hello = {
        "node_rank": node_rank,
        "nnodes": nnodes,
        "attempt": attempt,
        "token": token,
        "ports": list(ports),
        "master_port": master_port,
        "local_address": local_address,
    }
    take_part = _join if node_rank else _host
    answer, connections = take_part(endpoint, hello, deadline, timeout_seconds)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return NodeMeeting(
        addresses=tuple(
            tuple(join_address(host, port) for port in ports) for host, ports in answer["nodes"]
        ),
        master=answer["master"],
        token=answer["token"],
        news=NodeNews(node_rank, nnodes, connections),
        node=node_rank,
        attempt=attempt,
    )


def _host(endpoint, hello, deadline, timeout_seconds):
    """Node 0: collects the others, then answers them all. Returns the answer, and who has it."""
    host, port = split_address(endpoint)
    is_given = hello["local_address"] is not None
    host = hello["local_address"] or host
    with contextlib.ExitStack() as stack:
        door = open_door(host, port, hello["token"], may_be_gateway=is_given)
        stack.enter_context(door)
        present = {0: (None, host, hello)}
        problems = []
        while len(present) < hello["nnodes"] and not problems:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                missing = sorted(set(range(hello["nnodes"])) - set(present))
                problems = [
                    f"{_nodes(missing)} did not come to {endpoint} within {timeout_seconds:g} s; "
                    f"all {hello['nnodes']} nodes are required. "
                    f"Received: {_nodes(sorted(present))}. "
                    "Start `tfparallel launch` there with the same --nnodes and --rdzv_endpoint."
                ]
                break
            for caller, message in door.wait(remaining):
                stack.enter_context(caller)
                problem = _disagreement(message, hello, present)
                if problem:
                    problems.append(problem)
                    send(caller, {"error": problem})
                else:
                    address = message["local_address"] or caller.getpeername()[0]
                    present[message["node_rank"]] = (caller, address, message)
        if problems:
            answer = {"error": "\n".join(problems)}
        else:
            nodes = [present[node] for node in range(hello["nnodes"])]
            answer = {
                "nodes": [[address, message["ports"]] for _, address, message in nodes],
                "master": join_address(host, hello["master_port"]),
                "token": hello["token"] or secrets.token_hex(16),
            }
        callers = {node: caller for node, (caller, _, _) in present.items() if node}
        for caller in callers.values():
            send(caller, answer)
        if problems:
            return answer, {}
        # What is copied outlives the stack.
        return answer, {node: caller.dup() for node, caller in callers.items()}


def _join(endpoint, hello, deadline, timeout_seconds):
    """Every other node: calls until node 0 listens. Returns its answer, and the connection."""
    address = split_address(endpoint)
    problem = "no answer"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=remaining) as caller:
                send(caller, hello)
                received = bytearray()
                while (remaining := deadline - time.monotonic()) > 0:
                    caller.settimeout(remaining)
                    answer = receive(caller, received)
                    if answer is not None:
                        break
                else:
                    break
                if isinstance(answer, dict) and "error" in answer:
                    return answer, {}
                if isinstance(answer, dict) and "nodes" in answer:
                    return answer, {0: caller.dup()}
            problem = "it hung up (another TFPARALLEL_JOB_TOKEN, or no launcher)"
        except OSError as error:
            problem = error.strerror or str(error)
        time.sleep(min(_RETRY_SECONDS, max(0.0, deadline - time.monotonic())))
    raise RuntimeError(
        f"Node {hello['node_rank']} waited {timeout_seconds:g} s for node 0's launcher at "
        f"{endpoint}, which must listen there and have all nodes. Received: {problem}. "
        "Start the launcher with --node_rank=0 on the host of --rdzv_endpoint, and see that its "
        "port can be reached from here."
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
        taken = ", which another launcher has" if node in present else ""
        return (
            f"Every node needs a --node_rank of its own from 0 to {hello['nnodes'] - 1}. "
            f"Received: --node_rank={node}{taken}."
        )
    return None


def _nodes(ranks):
    return ("node " if len(ranks) == 1 else "nodes ") + ", ".join(map(str, ranks))
