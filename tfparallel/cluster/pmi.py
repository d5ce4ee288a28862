"""A PMI server, where the processes of an MPI job meet and learn that one has ended.

MPI's library asks a *process manager* for the job's processes and their addresses. `mpiexec` and
`srun` are such managers, which also start the processes. Here the supervisor starts them, and the
manager is reduced to key-value pairs and a barrier, in the text protocol PMI-1.

    worker 1: MPI_Init ──"cmd=put key=… value=…", "cmd=barrier_in"──> server, a thread of worker 0
    worker 1: Watch    ──a silent connection─────────────────────────>

A caller receives a nonce, and answers with a proof (wire.py) that it knows the job's secret. The
server limits the number of unauthenticated callers and their time.

When a worker's connection ends, the server notifies the others within milliseconds; every worker
detects the end of worker 0 directly.

References:
    Pavan Balaji et al., "PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale
    Systems", EuroMPI 2010. The protocol: MPICH's `src/pmi`, PMI-1 wire protocol.
"""

import contextlib
import dataclasses
import itertools
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence

from tfparallel.cluster.connection import keep_alive
from tfparallel.cluster.wire import MAX_BYTES, Lines, Secret, new_nonce

__all__ = ["Server", "Watch", "connect"]

_MAX_KEYS = 1024  # Of one worker; MPICH puts fewer than ten.
_MAX_STRANGERS = 64  # The maximum of unauthenticated callers,
_STRANGER_SECONDS = 5.0  # and how long each may stay.
_RETRY_SECONDS = 0.1
_WELCOME = "welcome"
_NO_WORKER = "the listener there is not worker 0 of this job"
_HOSTS_KEY = "PMI_process_mapping"
_IDLE_SECONDS = 5  # A host that does not answer for 20 s has vanished.


@dataclasses.dataclass
class _Peer:
    """One connection."""

    socket: socket.socket
    lines: Lines = dataclasses.field(default_factory=Lines)
    worker: int | None = None  # Set once it has authenticated.
    role: str = ""
    num_keys: int = 0
    nonce: str = dataclasses.field(default_factory=new_nonce)
    since: float = dataclasses.field(default_factory=time.monotonic)


class Server(threading.Thread):
    """Serves the workers of one job until the process ends, or `close`.

    Args:
        host: The local address to listen on.
        hosts: The host name of each worker; workers with the same name share memory.
        token: The job's secret, which every connection must prove to know.
    """

    def __init__(self, host: str, hosts: Sequence[str], token: str):
        super().__init__(name="tfparallel-pmi", daemon=True)
        self._hosts = list(hosts)
        self._secret = Secret(token)
        # MPI's library names its shared memory after the job: names must be unique.
        self._job = f"tfparallel_{secrets.token_hex(8)}"
        self._values = {_HOSTS_KEY: process_mapping(hosts)}
        self._waiting: dict[int, _Peer] = {}
        self._peers: dict[socket.socket, _Peer] = {}
        self._lost: list[int] = []
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = self._listener.getsockname()[1]
        self._woken, self._wake = socket.socketpair()

    def run(self) -> None:
        """Answers requests until `close`."""
        with selectors.DefaultSelector() as self._selector:
            for server_socket in (self._listener, self._woken):
                self._selector.register(server_socket, selectors.EVENT_READ)
            while True:
                for key, _ in self._selector.select(self._hang_up_on_strangers()):
                    if key.fileobj is self._woken:
                        self._end()
                        return
                    if key.fileobj is self._listener:
                        self._welcome()
                    elif key.fileobj in self._peers:
                        self._listen_to(self._peers[key.fileobj])

    def close(self) -> None:
        """Ends the thread and all connections."""
        self._wake.send(b"!")
        self.join()

    def _end(self):
        for each in (self._listener, self._woken, self._wake, *self._peers):
            each.close()

    def _welcome(self):
        with contextlib.suppress(OSError):
            connected, _ = self._listener.accept()
            keep_alive(connected, _IDLE_SECONDS)
            peer = self._peers[connected] = _Peer(connected)
            self._selector.register(connected, selectors.EVENT_READ)
            _say(peer, json.dumps({"nonce": peer.nonce}))

    def _hang_up_on_strangers(self):
        """Drops excess and overdue callers; returns in how many seconds to look again, or None."""
        strangers = [peer for peer in self._peers.values() if peer.worker is None]
        cutoff = time.monotonic() - _STRANGER_SECONDS
        for index, peer in enumerate(strangers):  # In order of arrival.
            if index < len(strangers) - _MAX_STRANGERS or peer.since < cutoff:
                self._part_from(peer)
            else:
                return max(0.0, peer.since - cutoff)
        return None

    def _listen_to(self, peer):
        try:
            heard = peer.socket.recv(MAX_BYTES)
            if not heard:
                raise ConnectionResetError
            peer.lines.feed(heard)
            while (line := peer.lines.next()) is not None:
                if peer.worker is None:
                    self._admit(peer, line)
                elif peer.role == "pmi":
                    self._answer(peer, line.decode())
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self._part_from(peer)

    def _admit(self, peer, line):
        hello = json.loads(line)
        worker, role = hello["worker"], hello["role"]
        if not self._secret.is_proof(hello["proof"], peer.nonce, worker, role):
            raise ConnectionResetError
        if type(worker) is not int or not 0 <= worker < len(self._hosts):
            raise ConnectionResetError
        peer.worker, peer.role = worker, role
        _say(peer, _WELCOME)
        if peer.role == "watch":
            for lost in self._lost:
                _say(peer, f"lost {lost}")

    def _part_from(self, peer):
        self._selector.unregister(peer.socket)
        del self._peers[peer.socket]
        peer.socket.close()
        if peer.role == "watch":
            self._lost.append(peer.worker)
            for other in self._peers.values():
                if other.role == "watch":
                    _say(other, f"lost {peer.worker}")

    def _answer(self, peer, line):
        request = dict(part.split("=", 1) for part in line.split(" ") if "=" in part)
        command = request["cmd"]
        if command == "put":
            peer.num_keys += 1
            if peer.num_keys > _MAX_KEYS:
                raise ConnectionResetError
            self._values[request["key"]] = request["value"]
        if command == "get":
            value = self._values.get(request["key"])
            result = "rc=-1 msg=key_not_found" if value is None else f"rc=0 msg=found value={value}"
            _say(peer, f"cmd=get_result {result}")
        elif command == "barrier_in":
            self._waiting[peer.worker] = peer
            if len(self._waiting) == len(self._hosts):
                waited, self._waiting = self._waiting, {}
                for each in waited.values():
                    _say(each, "cmd=barrier_out rc=0")
        else:
            answers = {
                "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
                "get_maxes": "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024",
                "get_appnum": "cmd=appnum rc=0 appnum=0",
                "get_my_kvsname": f"cmd=my_kvsname rc=0 kvsname={self._job}",
                "get_universe_size": f"cmd=universe_size rc=0 size={len(self._hosts)}",
                "put": "cmd=put_result rc=0 msg=success",
                "finalize": "cmd=finalize_ack rc=0",
            }
            _say(peer, answers.get(command, f"cmd={command} rc=-1 msg=unknown_command"))


