"""Where the launchers of other hosts come in: a listener, and those who have said who they are.

Who comes in has proved that it belongs to the job (handshake.py). Whatever else connects is
disconnected, and has no effect: a caller that says nothing holds nobody up, and makes room for
others after half a minute.
"""

import contextlib
import dataclasses
import errno
import resource
import selectors
import socket
import time
from typing import Any

from tfparallel.cluster.address import join_address
from tfparallel.cluster.handshake import (
    HELLO_BYTES,
    Session,
    encoded,
    is_greeting,
    parsed,
    read_line,
    who_listens,
)
from tfparallel.cluster.listener import everywhere
from tfparallel.cluster.secret import Secret, new_nonce

__all__ = ["Acceptor", "Hello", "Visitor", "allow_connections", "open_acceptor"]

_SEND_SECONDS = 2.0
_PATIENCE_SECONDS = 30.0  # With one that has called and says nothing,
_MAX_STRANGERS = 64  # and with so many.
_MAX_TOLD = 3
_LOOK_SECONDS = 0.5
_SPARE_DESCRIPTORS = 512  # For files and the pipes of workers, beside one for each node.
_NUMBERS = ("node_rank", "attempt", "last_node", "may_run")  # Of nodes and rounds, or None.
_REQUIRED = {"node_rank", "nnodes", "attempt", "local_address", "ports", "master_port"}

Hello = dict[str, Any]


@dataclasses.dataclass(eq=False)
class Visitor:
    """A launcher of the job that has come in; a context manager, which hangs up.

    Attributes:
        socket: The connection.
        hello: What it said.
        address: Where it called from.
    """

    socket: socket.socket
    hello: Hello
    address: str
    session: Session

    def __enter__(self) -> "Visitor":
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def has_hung_up(self) -> bool:
        """Whether the connection has ended."""
        try:
            self.socket.setblocking(False)
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, message: dict[str, Any] | bytes) -> None:
        """Sends a message, encoded or not.

        If not all of it can be sent, the connection ends: half a line would spoil what follows.
        Whoever reads from the connection finds that out.
        """
        message = message if isinstance(message, bytes) else encoded(message)
        try:
            self.socket.settimeout(_SEND_SECONDS)
            self.socket.sendall(self.session.sealed("acceptor", message))
        except OSError:
            with contextlib.suppress(OSError):  # The other side has closed it.
                self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hangs up; a second time does nothing."""
        self.socket.close()


class _Stranger:
    """What has come of a caller's line, since when it is here, and the nonces, once they are."""

    def __init__(self):
        self.received, self.since = bytearray(), time.monotonic()
        self.nonces: tuple[str, str] | None = None


class Acceptor:
    """A listener; a context manager, which closes it and hangs up on all who are not let in.

    Args:
        host: The address or name to listen on, of this host.
        port: The port.
        secret: What all who belong to the job know.
        job: Its name.
        may_be_gateway: Whether `host` may be the address of a gateway in front of this host. Then
            the acceptor listens on all addresses of this host.

    Attributes:
        host: As given.
        turned_away: Some of those who came and do not belong to the job, for a person to read.

    Raises:
        OSError: If it cannot listen there.
    """

    def __init__(
        self, host: str, port: int, secret: Secret, job: str, *, may_be_gateway: bool = False
    ):
        own = (may_be_gateway and everywhere(host)) or host
        family, _, _, _, address = socket.getaddrinfo(own, port, type=socket.SOCK_STREAM)[0]
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
        """What another selector may wait for: readable when somebody has called or spoken."""
        return self._selector.fileno()

    def wait(self, seconds: float) -> list[Visitor]:
        """Waits for launchers of the job.

        Args:
            seconds: For how long, at most.

        Returns:
            Those who have just come in, whom the caller hangs up on from now on.
        """
        come, has_caller = [], False
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                has_caller = True
                continue
            line = read_line(key.fileobj, key.data.received, HELLO_BYTES)
            if line is None:
                continue
            if not key.data.nonces:
                self._greet(key, line)
            elif visitor := self._let_in(key, line):
                come.append(visitor)
        if has_caller:  # Last, since it may hang up on others.
            self._accept()
        return come

    def turn_away(self, address: str, reason: str) -> None:
        """Takes note of one who came and cannot take part."""
        told = f"{address}, {reason}"
        if told not in self.turned_away and len(self.turned_away) < _MAX_TOLD:
            self.turned_away.append(told)

    def _greet(self, key, line):
        """Answers the first line of a caller with a nonce, if it is one of the job."""
        said = parsed(line)
        if not is_greeting(said):
            self._hang_up(key)
        elif said["job"] != self._job:
            self._refuse(key, f"of the job {said['job']!r}")
        else:
            key.data.nonces = (said["nonce"], new_nonce())
            self._say(key, {"job": self._job, "nonce": key.data.nonces[1]})

    def _let_in(self, key, line):
        """Returns the caller if its second line proves that it belongs to the job."""
        session = Session(self._secret, self._job, key.data.nonces)
        hello = session.opened("caller", line)
        if hello is None:
            self._refuse(key, "with another TFPARALLEL_JOB_TOKEN")
            return None
        address = _peer(key.fileobj)
        if not _is_hello(hello) or address is None:
            self._hang_up(key)
            return None
        self._selector.unregister(key.fileobj)
        return Visitor(key.fileobj, hello, address, session)

    def _refuse(self, key, reason):
        self.turn_away(_peer(key.fileobj) or "somebody", reason)
        self._say(key, {"refused": self._job})
        self._hang_up(key)

    def _say(self, key, message):
        with contextlib.suppress(OSError):  # It has gone; one line fits the socket's buffer.
            key.fileobj.send(encoded(message) + b"\n")

    def _hang_up(self, key):
        self._selector.unregister(key.fileobj)
        key.fileobj.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            caller = self._listener.accept()[0]
            caller.setblocking(False)
            self._selector.register(caller, selectors.EVENT_READ, _Stranger())
        strangers = [
            key for key in self._selector.get_map().values() if key.fileobj is not self._listener
        ]
        strangers.sort(key=lambda key: key.data.since)
        late = time.monotonic() - _PATIENCE_SECONDS
        for index, key in enumerate(strangers):
            if index < len(strangers) - _MAX_STRANGERS or key.data.since < late:
                self._hang_up(key)

    def close(self) -> None:
        """Listens no more; a second time does nothing."""
        for key in list((self._selector.get_map() or {}).values()):
            key.fileobj.close()
        self._selector.close()


def open_acceptor(
    host: str, port: int, secret: Secret, job: str, *, may_be_gateway: bool = False
) -> Acceptor:
    """Returns an acceptor at an endpoint; arguments as for `Acceptor`.

    Raises:
        RuntimeError: If it cannot be, with what to do.
    """
    try:
        return Acceptor(host, port, secret, job, may_be_gateway=may_be_gateway)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        other = who_listens((host, port), job, _LOOK_SECONDS) if is_taken else None
        who = "" if other is None else f": by a launcher of the job {other!r}"
        raise RuntimeError(
            "Node 0 cannot listen at the rendezvous endpoint, which must be an address of this "
            f"host with a free port. Received: {join_address(host, port)} ({error.strerror}{who}). "
            "Choose another port, or start node 0 on that host; if the address is a gateway's that "
            f"leads here, add --local_addr={host}."
        ) from error


def allow_connections(number: int) -> None:
    """Raises the limit of open files, where the system lets it, to a connection for each node."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + _SPARE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and limit < wanted:
        wanted = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _peer(connected):
    try:
        return connected.getpeername()[0]
    except OSError:  # It has hung up.
        return None


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
