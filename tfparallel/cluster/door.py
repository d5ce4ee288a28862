"""Where the launchers of other hosts come in: a listener, and those who have said who they are.

    a launcher ──{"nnodes": 2, "ports": [...], "token": ..., ...}──> door

Every message is one line of JSON of bounded size. Whatever else connects is hung up on; a caller
that says nothing holds nobody up, and makes room for others after half a minute. Where
TFPARALLEL_JOB_TOKEN is set on all hosts, only who knows it may join.
"""

import contextlib
import json
import secrets
import selectors
import socket
import time
from typing import Any

from tfparallel.cluster.address import join_address
from tfparallel.cluster.listener import everywhere

__all__ = ["Door", "Hello", "open_door", "receive", "send"]

_MESSAGE_BYTES = 1 << 16
_SEND_SECONDS = 2.0
_PATIENCE_SECONDS = 30.0  # With one that has called and says nothing,
_MAX_STRANGERS = 64  # and with so many.
_NUMBERS = ("node_rank", "attempt", "last_node", "may_run")  # Of nodes and rounds, or None.

Hello = dict[str, Any]


class _Caller:
    """What has come of a caller's first message, and since when it is awaited."""

    def __init__(self):
        self.received, self.since = bytearray(), time.monotonic()


class Door:
    """A listener; a context manager, which closes it and hangs up on all who are not let in.

    Args:
        host: The address or name to listen on, of this host.
        port: The port.
        token: A secret that all who belong to the job know, or "".
        may_be_gateway: Whether `host` may be the address of a gateway in front of this host. Then
            the door listens on all addresses of this host.

    Raises:
        OSError: If it cannot listen there.
    """

    def __init__(self, host: str, port: int, token: str, *, may_be_gateway: bool = False):
        own = (may_be_gateway and everywhere(host)) or host
        family, _, _, _, address = socket.getaddrinfo(own, port, type=socket.SOCK_STREAM)[0]
        self.host = host
        self._token = _bytes(token)
        self._listener = socket.create_server(address, family=family)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> "Door":
        return self

    def __exit__(self, *_):
        self.close()

    def fileno(self) -> int:
        """What another selector may wait for: readable when somebody has called or spoken."""
        return self._selector.fileno()

    def wait(self, seconds: float) -> list[tuple[socket.socket, Hello]]:
        """Waits for launchers of the job.

        Args:
            seconds: For how long, at most.

        Returns:
            Those who have just said who they are, each with its connection, which the caller
            closes from now on.
        """
        come, has_caller = [], False
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                has_caller = True
                continue
            hello = receive(key.fileobj, key.data.received)
            if hello is None:
                continue
            self._selector.unregister(key.fileobj)
            if _is_hello(hello) and secrets.compare_digest(_bytes(hello["token"]), self._token):
                come.append((key.fileobj, hello))
            else:  # No launcher, or one of another job.
                key.fileobj.close()
        if has_caller:  # Last, since it may hang up on others.
            self._accept()
        return come

    def _accept(self):
        with contextlib.suppress(OSError):
            caller = self._listener.accept()[0]
            caller.setblocking(False)
            self._selector.register(caller, selectors.EVENT_READ, _Caller())
        strangers = [
            key for key in self._selector.get_map().values() if key.fileobj is not self._listener
        ]
        strangers.sort(key=lambda key: key.data.since)
        late = time.monotonic() - _PATIENCE_SECONDS
        for index, key in enumerate(strangers):
            if index < len(strangers) - _MAX_STRANGERS or key.data.since < late:
                self._selector.unregister(key.fileobj)
                key.fileobj.close()

    def close(self) -> None:
        """Listens no more; a second time does nothing."""
        for key in list((self._selector.get_map() or {}).values()):
            key.fileobj.close()
        self._selector.close()


def open_door(host: str, port: int, token: str, *, may_be_gateway: bool = False) -> Door:
    """Returns a door at an endpoint; arguments as for `Door`.

    Raises:
        RuntimeError: If it cannot be, with what to do.
    """
    try:
        return Door(host, port, token, may_be_gateway=may_be_gateway)
    except OSError as error:
        raise RuntimeError(
            "Node 0 cannot listen at the rendezvous endpoint, which must be an address of this "
            f"host with a free port. Received: {join_address(host, port)} ({error.strerror}). "
            "Choose another port, or start node 0 on that host; if the address is a gateway's that "
            f"leads here, add --local_addr={host}."
        ) from error


def receive(caller: socket.socket, received: bytearray) -> Any:
    """Reads what has come of a message, and nothing behind it.

    Args:
        caller: The connection.
        received: What has come before, which grows.

    Returns:
        The message; False for what is none, None while more must come.
    """
    try:
        # What follows the line is news, and for another reader.
        seen = caller.recv(_MESSAGE_BYTES, socket.MSG_PEEK)
        chunk = caller.recv(seen.find(b"\n") + 1 or len(seen))
    except (BlockingIOError, TimeoutError):
        return None
    except OSError:
        return False
    received += chunk
    if not received.endswith(b"\n"):
        return None if chunk and len(received) < _MESSAGE_BYTES else False
    try:
        return json.loads(received)
    except (ValueError, RecursionError):
        return False


def send(caller: socket.socket, message: Hello) -> None:
    """Sends a message; who has hung up meanwhile is missed later."""
    with contextlib.suppress(OSError):
        caller.settimeout(_SEND_SECONDS)
        caller.sendall(json.dumps(message).encode() + b"\n")


def _bytes(text):
    return text.encode(errors="surrogatepass")  # JSON may hold what no text does.


def _is_hello(message):
    def is_port(value):
        return type(value) is int and 0 < value < 65536

    def is_address(value):
        return isinstance(value, str) and value.isascii() and value.isprintable()

    def is_range(value):
        return isinstance(value, list) and [type(number) for number in value] == [int, int]

    return (
        isinstance(message, dict)
        and (type(message.get("nnodes")) is int or is_range(message.get("nnodes")))
        and all(type(message.get(name)) in (int, type(None)) for name in _NUMBERS)
        and isinstance(message.get("token"), str)
        and (message.get("local_address") is None or is_address(message["local_address"]))
        and isinstance(message.get("ports"), list)
        and all(is_port(port) for port in message["ports"])
        and is_port(message.get("master_port"))
    )
