"""Messages between the launchers of several hosts while their workers run.

    node 1 ──{failed: worker 5, ...}──> node 0 ──> nodes 2, 3, ...

The connections of the rendezvous (rendezvous.py) stay open: a star around node 0, which forwards
messages. The first failure ends the job on all hosts, with the same culprit; the job succeeds once
it has on every host. A launcher that is stopped announces it. One that is killed closes its
connection; TCP's keep-alive detects a vanished host within half a minute. In an elastic job
(elastic.py), node 0 also announces a joining host.

Launchers authenticate when they join, and with each message (wire.py).
"""

import signal
import time
from collections.abc import Mapping, Sequence

from tfparallel.cluster.channel import Channel
from tfparallel.cluster.worker_exit import Departure, WorkerExit

__all__ = ["ControlChannel"]

_MESSAGE_BYTES = 1 << 12


class ControlChannel:
    """The state of a job's other hosts. A context manager: leaving it closes the connections.

    Args:
        node: This host's index.
        num_nodes: The number of hosts.
        connections: The connections by node: on node 0 to all others, elsewhere to node 0.
        newcomers: A further line on node 0, which listens for joining hosts.

    Attributes:
        node, num_nodes: The arguments.
        failures: The failed workers of other hosts, each with the monotonic time at which this
            host learned of it.
        departure: The first launcher that left the running job, or None.
        has_newcomer: Whether a host wants to join the job.
        gone: The nodes whose launchers have left, or whose connection has ended.
        silent: The nodes in `gone` that gave no sign of it.
        leaving: The nodes whose launchers will not return if the culprit is one of their workers.
        leaves_on_failure: Whether this is such a node; set by the caller.
    """

    def __init__(
        self,
        node: int = 0,
        num_nodes: int = 1,
        connections: Mapping[int, Channel] | None = None,
        newcomers: "_Line | None" = None,
    ):
        self.node, self.num_nodes = node, num_nodes
        self.failures: list[tuple[WorkerExit, float]] = []
        self.departure: Departure | None = None
        self.has_newcomer = False
        self.gone: set[int] = set()
        self.silent: set[int] = set()
        self.leaving: set[int] = set()
        self.leaves_on_failure = False
        self._coming_again: set[int] = set()
        self._unfinished = set(range(num_nodes)) - {node}
        self._lines = [
            _Line(peer, connection, self._receive, self._lost)
            for peer, connection in (connections or {}).items()
        ]
        self._newcomers = () if newcomers is None else (newcomers,)

    def __enter__(self) -> "ControlChannel":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is not None:
            interrupted = signal.SIGINT if isinstance(error, KeyboardInterrupt) else None
            signum = getattr(error, "signum", interrupted)
            self._send({"stopped": self.node, "signum": signum})
        self.close()

    @property
    def lines(self) -> Sequence["_Line"]:
        """The connections, for a selector: each has `fileno` and `listen`, false at its end."""
        return (*self._lines, *self._newcomers)

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
        self._send({"succeeded": self.node})

    def tell_failure(
        self, worker: int, returncode: int, time_seconds: float, lost: int | None = None
    ) -> None:
        """Announces that a worker of this host has failed. Arguments as in `WorkerExit`."""
        failed = {"worker": worker, "returncode": returncode, "time_seconds": time_seconds}
        failed |= {} if lost is None else {"lost": lost}
        self._send({"failed": self.node, **failed, "leaves": self.leaves_on_failure})

    def look(self) -> float | None:
        """Checks whether a waiting host may join; returns in how many seconds to look again."""
        waits = (newcomers.look() for newcomers in self._newcomers)
        return next((seconds for seconds in waits if seconds is not None), None)

    def tell_newcomer(self) -> None:
        """Announces that a host wants to join."""
        self.has_newcomer = True
        self._send({"newcomer": True})

    def tell_coming_again(self) -> None:
        """Announces that this launcher will reconnect for the next round."""
        self._send({"coming_again": self.node})

    def close(self) -> None:
        """Closes the connections; idempotent."""
        for line in self._lines:
            line.channel.close()

    def _send(self, message, source=None):
        for line in self._lines:
            if line is not source:  # A failed send ends the line; `listen` detects it.
                line.channel.send(message)

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
                if message.get("leaves") is True:
                    self.leaving.add(node)
            case {"newcomer": True}:
                self.has_newcomer = True
            case {"coming_again": int(node)}:
                self._coming_again.add(node)
            case {"stopped": int(node), "signum": int() | None as signum}:
                self.gone.add(node)
                if message.get("silent") is True:
                    self.silent.add(node)
                if not self.failures and self.departure is None:
                    self.departure = Departure(node, signum)

    def _lost(self, line):
        """Handles the end of a line, which is expected after a success or a failure."""
        if line.peer in self._coming_again:
            return
        self.gone.add(line.peer)
        if line.channel.is_silent:
            self.silent.add(line.peer)
        # A node that has succeeded may end; but node 0, which forwards messages, must end last.
        is_missed = line.peer in self._unfinished or (self.node != 0 and not self.all_succeeded)
        if is_missed and not self.is_bad:
            silent = {"silent": True} if line.channel.is_silent else {}
            self._receive({"stopped": line.peer, "signum": None} | silent, line)


class _Line:
    """The connection to another launcher, owned by the line."""

    def __init__(self, peer, channel, on_message, on_end):
        self.peer, self.channel = peer, channel
        self._on_message, self._on_end = on_message, on_end
        channel.keep_alive()

    def fileno(self):
        return self.channel.fileno()

    def listen(self):
        """Reads messages; False once the peer has hung up, or failed to authenticate."""
        try:
            while (text := self.channel.read(_MESSAGE_BYTES)) is not None:
                message = self.channel.session.opened(text)
                if message is None:
                    raise ValueError("A message without its proof.")
                self._on_message(message, self)
        except (OSError, ValueError):
            self._on_end(self)
            return False
        return True
