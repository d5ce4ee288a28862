"""Messages between the launchers of several hosts while their workers run.

    node 1 ──{failed: worker 5, ...}──> node 0 ──> nodes 2, 3, ...

The connections of the rendezvous (rendezvous.py) stay open: a star around node 0, which forwards
messages. The first failure ends the job on all hosts, with the same culprit; the job succeeds once
it has on every host. A launcher that is stopped announces it before it stops its workers. One that
is killed closes its connection; TCP's keep-alive detects a vanished host within half a minute.

Launchers authenticate when they join, and with each message (wire.py).
"""

import signal
import time
from collections.abc import Mapping

from tfparallel.cluster.connection import Connection
from tfparallel.cluster.worker_exit import Departure, WorkerExit

_MESSAGE_BYTES = 1 << 12


class ControlChannel:
    """The state of a job's other hosts. A context manager: leaving it closes the connections.

    Args:
        node: This host's index.
        num_nodes: The number of hosts.
        connections: The connections by node: on node 0 to all others, elsewhere to node 0.

    Attributes:
        failures: The failed workers of other hosts, each with the monotonic time at which this
            host learned of it.
        departure: The first launcher that left the running job, or None.
        lines: The connections, for a selector: each has `fileno` and `listen`, false at its end.
    """

    def __init__(
        self,
        node: int = 0,
        num_nodes: int = 1,
        connections: Mapping[int, Connection] | None = None,
    ):
        self._node = node
        self.failures: list[tuple[WorkerExit, float]] = []
        self.departure: Departure | None = None
        self._unfinished = set(range(num_nodes)) - {node}
        self.lines = [
            _Line(peer, connection, self._receive, self._lost)
            for peer, connection in (connections or {}).items()
        ]

    def __enter__(self) -> "ControlChannel":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is not None:
            interrupted = signal.SIGINT if isinstance(error, KeyboardInterrupt) else None
            signum = getattr(error, "signum", interrupted)
            self.tell_stop(signum)
        self.close()

    @property
    def is_bad(self) -> bool:
        """Whether the job has failed on another host."""
        return bool(self.failures) or self.departure is not None

    @property
    def all_succeeded(self) -> bool:
        """Whether every other host's workers have succeeded."""
        return not self._unfinished

    def tell_success(self) -> None:
        """Announces that all workers of this host have succeeded."""
        self._send({"succeeded": self._node})

    def tell_failure(
        self, worker: int, returncode: int, time_seconds: float, lost: int | None = None
    ) -> None:
        """Announces that a worker of this host has failed. Arguments as in `WorkerExit`."""
        failed = {"worker": worker, "returncode": returncode, "time_seconds": time_seconds}
        failed |= {} if lost is None else {"lost": lost}
        self._send({"failed": self._node, **failed})

    def tell_stop(self, signum: int | None) -> None:
        """Announces that this launcher leaves the job, because of a signal or an error."""
        self._send({"stopped": self._node, "signum": signum})

    def close(self) -> None:
        """Closes the connections; idempotent."""
        for line in self.lines:
            line.connection.close()

    def _send(self, message, source=None):
        for line in self.lines:
            if line is not source:  # A failed send ends the line; `listen` detects it.
                line.connection.send_now(message)

    def _receive(self, message, source):
        """Processes a message and forwards it; only node 0 has other lines."""
        self._send(message, source)
        match message:
            case {"succeeded": int(node)}:
                self._unfinished.discard(node)
            case {"failed": int(node), "worker": int(worker), "returncode": int(returncode),
                  "time_seconds": float(seconds)}:  # fmt: skip
                lost = message.get("lost") if isinstance(message.get("lost"), int) else None
                failure = WorkerExit(
                    worker, returncode, seconds, stopped=False, node=node, lost=lost
                )
                self.failures.append((failure, time.monotonic()))
            case {"stopped": int(node), "signum": int() | None as signum}:
                if self.departure is None and (signum is not None or not self.failures):
                    self.departure = Departure(node, signum)

    def _lost(self, line):
        """Handles the end of a line, which is expected after a success or a failure."""
        # A node that has succeeded may end; but node 0, which forwards messages, must end last.
        is_missed = line.peer in self._unfinished or (self._node != 0 and not self.all_succeeded)
        if is_missed and not self.is_bad:
            self._receive({"stopped": line.peer, "signum": None}, line)


class _Line:
    """The connection to another launcher, owned by the line."""

    def __init__(self, peer, connection, on_message, on_end):
        self.peer, self.connection = peer, connection
        self._on_message, self._on_end = on_message, on_end
        connection.keep_alive()

    def fileno(self):
        return self.connection.fileno()

    def listen(self):
        """Reads messages; False once the peer has hung up, or failed to authenticate."""
        try:
            while (line := self.connection.read(_MESSAGE_BYTES)) is not None:
                self._on_message(self.connection.opened(line), self)
        except (OSError, ValueError):
            self._on_end(self)
            return False
        return True
