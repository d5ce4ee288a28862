"""Meeting the other processes of a job, before TensorFlow connects them and would wait for ever."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.cluster.address import split_address
from tfparallel.cluster.loopback import (
    OPEN,
    are_loopback,
    loopback_only,
    moved_to_loopback,
    network_name,
)
from tfparallel.cluster.worker_rendezvous import meet
from tfparallel.user_log import notice

__all__ = ["join_job", "serving"]

_PAGE = "docs/security.md"
_OF_NCCL = "NCCL_SOCKET_IFNAME"  # On which network interfaces NCCL listens.


def join_job(
    addresses: Sequence[str], index: int, facts: Mapping[str, Any], start_timeout: float
) -> list[str]:
    """Waits until all processes are there, and agree on the facts and on the versions.

    What TensorFlow then sends them goes past a proxy that the environment names for gRPC.

    Args:
        addresses: `"host:port"` of each, with the ports that TensorFlow will use.
        index: Which of them this process is.
        facts: What all must agree on, beside the versions.
        start_timeout: How many seconds to wait.

    Returns:
        The addresses for TensorFlow, in the same order: those of the loopback if all processes are
        on one host.

    Raises:
        RuntimeError: If one is missing, cannot be reached, or does not agree.
    """
    versions = {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
    }
    said = meet(
        addresses,
        index,
        {"versions": versions, "network": network_name(addresses), **facts},
        timeout_seconds=start_timeout,
        token=os.environ.get("TFPARALLEL_JOB_TOKEN", ""),
        may_differ=["network"],
    )
    networks = {theirs["network"] for theirs in said}
    found = list(addresses)
    if len(networks) == 1 and None not in networks:
        found = moved_to_loopback(addresses)
    _go_past_proxies(found)
    return found


@contextlib.contextmanager
def serving(addresses: Sequence[str], index: int) -> Iterator[None]:
    """Closes TensorFlow's server, started inside, and NCCL to other hosts if the job has one.

    Args:
        addresses: What `join_job` returned.
        index: Which of them this process is.
    """
    port = split_address(addresses[index])[1]
    if not are_loopback(addresses):
        yield
        # It is so in every process, and one of them says it.
        problems = [] if index else [f"(one per process) {OPEN}; the job has several hosts"]
    else:
        os.environ.setdefault(_OF_NCCL, "lo")
        with loopback_only(port) as problems:
            yield
    for problem in problems:
        notice(f"TensorFlow's port {port} {problem}. See {_PAGE}.")


def _go_past_proxies(addresses: Sequence[str]) -> None:
    """Has gRPC connect to the job's hosts by itself, whatever http_proxy says.

    gRPC asks a proxy for every host that `no_grpc_proxy`, or without it `no_proxy`, does not name,
    loopback included; what the proxy refuses, TensorFlow tries again for ever.
    """
    named = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy", ""))
    hosts = [host for host in named.split(",") if host]
    hosts += [host for host, _ in map(split_address, addresses) if host not in hosts]
    os.environ["no_grpc_proxy"] = ",".join(dict.fromkeys(hosts))
