"""A worker's end of a connection to another worker, in an event loop.

All waits belong to the caller, in an `asyncio.timeout`; leaving one closes nothing by itself, so a
`Connection` is used in a `with` block.
"""

import asyncio
import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Collection
from typing import Any

from tfparallel.cluster import wire
from tfparallel.cluster.address import split_address

__all__ = ["Connection", "connect", "reason", "resolve"]

_CHUNK_BYTES = 16 * 1024


class Connection:
    """A TCP connection that carries messages both ways.

    Args:
        connected: The socket, which the connection owns and closes.

    Attributes:
        session: What proves who speaks, once both have named a nonce.
    """

    def __init__(self, connected: socket.socket):
        connected.setblocking(False)
        self._socket = connected
        self._lines = wire.Lines()
        self.session: wire.Session | None = None

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.close()

    def close(self) -> None:
        """Hangs up; a second time does nothing."""
        self._socket.close()

    async def send(self, message: dict[str, Any]) -> None:
        """Sends one message.

        Args:
            message: What `json.dumps` takes.

        Raises:
            OSError: If the connection is broken.
        """
        line = wire.framed(message, self.session)
        await asyncio.get_running_loop().sock_sendall(self._socket, line)

    async def receive(self, max_bytes: int = wire.MAX_BYTES) -> dict[str, Any]:
        """Waits for the next message.

        Args:
            max_bytes: The longest line that is read.

        Returns:
            The message.

        Raises:
            OSError: If the connection is broken, or the other side closed it; a `RefusedError` if
                it does not prove that it is of the job.
            ValueError: If the line is too long, or no JSON object.
        """
        line = await self.receive_line(max_bytes)
        if self.session is not None:
            if (message := self.session.opened(line)) is None:
                other = (wire.parsed(line) or {}).get("refused")
                raise wire.RefusedError("it is no worker of this job", other)
            return message
        if (message := wire.parsed(line)) is None:
            raise ValueError("A message that is no JSON object.")
        return message

    async def receive_line(self, max_bytes: int = wire.MAX_BYTES) -> bytes:
        """Waits for the next line, whatever it says. Arguments and errors as of `receive`."""
        loop = asyncio.get_running_loop()
        while (line := self._lines.next(max_bytes)) is None:
            chunk = await loop.sock_recv(self._socket, _CHUNK_BYTES)
            if not chunk:
                raise ConnectionResetError("The other side closed the connection.")
            self._lines.feed(chunk)
        return line


async def connect(address: str, avoid_ports: Collection[int] = ()) -> Connection:
    """Connects to the first of the host's addresses that answers.

    Args:
        address: `"host:port"` or `"[::1]:port"`.
        avoid_ports: Ports that the near end of the connection must not take.

    Returns:
        The connection.

    Raises:
        OSError: If the host name is unknown, or none of its addresses answers.
    """
    loop = asyncio.get_running_loop()
    trouble = OSError("the host name has no address")
    for family, location in await resolve(address):
        with contextlib.ExitStack() as unless_connected:
            try:
                candidate = _socket_apart_from(avoid_ports, family)
                unless_connected.callback(candidate.close)
                await loop.sock_connect(candidate, location)
            except OSError as error:
                trouble = error
                continue
            unless_connected.pop_all()
            return Connection(candidate)
    raise trouble


async def resolve(address: str) -> list[tuple[socket.AddressFamily, tuple]]:
    """Looks the host of an address up, without blocking the event loop.

    A look-up cannot be broken off. It runs in a thread that nobody waits for,
    so that a name server which does not answer cannot hold up a deadline.

    Args:
        address: `"host:port"` or `"[::1]:port"`.

    Returns:
        The address family and socket address of each result, best first.

    Raises:
        OSError: If the host name is unknown.
    """
    host, port = split_address(address)
    with contextlib.suppress(ValueError):
        literal = ipaddress.ip_address(host)
        if "%" not in host:
            return [(socket.AF_INET if literal.version == 4 else socket.AF_INET6, (host, port))]
    loop = asyncio.get_running_loop()
    found = loop.create_future()

    def settle(result, error):
        if not found.done():
            found.set_exception(error) if error else found.set_result(result)

    def look_up():
        result, error = [], None
        try:
            for family, _, _, _, location in socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM
            ):
                result.append((family, location))
        except OSError as problem:
            error = problem
        except UnicodeError:
            error = OSError(f"{host!r} is no host name")
        # The loop is closed if the caller has given up.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=look_up, name=f"look up {host}", daemon=True).start()
    return await found


def reason(error: BaseException) -> str:
    """Says in a few words why a connection failed.

    Args:
        error: What `connect`, `send` or `receive` raised, or a `TimeoutError`.

    Returns:
        Such as `"connection refused"`.
    """
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, socket.gaierror):
        return f"host name: {error.strerror}".lower()
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error).rstrip(".").lower() or type(error).__name__


def _socket_apart_from(avoid_ports, family):
    """A socket whose near end is no port that a worker is to listen on.

    Left to itself the system may take a worker's port for the near end, since
    such ports often lie in the range it hands out: that worker then finds its
    port taken; and a connection to a port where nobody listens yet may even
    reach itself.
    """
    anywhere = "::" if family == socket.AF_INET6 else "0.0.0.0"
    while True:
        candidate = socket.socket(family, socket.SOCK_STREAM)
        try:
            candidate.setblocking(False)
            candidate.bind((anywhere, 0))
            if candidate.getsockname()[1] not in avoid_ports:
                return candidate
        except BaseException:
            candidate.close()
            raise
        candidate.close()
