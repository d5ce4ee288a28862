"""Accepts the connections of other hosts' launchers, and authenticates them.

An admitted launcher has proved that it belongs to the job (wire.py). All other callers are
disconnected without effect: a silent one blocks nothing, and is dropped after half a minute.
"""

import contextlib
import errno
import resource
import selectors
import socket
import time
from typing import Any

from tfparallel.cluster import wire
from tfparallel.cluster.address import join_address
from tfparallel.cluster.channel import Channel, who_listens
from tfparallel.cluster.listener import everywhere
from tfparallel.cluster.wire import Secret

__all__ = ["Acceptor", "Visitor", "allow_connections", "open_acceptor"]

_PATIENCE_SECONDS = 30.0  # For a caller to identify itself,
_MAX_STRANGERS = 64  # and how many of these are kept.
_MAX_TOLD = 3
_LOOK_SECONDS = 0.5
_SPARE_DESCRIPTORS = 512  # For files and the pipes of workers, beyond one per node.
_NUMBERS = ("node_rank", "attempt", "last_node", "may_run")  # Integers, or None.
_REQUIRED = {"node_rank", "nnodes", "attempt", "local_address", "ports", "master_port"}


class Visitor(Channel):
    """A caller from `address`, connected at the time `since`.

    Attributes:
        hello: Its hello, once it has proved that it is a launcher of the job.
    """

    def __init__(self, connected: socket.socket, address: str):
        super().__init__(connected)
        self.address, self.since = address, time.monotonic()
        self.hello: dict[str, Any] | None = None


class Acceptor:
    """A listener; a context manager, which closes it and hangs up on callers not admitted.

    Args:
        host: The address or name of this host to listen on.
        port: The port.
        secret: The job's secret.
        job: The job's name.
        may_be_gateway: Whether `host` may be the address of a gateway in front of this host. If it
            is, the acceptor listens on all addresses of this host.

    Attributes:
        host: The argument `host`.
        turned_away: Descriptions of some rejected callers, for an error.

    Raises:
        OSError: If it cannot listen there.
    """

    def __init__(
        self, host: str, port: int, secret: Secret, job: str, *, may_be_gateway: bool = False
    ):
        listen_host = (may_be_gateway and everywhere(host)) or host
        family, _, _, _, address = socket.getaddrinfo(listen_host, port, type=socket.SOCK_STREAM)[0]
        self.host = host
        self.turned_away: list[str] = []
        self._secret, self._job = secret, job
        self._listener = socket.create_server(address, family=family)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> "Acceptor":
        return self

    def __exit__(self, *_):
        self.close()

    def fileno(self) -> int:
        """A descriptor for another selector: readable on a new connection or message."""
        return self._selector.fileno()

    def wait(self, seconds: float) -> list[Visitor]:
        """Waits up to `seconds`; returns the admitted launchers, which the caller must close."""
        admitted, has_caller = [], False
        for key, _ in self._selector.select(seconds):
            visitor = key.fileobj
            if visitor is self._listener:
                has_caller = True
                continue
            try:
                while visitor.hello is None and (line := visitor.read()) is not None:
                    self._process(visitor, line)
            except (OSError, ValueError):  # Ended, malformed, or not of the job.
                self._hang_up(visitor)
                continue
            if visitor.hello is not None:
                self._selector.unregister(visitor)
                admitted.append(visitor)
        if has_caller:  # Last, since it may hang up on other callers.
            self._accept()
        return admitted

    def turn_away(self, address: str, reason: str) -> None:
        """Records a caller that cannot take part."""
        entry = f"{address}: {reason}"
        if entry not in self.turned_away and len(self.turned_away) < _MAX_TOLD:
            self.turned_away.append(entry)

    def who_was_turned_away(self) -> str:
        """Returns a sentence on the callers turned away, for an error; "" if there are none."""
        return "".join(f" Rejected {entry.rstrip('.')}." for entry in self.turned_away)

    def _process(self, visitor, line):
        """Processes a line of a caller not yet admitted; raises if it is not of the job."""
        if visitor.session is not None:
            hello = visitor.session.opened(line)
            if hello is None:
                self._refuse(visitor, "different TFPARALLEL_JOB_TOKEN")
            if not _is_hello(hello):
                raise ValueError("The message is not a launcher's hello.")
            visitor.hello = hello
            return
        greeting = wire.parsed(line)
        if not wire.is_greeting(greeting):
            raise ValueError("The message names no job.")
        if greeting["job"] != self._job:
            self._refuse(visitor, f"belongs to job {greeting['job']!r}")
        if not wire.is_of_this_version(greeting):
            self._refuse(visitor, "different version of tfparallel")
        reply = wire.greeting(self._job)
        visitor.send(reply)
        nonces = greeting["nonce"], reply["nonce"]
        visitor.session = wire.Session(self._secret, self._job, nonces, is_caller=False)

    def _refuse(self, visitor, reason):
        self.turn_away(visitor.address, reason)
        visitor.session = None
        visitor.send({"refused": self._job})
        raise wire.RefusedError(reason)

    def _hang_up(self, visitor):
        self._selector.unregister(visitor)
        visitor.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            caller, address = self._listener.accept()
            self._selector.register(Visitor(caller, address[0]), selectors.EVENT_READ)
        callers = [key.fileobj for key in self._selector.get_map().values()]
        callers.remove(self._listener)
        callers.sort(key=lambda visitor: visitor.since)
        cutoff = time.monotonic() - _PATIENCE_SECONDS
        for index, visitor in enumerate(callers):
            if index < len(callers) - _MAX_STRANGERS or visitor.since < cutoff:
                self._hang_up(visitor)

    def close(self) -> None:
        """Stops listening; idempotent."""
        for key in list((self._selector.get_map() or {}).values()):
            key.fileobj.close()
        self._selector.close()


def open_acceptor(
    host: str, port: int, secret: Secret, job: str, *, may_be_gateway: bool = False
) -> Acceptor:
    """Returns an `Acceptor`; raises a RuntimeError with a fix if it cannot listen."""
    try:
        return Acceptor(host, port, secret, job, may_be_gateway=may_be_gateway)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        other = who_listens((host, port), job, _LOOK_SECONDS) if is_taken else None
        by = "" if other is None else f" by a launcher of job {other!r}"
        raise RuntimeError(
            "Node 0 cannot listen on the rendezvous endpoint, which must be an address of this "
            f"host with a free port. Received: {join_address(host, port)} ({error.strerror}{by}). "
            "Choose another port, or start node 0 on that host; if the address belongs to a "
            f"gateway that forwards here, add --local_addr={host}."
        ) from error


def allow_connections(number: int) -> None:
    """Raises the limit on open files, if permitted, to allow one connection per node."""
    limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    required = number + _SPARE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and limit < required:
        required = required if hard_limit == resource.RLIM_INFINITY else min(required, hard_limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (required, hard_limit))


def _is_hello(message):
    def is_port(value):
        return type(value) is int and 0 < value < 65536

    def is_address(value):
        return isinstance(value, str) and value.isascii() and value.isprintable()

    def is_range(value):
        return isinstance(value, list) and [type(number) for number in value] == [int, int]

    return (
        isinstance(message, dict)
        and message.keys() >= _REQUIRED
        and (type(message["nnodes"]) is int or is_range(message["nnodes"]))
        and all(type(message.get(name)) in (int, type(None)) for name in _NUMBERS)
        and (message["local_address"] is None or is_address(message["local_address"]))
        and isinstance(message["ports"], list)
        and all(is_port(port) for port in message["ports"])
        and is_port(message["master_port"])
    )
