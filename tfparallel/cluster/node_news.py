"""What the launchers of several hosts tell each other while their workers run.

    node 1 ──{failed: worker 5, ...}──> node 0 ──> nodes 2, 3, ...

The connections over which they met (nodes.py) stay open: a star, whose middle
is node 0, which hands on what it hears. A job ends everywhere with the first
failure, with the same culprit; it has succeeded once it has on every host. A
launcher that is stopped says so. One that is killed closes its connection; a
host that vanishes is found out by TCP's keep-alive within half a minute.

Each message is one line of JSON of bounded size. Who speaks has proved that it
belongs to the job when it came.
"""

import contextlib
import json
import signal
import socket
import time
from collections.abc import Mapping, Sequence

from tfparallel.cluster.worker_exit import Departure, WorkerExit

__all__ = ["NodeNews"]

_MESSAGE_BYTES = 1 << 12
# To hand a message to the kernel: a launcher that does not listen holds nobody up.
_SEND_SECONDS = 2.0
# A silent host is asked after 10 s, and given up after three answers that do not come.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_UNACKNOWLEDGED_MILLISECONDS = 25_000


class NodeNews:
    """How the other hosts of a job fare. A context manager: leaving it hangs up.

    Args:
        node: This host's index.
        num_nodes: How many hosts the job has.
        connections: For each neighbour its connection: of node 0 all others, of the others node 0.

    Attributes:
        failures: The failed workers of other hosts, each with the time at which it became
            known, by the monotonic clock.
        departure: The first launcher that left a job which had not ended, or None.
    """

    def __init__(
        self,
        node: int = 0,
        num_nodes: int = 1,
        connections: Mapping[int, socket.socket] | None = None,
    ):
        self.failures: list[tuple[WorkerExit, float]] = []
        self.departure: Departure | None = None
        self._node = node
        self._unfinished = set(range(num_nodes)) - {node}
        self._lines = [
            _Line(peer, connection, self._hear, self._lost)
            for peer, connection in (connections or {}).items()
        ]

    def __enter__(self) -> "NodeNews":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is not None:
            interrupted = signal.SIGINT if isinstance(error, KeyboardInterrupt) else None
            self._tell(_departure(self._node, getattr(error, "signum", interrupted)))
        self.close()

    @property
    def lines(self) -> Sequence["_Line"]:
        """The connections, for a selector: each has `fileno`, and `listen`, false at its end."""
        return tuple(self._lines)

    @property
    def is_bad(self) -> bool:
        """Whether the job has failed somewhere else."""
        return bool(self.failures) or self.departure is not None

    @property
    def all_succeeded(self) -> bool:
        """Whether every other host's workers have succeeded."""
        return not self._unfinished

    def tell_success(self) -> None:
        """Says that this host's workers have all succeeded."""
        self._tell({"succeeded": self._node})

    def tell_failure(self, worker: int, returncode: int, time_seconds: float) -> None:
        """Says that a worker of this host has failed.

        Args:
            worker: As in `WorkerExit`, like the others.
            returncode: How it ended.
            time_seconds: When.
        """
        failed = {"worker": worker, "returncode": returncode, "time_seconds": time_seconds}
        self._tell({"failed": self._node, **failed})

    def close(self) -> None:
        """Hangs up; a second time does nothing."""
        for line in self._lines:
            line.close()

    def _tell(self, message, source=None):
        for line in self._lines:
            if line is not source:
                line.send(message)

    def _hear(self, message, source):
        """Takes a message in, and hands it on: only node 0 has somebody else to tell."""
        self._tell(message, source)
        match message:
            case {"succeeded": int(node)}:
                self._unfinished.discard(node)
            case {"failed": int(node), "worker": int(worker), "returncode": int(returncode),
                  "time_seconds": float(seconds)}:  # fmt: skip
                failure = WorkerExit(worker, returncode, seconds, stopped=False, node=node)
                self.failures.append((failure, time.monotonic()))
            case {"stopped": int(node), "signum": int() | None as signum}:
                if not self.failures and self.departure is None:
                    self.departure = Departure(node, signum)

    def _lost(self, line):
        """A line has ended: after a success or a failure that is how it should be."""
        if line.peer in self._unfinished and not self.is_bad:
            self._hear(_departure(line.peer, None), line)


class _Line:
    """The connection to one other launcher, which the line owns."""

    def __init__(self, peer, connection, on_message, on_end):
        self.peer = peer
        self._on_message = on_message
        self._on_end = on_end
        self._socket = connection
        self._received = bytearray()
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Without an option of this name the system's own patience holds, two hours by default.
        for name, value in (
            *_KEEP_ALIVE.items(),
            ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MILLISECONDS),
        ):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self):
        return self._socket.fileno()

    def listen(self):
        """Takes in what the other says; False once it has hung up."""
        try:
            chunk = self._socket.recv(_MESSAGE_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            chunk = b""
        *whole, self._received = (self._received + chunk).split(b"\n")
        for text in whole:
            with contextlib.suppress(ValueError, RecursionError):
                self._on_message(json.loads(text), self)
        if chunk and len(self._received) <= _MESSAGE_BYTES:
            return True
        self._on_end(self)
        return False

    def send(self, message):
        """Sends a message; who has hung up is found out by `listen`."""
        with contextlib.suppress(OSError):
            self._socket.settimeout(_SEND_SECONDS)
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            finally:
                self._socket.setblocking(False)

    def close(self):
        self._socket.close()


def _departure(node, signum):
    return {"stopped": node, "signum": signum}
