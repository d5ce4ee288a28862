"""Meeting the other processes of a job, before TensorFlow connects them and would wait for ever."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfparallel.cluster.address import split_address
from tfparallel.cluster.rendezvous import meet

__all__ = ["meet_peers"]


def meet_peers(
    addresses: Sequence[str], index: int, facts: Mapping[str, Any], start_timeout: float
) -> None:
    """Waits until all processes are there, and agree on the facts and on the versions.

    What TensorFlow then sends them goes past a proxy that the environment names for gRPC.

    Args:
        addresses: `"host:port"` of each, with the ports that TensorFlow will use.
        index: Which of them this process is.
        facts: What all must agree on, beside the versions.
        start_timeout: How many seconds to wait.

    Raises:
        RuntimeError: If one is missing, cannot be reached, or does not agree.
    """
    _go_past_proxies(addresses)
    versions = {
        "Python": ".".join(map(str, sys.version_info[:2])),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
    }
    meet(
        addresses,
        index,
        {"versions": versions, **facts},
        timeout_seconds=start_timeout,
        token=os.environ.get("TFPARALLEL_JOB_TOKEN", ""),
    )


def _go_past_proxies(addresses: Sequence[str]) -> None:
    """Has gRPC connect to the job's hosts by itself, whatever http_proxy says.

    gRPC asks a proxy for every host that `no_grpc_proxy`, or without it `no_proxy`, does not name,
    loopback included; what the proxy refuses, TensorFlow tries again for ever.
    """
    named = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy", ""))
    hosts = [host for host in named.split(",") if host]
    hosts += [host for host, _ in map(split_address, addresses) if host not in hosts]
    os.environ["no_grpc_proxy"] = ",".join(dict.fromkeys(hosts))
