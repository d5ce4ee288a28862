"""A worker's end of a connection to another worker, in an event loop, and that loop.

All waits belong to the caller, in an `asyncio.timeout`; leaving one closes nothing by itself, so a
`Connection` is used in a `with` block.
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
    """A TCP connection that carries messages, with proofs once it has a session."""

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
        """Sends what `json.dumps` takes; `OSError` if the connection is broken."""
        line = wire.framed(message, self.session)
        await asyncio.get_running_loop().sock_sendall(self._socket, line)

    async def receive(self, max_bytes: int = wire.MAX_BYTES) -> dict[str, Any]:
        """Waits for the next message, on a line of at most `max_bytes`.

        Raises:
            OSError: If the connection is broken, or the other side closed it; a `RefusedError` if
                it does not prove that it is of the job.
            ValueError: If the line is too long, or no JSON object.
        """
        line = await self.receive_line(max_bytes)
        if self.session is not None:
            if (message := self.session.opened(line)) is None:
                other = (wire.parsed(line) or {}).get("refused")
                job = other if wire.is_word(other) else None
                raise wire.RefusedError("it is no worker of this job", job)
            return message
        if (message := wire.parsed(line)) is None:
            raise ValueError("A message that is no JSON object.")
        return message

    async def receive_line(self, max_bytes: int = wire.MAX_BYTES) -> bytes:
        """Waits for the next line, whatever it says. Errors as of `receive`."""
        loop = asyncio.get_running_loop()
        while (line := self._lines.next(max_bytes)) is None:
            chunk = await loop.sock_recv(self._socket, _CHUNK_BYTES)
            if not chunk:
                raise ConnectionResetError("The other side closed the connection.")
            self._lines.feed(chunk)
        return line


async def connect(address: str, avoid_ports: Collection[int] = ()) -> Connection:
    """Connects to the first of the host's addresses that answers, from none of `avoid_ports`.

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

    A look-up cannot be broken off. It runs in a thread that nobody waits for, so that a name server
    which does not answer cannot hold up a deadline, nor the event loop.
    """
    host, port = split_address(address)
    with contextlib.suppress(ValueError):
        literal = ipaddress.ip_address(host)
        if "%" not in host:
            return [(socket.AF_INET if literal.version == 4 else socket.AF_INET6, (host, port))]
    found = concurrent.futures.Future()
    found.set_running_or_notify_cancel()  # From now on nobody cancels it.

    def look_up():
        try:
            found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            found.set_exception(error)
        except UnicodeError:
            found.set_exception(OSError(f"{host!r} is no host name"))

    threading.Thread(target=look_up, name=f"look up {host}", daemon=True).start()
    return [(family, location) for family, _, _, _, location in await asyncio.wrap_future(found)]


def reason(error: BaseException) -> str:
    """Says in a few words why a connection failed: "connection refused"."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, socket.gaierror):
        return f"host name: {error.strerror}".lower()
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error).rstrip(".").lower() or type(error).__name__


def _socket_apart_from(avoid_ports, family):
    """A socket whose near end is no port that a worker is to listen on.

    Left to itself the system may take one: that worker then finds its port taken; and a connection
    to a port where nobody listens yet may even reach itself.
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
    """Runs a coroutine, with whose end its tasks end, in an event loop of its own.

    `asyncio.run` refuses to work in a notebook, whose thread has a running loop,
    and elsewhere leaves the main thread without the loop it had.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_here(coroutine)
    return _run_in_another_thread(coroutine)  # A thread has one running loop at most.


def _run_in_another_thread(coroutine):
    begun = concurrent.futures.Future()

    async def announced():
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await coroutine

    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as other_thread:
        result = other_thread.submit(_run_here, announced())
        try:
            return result.result()
        except KeyboardInterrupt:  # It comes to the main thread; the other one must be told.
            loop, task = begun.result()
            with contextlib.suppress(RuntimeError):  # The loop has been closed meanwhile.
                loop.call_soon_threadsafe(task.cancel)
            raise


def _run_here(coroutine):
    # A loop of its own leaves the caller's as it is. The first Ctrl-C cancels the coroutine.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(coroutine)
