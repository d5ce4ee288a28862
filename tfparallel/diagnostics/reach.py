"""Examines the cluster for the doctor: its members, this worker's port, and reachable peers.

It sends no data. A peer that has not started refuses the connection, and that is enough to show
that its host is up and no firewall is in between.
"""

import concurrent.futures
import errno
import socket
from collections.abc import Iterator

from tfparallel.cluster import ports
from tfparallel.cluster.address import split_address
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.diagnostics.report import Finding

_MAX_CONNECTIONS = 64


def examine_cluster(timeout_seconds: float) -> tuple[Cluster, list[Finding]]:
    """Examines the cluster from the environment; a peer has `timeout_seconds` to answer.

    Returns:
        The cluster (a single process if the environment is invalid) and the findings.
    """
    try:
        cluster = Cluster.from_env()
    except ValueError as error:
        advice = "correct the variables it names, or unset them"
        return Cluster(), [Finding("cluster", "broken", str(error), advice)]
    if cluster.address is None:
        text = "none in the environment: this process trains alone"
        return cluster, [Finding("cluster", "ok", text)]
    role = "the evaluator" if cluster.is_evaluator else f"worker {cluster.worker_index}"
    text = f"{cluster.source} names {cluster.num_workers} workers; this is {role}"
    findings = [Finding("cluster", "ok", f"{text}, {cluster.address}")]
    findings += _examine_own_address(cluster)
    findings += _examine_peers(cluster, timeout_seconds)
    return cluster, findings


def _examine_own_address(cluster: Cluster) -> Iterator[Finding]:
    host, port = split_address(cluster.address)
    try:
        is_free = ports.is_free(port)
    except OSError as error:
        text = f"cannot listen on port {port} ({error.strerror})"
        yield Finding("own port", "broken", text, "use a port above 1023")
    else:
        if is_free:
            yield Finding("own port", "ok", f"{port} is free")
        else:
            yield Finding(
                "own port",
                "broken",
                f"{port} is used by {ports.owner(port) or 'another process'}: TensorFlow's server "
                "cannot start",
                "stop that process, or choose another port for this worker",
            )
    if _is_foreign_address(host):
        yield Finding(
            "own address",
            "warn",
            f"{host} is not an address of this host: unless it is forwarded here, the other "
            "workers cannot reach this one",
            "check that the worker's index matches the order of the addresses",
        )


def _is_foreign_address(host):
    """Whether none of the host's addresses can be bound on this machine."""
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        # A host need not resolve its own name; for peers, resolution is examined elsewhere.
        return False
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return False
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                return False
    return True


def _examine_peers(cluster: Cluster, timeout_seconds: float) -> Iterator[Finding]:
    peers = {
        index: address
        for index, address in enumerate(cluster.workers)
        if address != cluster.address
    }
    if not peers:
        return
    with concurrent.futures.ThreadPoolExecutor(_MAX_CONNECTIONS) as threads:
        answers = threads.map(lambda address: answer(address, timeout_seconds), peers.values())
        answers = dict(zip(peers, answers, strict=True))
    for index, problem in answers.items():
        if problem in ("listening", "refused"):
            continue
        yield Finding(
            f"worker {index}",
            "broken",
            f"{peers[index]} cannot be reached: {problem}",
            "check the address, that the host is up, and its firewall",
        )
    counts = {kind: list(answers.values()).count(kind) for kind in ("listening", "refused")}
    reached = sum(counts.values())
    if reached:
        text = f"{reached} of {len(peers)} can be reached"
        if counts["refused"]:
            text += f"; nothing listens yet on {counts['refused']} of them"
        yield Finding("peers", "ok", text)


def answer(address: str, timeout_seconds: float) -> str:
    """Returns "listening", "refused", or why there was no answer; `ValueError` without a port."""
    try:
        socket.create_connection(split_address(address), timeout_seconds).close()
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return f"no answer in {timeout_seconds:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return "listening"
