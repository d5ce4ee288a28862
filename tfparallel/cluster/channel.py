"""A launcher's end of a connection to another launcher."""

import contextlib
import errno
import selectors
import socket
import time
from typing import Any

from tfparallel.cluster import wire
from tfparallel.cluster.wire import Secret

__all__ = ["Call", "Channel", "keep_alive", "who_listens"]

# For passing a message to the kernel: a peer that does not read must not block the sender.
_SEND_SECONDS = 2.0
_CHUNK_BYTES = 1 << 16
# The addresses of all workers fit into TF_CONFIG's 128 KiB, and an answer needs less than twice
# that.
_ANSWER_BYTES = 1 << 20
_IDLE_SECONDS = 10
_ASK_SECONDS, _NUM_ASKED = 5, 3
_NO_ANSWER = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}


class Channel:
    """A bidirectional message connection; a context manager, which closes it.

    Attributes:
        session: Authenticates messages, once both sides have exchanged nonces.
        is_silent: Whether it ended without a sign from the peer.
    """

    def __init__(self, connected: socket.socket):
        connected.setblocking(False)
        self._socket = connected
        self._lines = wire.Lines()
        self.session: wire.Session | None = None
        self.is_silent = False

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

    def keep_alive(self) -> None:
        """Makes TCP detect a vanished host within half a minute."""
        keep_alive(self._socket, _IDLE_SECONDS)

    @property
    def has_hung_up(self) -> bool:
        """Whether the connection has ended."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, message: dict[str, Any], seconds: float = _SEND_SECONDS) -> bool:
        """Sends a message; returns whether it was sent.

        If only part of it can be sent, the connection is shut down: half a line would corrupt the
        stream. The next `read` then fails.
        """
        line = wire.framed(message, self.session)
        try:
            self._socket.settimeout(seconds)
            try:
                self._socket.sendall(line)
            finally:
                self._socket.setblocking(False)
        except OSError as error:  # Reported once by the system: here, and not to `read`.
            self.is_silent |= error.errno in _NO_ANSWER or isinstance(error, TimeoutError)
            with contextlib.suppress(OSError):  # The peer has closed it.
                self._socket.shutdown(socket.SHUT_RDWR)
            return False
        return True

    def read(self, max_bytes: int = wire.MAX_BYTES) -> bytes | None:
        """Returns the next line if it has arrived, without waiting.

        Raises:
            OSError: If the connection has ended.
            ValueError: If the line is longer than `max_bytes`.
        """
        while (line := self._lines.next(max_bytes)) is None:
            try:
                # Data after the line stays in the kernel, which then wakes the next selector.
                peeked = self._socket.recv(_CHUNK_BYTES, socket.MSG_PEEK)
                chunk = self._socket.recv(peeked.find(b"\n") + 1 or len(peeked)) if peeked else b""
            except BlockingIOError:
                return None
            except OSError as error:
                self.is_silent |= error.errno in _NO_ANSWER
                raise
            if not chunk:
                raise ConnectionResetError("The other side closed the connection.")
            self._lines.feed(chunk)
        return line

    def read_until(self, until: float, max_bytes: int = wire.MAX_BYTES) -> bytes | None:
        """Returns the next line; None if it has not arrived by the monotonic time `until`.

        Raises the errors of `read`.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            while (line := self.read(max_bytes)) is None:
                if not selector.select(max(0.0, until - time.monotonic())):
                    return None
        return line


class Call(Channel):
    """A launcher's side of a connection to an acceptor; deadlines are monotonic times."""

    def __init__(self, connected: socket.socket, secret: Secret, job: str):
        super().__init__(connected)
        self._secret, self._job = secret, job

    def ask(self, hello: dict[str, Any], until: float) -> None:
        """Identifies this launcher; `OSError` if there is no answer, or `RefusedError`."""
        nonces = self.greet(until)
        self.session = wire.Session(self._secret, self._job, nonces, is_caller=True)
        self._say(hello, until)

    def greet(self, until: float) -> tuple[str, str]:
        """Sends the job's name; returns both nonces. Raises the errors of `ask`."""
        greeting = wire.greeting(self._job)
        self._say(greeting, until)
        line = self._next_line(until, wire.MAX_BYTES)
        if line is None:
            raise TimeoutError("no answer")
        answer = wire.parsed(line)
        if not wire.is_greeting(answer):
            raise wire.refusal(answer, self._job)
        if not wire.is_of_this_version(answer):
            text = (
                "the launcher there has a different version of tfparallel; install the same "
                "version on all hosts"
            )
            raise wire.RefusedError(text, answer["job"])
        return greeting["nonce"], answer["nonce"]

    def answer(self, until: float) -> dict[str, Any] | None:
        """Returns the next message; None if none arrives in time. Raises the errors of `ask`."""
        line = self._next_line(until, _ANSWER_BYTES)
        if line is None:
            return None
        message = self.session.opened(line)
        if message is None:
            raise wire.refusal(wire.parsed(line), self._job)
        return message

    def _say(self, message, until):
        if not self.send(message, max(until - time.monotonic(), 0.001)):
            raise TimeoutError("no answer") if time.monotonic() >= until else _hung_up()

    def _next_line(self, until, max_bytes):
        try:
            return self.read_until(until, max_bytes)
        except (OSError, ValueError):
            raise _hung_up() from None


def who_listens(address: tuple[str, int], job: str, timeout_seconds: float) -> str | None:
    """Returns the job whose acceptor listens at an address; None if there is none."""
    with contextlib.suppress(OSError):
        connected = socket.create_connection(address, timeout_seconds)
        with Call(connected, Secret(""), job) as call:
            try:
                call.greet(time.monotonic() + timeout_seconds)
            except wire.RefusedError as error:
                return error.job
            return job
    return None


def keep_alive(connected: socket.socket, idle_seconds: int) -> None:
    """Makes TCP probe a host after `idle_seconds` of silence, and give up after three probes.

    Data that stays unacknowledged for as long also ends the connection.
    """
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
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
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _hung_up():
    return wire.RefusedError(
        "it closed the connection (not a launcher, or a different version of tfparallel)"
    )
