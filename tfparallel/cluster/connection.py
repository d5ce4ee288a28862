"""A connection between two launchers or two workers of a job, and the event loop of a rendezvous.

Within the event loop, the caller bounds every wait with an `asyncio.timeout`. A timeout does not
close the connection, so use a `Connection` in a `with` block. While workers run, their launcher
waits in a selector instead (control_channel.py), and uses `read` and `send_now`.
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
from tfparallel.cluster.wire import Secret

# For passing a message to the kernel: a peer that does not read must not block the sender.
_SEND_SECONDS = 2.0
_CHUNK_BYTES = 1 << 16
_ASK_SECONDS, _NUM_ASKED = 5, 3


class Connection:
    """A TCP connection that carries messages; a context manager, which closes it.

    Attributes:
        address: The peer's address.
        session: Authenticates messages, once both sides have exchanged nonces.
    """

    def __init__(self, connected: socket.socket, address: str = ""):
        connected.setblocking(False)
        self._socket = connected
        self._received = bytearray()  # The start of a line.
        self.address = address
        self.session: wire.Session | None = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """Closes the connection; idempotent."""
        self._socket.close()

    def fileno(self) -> int:
        """A descriptor for a selector, which reports when `read` has something to read."""
        return self._socket.fileno()

    def detach(self) -> socket.socket:
        """Returns the socket, which blocks; the caller closes it."""
        self._socket.setblocking(True)
        return self._socket

    def keep_alive(self, idle_seconds: int = 10) -> None:
        """Makes TCP probe the host after `idle_seconds` of silence, and give up after three probes.

        Data that stays unacknowledged for as long also ends the connection.
        """
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {
            "TCP_KEEPIDLE": idle_seconds,
            "TCP_KEEPINTVL": _ASK_SECONDS,
            "TCP_KEEPCNT": _NUM_ASKED,
            # The same limit for unacknowledged data, in milliseconds.
            "TCP_USER_TIMEOUT": 1000 * (idle_seconds + _NUM_ASKED * _ASK_SECONDS),
        }
        for name, value in options.items():
            # Without this option the system's default applies, two hours.
            if hasattr(socket, name):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def has_hung_up(self) -> bool:
        """Whether the connection has ended."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def introduce(self, secret: Secret, job: str) -> None:
        """Exchanges nonces with a listener; `RefusedError` if it does not belong to the job."""
        greeting = wire.greeting(job)
        await self.send(greeting)
        answer = wire.parsed(await self.receive_line())
        if not wire.is_greeting(answer):
            raise wire.refusal(answer, job)
        if not wire.is_of_this_version(answer):
            text = (
                "the launcher there has a different version of tfparallel; install the same "
                "version on all hosts"
            )
            raise wire.RefusedError(text, answer["job"])
        nonces = greeting["nonce"], answer["nonce"]
        self.session = wire.Session(secret, job, nonces, is_caller=True)

    async def send(self, message: dict[str, Any]) -> None:
        """Sends a JSON-serializable message; `OSError` if the connection is broken."""
        await self.send_line(wire.framed(message, self.session))

    async def send_line(self, line: bytes) -> None:
        """Sends a line as it is; `OSError` if the connection is broken."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, line)
        except BaseException:
            self._break()
            raise

    def send_now(self, message: dict[str, Any], seconds: float = _SEND_SECONDS) -> bool:
        """Sends a message without an event loop; returns whether it was sent."""
        line = wire.framed(message, self.session)
        try:
            self._socket.settimeout(seconds)
            try:
                self._socket.sendall(line)
            finally:
                self._socket.setblocking(False)
        except OSError:
            self._break()
            return False
        return True

    def _break(self):
        """Shuts the connection down: half a line would corrupt the stream. `read` then fails."""
        with contextlib.suppress(OSError):  # The peer has closed it.
            self._socket.shutdown(socket.SHUT_RDWR)

    async def receive(self, max_bytes: int = wire.MAX_BYTES) -> dict[str, Any]:
        """Waits for the next message, on a line of at most `max_bytes`.

        Raises:
            OSError: If the connection is broken, or the peer closed it; a `RefusedError` if the
                peer fails to authenticate.
            ValueError: If the line is too long, or not a JSON object.
        """
        return self.opened(await self.receive_line(max_bytes))

    async def receive_line(self, max_bytes: int = wire.MAX_BYTES) -> bytes:
        """Waits for the next line without parsing it. Raises the errors of `receive`."""
        loop = asyncio.get_running_loop()
        while (line := self.read(max_bytes)) is None:
            readable = asyncio.Event()
            loop.add_reader(self._socket, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(self._socket)
        return line

    def read(self, max_bytes: int = wire.MAX_BYTES) -> bytes | None:
        """Returns the next line if it has arrived, without waiting. Raises as `receive`."""
        while not self._received.endswith(b"\n"):
            try:
                # Data after the line stays in the kernel, which then wakes the next selector.
                peeked = self._socket.recv(_CHUNK_BYTES, socket.MSG_PEEK)
                if not peeked:
                    raise ConnectionResetError("The other side closed the connection.")
                self._received += self._socket.recv(peeked.find(b"\n") + 1 or len(peeked))
            except BlockingIOError:
                return None
            if len(self._received) > max_bytes + 1:
                raise ValueError(f"A message of more than {max_bytes} bytes.")
        line = bytes(self._received[:-1])
        self._received.clear()
        return line

    def opened(self, line: bytes) -> dict[str, Any]:
        """Returns the message of a line. Raises as `receive`."""
        if self.session is not None:
            if (message := self.session.opened(line)) is None:
                raise wire.refusal(wire.parsed(line), self.session.job)
            return message
        if (message := wire.parsed(line)) is None:
            raise ValueError("The message is not a JSON object.")
        return message


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
            return Connection(candidate, address)
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
    if isinstance(error, wire.RefusedError):
        return str(error)
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


def run(coroutine: Coroutine[Any, Any, Any], *, in_another_thread: bool = False) -> Any:
    """Runs a coroutine in a new event loop; its tasks end with it.

    `asyncio.run` fails in a notebook, whose thread has a running loop, and elsewhere removes the
    main thread's loop. With `in_another_thread`, any exception that a signal handler raises cancels
    the coroutine; in the same thread, a callback of the loop would swallow it, unless it is a
    `KeyboardInterrupt`.
    """
    if not in_another_thread:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return _run_in_this_thread(coroutine)
    return _run_in_another_thread(coroutine)  # A thread has one running loop at most.


def _run_in_another_thread(coroutine):
    begun, result = concurrent.futures.Future(), concurrent.futures.Future()

    async def announced():
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await coroutine

    def work():
        try:
            result.set_result(_run_in_this_thread(announced()))
        except BaseException as error:
            if not begun.done():  # The event loop could not be created.
                begun.set_exception(error)
            result.set_exception(error)

    thread = threading.Thread(target=work, name="rendezvous", daemon=True)
    thread.start()
    try:
        return result.result()
    except BaseException:  # Also of a signal handler in this thread: cancel the task in the other.
        with contextlib.suppress(Exception):  # The loop is closed already, or was never created.
            loop, task = begun.result()
            loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join()


def _run_in_this_thread(coroutine):
    # A separate loop leaves the caller's untouched. The first Ctrl-C cancels the coroutine.
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(coroutine)
