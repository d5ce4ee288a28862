"""A worker's end of an asyncio connection to another worker, and the event loop.

The caller bounds every wait with an `asyncio.timeout`. A timeout does not close the connection, so
use a `Connection` in a `with` block.
"""

import asyncio
import concurrent.futures
import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Collection, Coroutine
from typing import Any

from tfparallel.cluster import wire
from tfparallel.cluster.address import split_address

__all__ = ["Connection", "connect", "reason", "resolve", "run"]

_CHUNK_BYTES = 16 * 1024


class Connection:
    """A TCP connection that carries messages, authenticated once it has a session."""

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
        """Closes the connection; idempotent."""
        self._socket.close()

    async def send(self, message: dict[str, Any]) -> None:
        """Sends a JSON-serializable message; `OSError` if the connection is broken."""
        line = wire.framed(message, self.session)
        await asyncio.get_running_loop().sock_sendall(self._socket, line)

    async def receive(self, max_bytes: int = wire.MAX_BYTES) -> dict[str, Any]:
        """Waits for the next message, on a line of at most `max_bytes`.

        Raises:
            OSError: If the connection is broken, or the peer closed it; a `RefusedError` if the
                peer fails to authenticate.
            ValueError: If the line is too long, or not a JSON object.
        """
        line = await self.receive_line(max_bytes)
        if self.session is not None:
            if (message := self.session.opened(line)) is None:
                other = (wire.parsed(line) or {}).get("refused")
                job = other if wire.is_word(other) else None
                raise wire.RefusedError("it is not a worker of this job", job)
            return message
        if (message := wire.parsed(line)) is None:
            raise ValueError("The message is not a JSON object.")
        return message

    async def receive_line(self, max_bytes: int = wire.MAX_BYTES) -> bytes:
        """Waits for the next line without parsing it. Raises the errors of `receive`."""
        loop = asyncio.get_running_loop()
        while (line := self._lines.next(max_bytes)) is None:
            chunk = await loop.sock_recv(self._socket, _CHUNK_BYTES)
            if not chunk:
                raise ConnectionResetError("The other side closed the connection.")
            self._lines.feed(chunk)
        return line


async def connect(address: str, avoid_ports: Collection[int] = ()) -> Connection:
    """Connects to the first address of the host that answers, from a port not in `avoid_ports`.

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
    """Returns address families and socket addresses of a host, best first; `OSError` if unknown.

    A look-up cannot be cancelled. It runs in a daemon thread: an unresponsive name server delays
    neither a deadline nor the event loop.
    """
    host, port = split_address(address)
    with contextlib.suppress(ValueError):
        literal = ipaddress.ip_address(host)
        if "%" not in host:
            return [(socket.AF_INET if literal.version == 4 else socket.AF_INET6, (host, port))]
    lookup = concurrent.futures.Future()
    lookup.set_running_or_notify_cancel()  # It can no longer be cancelled.

    def look_up():
        try:
            lookup.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            lookup.set_exception(error)
        except UnicodeError:
            lookup.set_exception(OSError(f"{host!r} is not a valid host name"))

    threading.Thread(target=look_up, name=f"look up {host}", daemon=True).start()
    return [(family, location) for family, _, _, _, location in await asyncio.wrap_future(lookup)]


def reason(error: BaseException) -> str:
    """Returns in a few words why a connection failed: "connection refused"."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, socket.gaierror):
        return f"host name: {error.strerror}".lower()
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error).rstrip(".").lower() or type(error).__name__


def _socket_apart_from(avoid_ports, family):
    """Returns a socket bound to a local port that no worker will listen on.

    The system might choose a worker's port, and that worker would find it taken; a connection to a
    port without a listener may even connect to itself.
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


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in a new event loop; its tasks end with it.

    `asyncio.run` fails in a notebook, whose thread has a running loop, and elsewhere removes the
    main thread's loop.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_in_this_thread(coroutine)
    return _run_in_another_thread(coroutine)  # A thread has one running loop at most.


def _run_in_another_thread(coroutine):
    begun = concurrent.futures.Future()

    async def announced():
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await coroutine

    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as other_thread:
        result = other_thread.submit(_run_in_this_thread, announced())
        try:
            return result.result()
        except KeyboardInterrupt:  # Raised in the main thread: cancel the task in the other one.
            loop, task = begun.result()
            with contextlib.suppress(RuntimeError):  # The loop is closed already.
                loop.call_soon_threadsafe(task.cancel)
            raise


def _run_in_this_thread(coroutine):
    # A separate loop leaves the caller's untouched. The first Ctrl-C cancels the coroutine.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(coroutine)