class Watch(threading.Thread):
    """Reports the first worker of the job to end. Its connection has the role "watch"."""

    def __init__(self, connected: socket.socket):
        super().__init__(name="tfparallel-watch", daemon=True)
        self._socket = connected
        self.lost: int | None = None  # The first worker that ended; read by other threads.

    def run(self) -> None:
        """Listens until a worker ends."""
        heard = b""
        with contextlib.suppress(OSError), self._socket:
            while b"\n" not in heard:
                more = self._socket.recv(4096)
                if not more:
                    break
                heard += more
        line = heard.partition(b"\n")[0].split()
        self.lost = int(line[1]) if line else 0


def connect(
    address: tuple[str, int], token: str, worker: int, role: str, timeout_seconds: float
) -> socket.socket:
    """Connects a worker to the server: as "pmi" for MPI's library, or as "watch" for a `Watch`.

    Raises:
        OSError: If there is no server of this job within the time limit.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return _connected(address, Secret(token), worker, role, deadline)
        except ConnectionError:  # The server dropped this caller among many strangers.
            if time.monotonic() + _RETRY_SECONDS > deadline:
                raise
        time.sleep(_RETRY_SECONDS)


def _connected(address, secret, worker, role, deadline):
    with contextlib.ExitStack() as unless_admitted:
        connected = socket.create_connection(address, max(deadline - time.monotonic(), 0.001))
        unless_admitted.callback(connected.close)
        try:
            nonce = json.loads(_line(connected, deadline))["nonce"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise OSError(_NO_WORKER) from None
        hello = {"worker": worker, "role": role, "proof": secret.proof(nonce, worker, role)}
        connected.sendall(json.dumps(hello).encode() + b"\n")
        if _line(connected, deadline) != _WELCOME:
            raise OSError(_NO_WORKER)
        connected.settimeout(None)
        keep_alive(connected, _IDLE_SECONDS)
        unless_admitted.pop_all()
        return connected


def _line(connected, deadline):
    """Reads one line and nothing after it, which is for another reader."""
    line = b""
    while not line.endswith(b"\n"):
        connected.settimeout(max(deadline - time.monotonic(), 0.001))
        byte = connected.recv(1)
        if not byte:
            raise ConnectionResetError("the other side closed the connection")
        line += byte
        if len(line) > MAX_BYTES:
            raise OSError(_NO_WORKER)
    return line.decode(errors="replace").rstrip("\n")


def process_mapping(hosts: Sequence[str]) -> str:
    """Returns the placement of workers on hosts, in MPI's notation.

    `(vector,(0,1,2),(1,1,1))`: from host 0 on, 1 host with 2 workers; from host 1 on, 1 with 1.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(hosts))}
    runs = itertools.groupby(numbers[name] for name in hosts)
    blocks = ",".join(f"({number},1,{len(list(workers))})" for number, workers in runs)
    return f"(vector,{blocks})"


def _say(peer, line):
    # Lines are short and few: they fit the socket's buffer. Reading detects a lost peer.
    with contextlib.suppress(OSError):
        peer.socket.sendall(line.encode() + b"\n")
