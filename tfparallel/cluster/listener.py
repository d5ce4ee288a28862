"""The socket on which a worker listens before TensorFlow takes over its port."""

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import time
from collections.abc import Sequence

from tfparallel.cluster import connection, differences
from tfparallel.cluster.address import join_address, split_address
from tfparallel.cluster.ports import is_free, owner

# The address to listen on if the others reach this worker through a gateway.
LISTEN_ADDR = "TFPARALLEL_LISTEN_ADDR"

# An ending process, or a short-lived connection of another, may still hold the port.
_PATIENCE_SECONDS = 1.0
_RETRY_SECONDS = 0.1


async def listen(
    workers: Sequence[str], worker_index: int, *, timeout_seconds: float
) -> socket.socket:
    """Listens only at a worker's own address, or that of TFPARALLEL_LISTEN_ADDR.

    A loopback address cannot be reached from outside. One exception: a host that resolves its own
    name to the loopback (Debian writes `127.0.1.1 name` into /etc/hosts), with peers on other
    hosts, listens on every address, as TensorFlow does. The time limit is for the look-up.

    Raises:
        RuntimeError: If the port is taken, or the address does not belong to this host.
    """
    address = workers[worker_index]
    host, port = split_address(address)
    listen_host = os.environ.get(LISTEN_ADDR)
    if listen_host:
        address = join_address(listen_host, port)
    try:
        async with asyncio.timeout(timeout_seconds):
            places = await connection.resolve(address)
        several = len({split_address(each)[0] for each in workers}) > 1
        if not listen_host and several and is_loopback_here_only(host, places):
            places = [(socket.AF_INET, ("0.0.0.0", port))]
        return await _bind(places, port)
    except OSError as error:
        worker = differences.name_worker(workers, worker_index).capitalize()
        if error.errno == errno.EADDRINUSE:
            raise RuntimeError(
                f"{worker} cannot use its port {port}: it is held by "
                f"{owner(port) or 'another process'}. TensorFlow needs the port to itself, on all "
                f"addresses of host {socket.gethostname()}. Received: workers={list(workers)}. "
                "Stop that process, or give the job another port."
            ) from None
        raise RuntimeError(
            f"{worker} cannot listen on {address} on host {socket.gethostname()}: "
            f"{connection.reason(error)}. A worker's address must belong to its own host. "
            f"Received: workers={list(workers)}, worker_index={worker_index}. Correct the task "
            "index or the address in TF_CONFIG; behind a gateway, or with a published container "
            "port, set "
            f"{LISTEN_ADDR}=0.0.0.0."
        ) from None


def everywhere(address: str) -> str | None:
    """Returns the address to listen on if `address` is a gateway's rather than this host's.

    Returns:
        `"0.0.0.0"` or `"::"`, for all addresses; None if `address` belongs to this host.
    """
    try:
        family, _, _, _, location = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(location)
        return None
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            return None
        return "::" if family == socket.AF_INET6 else "0.0.0.0"


def is_loopback_here_only(host: str, places: Sequence[tuple[int, tuple]]) -> bool:
    """Whether a host's own name resolves to its loopback, as with Debian's `127.0.1.1 name`.

    If peers are on other hosts, it must listen on every address then.

    Args:
        host: The name; an address or `localhost` means the same on every host.
        places: What it resolves to here: address families and socket addresses.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return False
    return host != "localhost" and all(
        ipaddress.ip_address(location[0]).is_loopback for _, location in places
    )


async def _bind(places, port):
    """Listens at the first location that belongs to this host."""
    give_up = time.monotonic() + _PATIENCE_SECONDS
    while True:
        trouble = OSError("the host name has no address")
        for family, location in places:
            try:
                # TensorFlow will listen on every address.
                if not is_free(port):
                    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
                both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
                # On "::" it accepts IPv4, too; and it ignores connections that are closing.
                listening = socket.create_server(location, family=family, dualstack_ipv6=both)
                listening.setblocking(False)
                return listening
            except OSError as error:
                trouble = error
                if error.errno == errno.EADDRINUSE:
                    break
        if trouble.errno != errno.EADDRINUSE or time.monotonic() > give_up:
            raise trouble
        await asyncio.sleep(_RETRY_SECONDS)
