"""Waits for the processes of a job before TensorFlow connects them, which would wait forever."""

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

_PAGE = "docs/security.md"
_OF_NCCL = "NCCL_SOCKET_IFNAME"  # The network interfaces on which NCCL listens.


def join_job(
    addresses: Sequence[str], index: int, facts: Mapping[str, Any], start_timeout: float
) -> list[str]:
    """Waits until all processes are ready, and agree on the facts and the versions.

    TensorFlow's connections then bypass any proxy that the environment sets for gRPC.

    Args:
        addresses: `"host:port"` of each, with the ports that TensorFlow will use.
        index: The index of this process.
        facts: What all must agree on, besides the versions.
        start_timeout: How many seconds to wait.

    Returns:
        The addresses for TensorFlow, in the same order; loopback addresses if all processes are on
        one host.

    Raises:
        RuntimeError: If a process is missing, cannot be reached, or does not agree.
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
    joined = list(addresses)
    if len(networks) == 1 and None not in networks:
        joined = moved_to_loopback(addresses)
    _go_past_proxies(joined)
    return joined


@contextlib.contextmanager
def serving(addresses: Sequence[str], index: int) -> Iterator[None]:
    """Hides TensorFlow's server, started inside, and NCCL from other hosts if the job has one host.

    Args:
        addresses: The result of `join_job`.
        index: The index of this process.
    """
    port = split_address(addresses[index])[1]
    if not are_loopback(addresses):
        yield
        # The same in every process; only one reports it.
        problems = [] if index else [f"(one per process) {OPEN}; the job has several hosts"]
    else:
        os.environ.setdefault(_OF_NCCL, "lo")
        with loopback_only(port) as problems:
            yield
    for problem in problems:
        notice(f"TensorFlow's port {port} {problem}. See {_PAGE}.")


def _go_past_proxies(addresses: Sequence[str]) -> None:
    """Makes gRPC connect to the job's hosts directly, whatever http_proxy says.

    gRPC uses a proxy for every host, even loopback, that is not in `no_grpc_proxy` or, if that is
    unset, `no_proxy`. If the proxy refuses, TensorFlow retries forever.
    """
    named = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy", ""))
    hosts = [host for host in named.split(",") if host]
    hosts += [host for host, _ in map(split_address, addresses) if host not in hosts]
    os.environ["no_grpc_proxy"] = ",".join(dict.fromkeys(hosts))
