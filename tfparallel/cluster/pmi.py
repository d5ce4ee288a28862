"""A PMI server, where the processes of an MPI job meet and learn that one has ended.

MPI's library asks a *process manager* for the job's processes and their addresses. `mpiexec` and
`srun` are such managers, which also start the processes. Here the supervisor starts them, and the
manager is reduced to key-value pairs and a barrier, in the text protocol PMI-1.

    worker 1: MPI_Init ──"cmd=put key=… value=…", "cmd=barrier_in"──> server, a thread of worker 0
    worker 1: Watch    ──a silent connection─────────────────────────>

A caller authenticates as in a rendezvous (wire.py, acceptor.py), and says which worker it is. The
lines after that are those of PMI, or none.

When a worker's connection ends, the server notifies the others within milliseconds; every worker
detects the end of worker 0 directly.

References:
    Pavan Balaji et al., "PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale
    Systems", EuroMPI 2010. The protocol: MPICH's `src/pmi`, PMI-1 wire protocol.
"""

import asyncio
import concurrent.futures
import contextlib
import itertools
import secrets
import socket
import threading
from collections.abc import Sequence

from tfparallel.cluster import connection
from tfparallel.cluster.acceptor import RETRY_SECONDS, Acceptor
from tfparallel.cluster.address import join_address
from tfparallel.cluster.wire import RefusedError, Secret

_JOB = "tfparallel-mpi-1"  # With the version of this protocol.
_MAX_KEYS = 1024  # Of one worker; MPICH puts fewer than ten.
_NO_WORKER = "the listener there is not worker 0 of this job"
_HOSTS_KEY = "PMI_process_mapping"
_IDLE_SECONDS = 5  # A host that does not answer for 20 s has vanished.


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
        self._waiting: dict[int, connection.Connection] = {}
        self._watches: set[connection.Connection] = set()
        self._lost: list[int] = []
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family)
        self.port = self._listening.getsockname()[1]
        self._begun = concurrent.futures.Future()

    def run(self) -> None:
        """Answers requests until `close`."""
        try:
            with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if not self._begun.done():  # The event loop could not be created.
                self._begun.set_exception(error)
            raise

    def close(self) -> None:
        """Ends the thread and all connections; `OSError` if the thread could not begin."""
        loop, closing = self._begun.result()
        loop.call_soon_threadsafe(closing.set)
        self.join()

    async def _serve(self):
        closing = asyncio.Event()
        self.acceptor = Acceptor(
            self._listening, self._secret, _JOB, self._admit, lambda *_: None, 2 * len(self._hosts)
        )
        async with self.acceptor:
            self._begun.set_result((asyncio.get_running_loop(), closing))
            await closing.wait()

    async def _admit(self, peer, hello):
        worker, role = hello.get("worker"), hello.get("role")
        if type(worker) is not int or not 0 <= worker < len(self._hosts):
            return
        peer.keep_alive(_IDLE_SECONDS)
        await peer.send({"welcome": worker})
        await (self._watch(peer, worker) if role == "watch" else self._answer_all(peer, worker))

    async def _watch(self, peer, worker):
        """Waits until a worker's connection ends, and tells the others."""
        for lost in self._lost:
            await _say(peer, f"lost {lost}")
        self._watches.add(peer)
        with contextlib.suppress(OSError, ValueError):
            while True:
                await peer.receive_line()
        self._watches.discard(peer)
        self._lost.append(worker)
        for other in list(self._watches):
            await _say(other, f"lost {worker}")

    async def _answer_all(self, peer, worker):
        num_keys = 0
        while True:
            line = (await peer.receive_line()).decode()
            request = dict(part.split("=", 1) for part in line.split(" ") if "=" in part)
            match request:
                case {"cmd": "barrier_in"}:
                    self._waiting[worker] = peer
                    if len(self._waiting) == len(self._hosts):
                        waited, self._waiting = self._waiting, {}
                        for each in waited.values():
                            await _say(each, "cmd=barrier_out rc=0")
                case {"cmd": "put", "key": key, "value": value} if num_keys < _MAX_KEYS:
                    num_keys += 1
                    self._values[key] = value
                    await _say(peer, "cmd=put_result rc=0 msg=success")
                case {"cmd": "get", "key": key}:
                    result = "rc=-1 msg=key_not_found"
                    if key in self._values:
                        result = f"rc=0 msg=found value={self._values[key]}"
                    await _say(peer, f"cmd=get_result {result}")
                case {"cmd": command} if command not in ("put", "get"):
                    await _say(peer, self._answer(command))
                case _:
                    return

    def _answer(self, command):
        answers = {
            "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
            "get_maxes": "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024",
            "get_appnum": "cmd=appnum rc=0 appnum=0",
            "get_my_kvsname": f"cmd=my_kvsname rc=0 kvsname={self._job}",
            "get_universe_size": f"cmd=universe_size rc=0 size={len(self._hosts)}",
            "finalize": "cmd=finalize_ack rc=0",
        }
        return answers.get(command, f"cmd={command} rc=-1 msg=unknown_command")


class Watch(threading.Thread):
    """Reports which workers of the job have ended. Its connection has the role "watch"."""

    def __init__(self, connected: socket.socket):
        super().__init__(name="tfparallel-watch", daemon=True)
        self._socket = connected
        self.lost: tuple[int, ...] = ()  # In the order of their ends; read by other threads.

    def run(self) -> None:
        """Listens until worker 0 ends."""
        with contextlib.suppress(OSError), self._socket, self._socket.makefile("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):
                    self.lost += (int(line.split()[1]),)
        self.lost += (0,)


def connect(
    address: tuple[str, int], token: str, worker: int, role: str, timeout_seconds: float
) -> socket.socket:
    """Connects a worker to the server: as "pmi" for MPI's library, or as "watch" for a `Watch`.

    Raises:
        OSError: If there is no server of this job within the time limit.
    """
    hello = {"worker": worker, "role": role}
    return connection.run(_connected(join_address(*address), token, hello, timeout_seconds))


async def _connected(address, token, hello, timeout_seconds):
    trouble = TimeoutError("no answer")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_seconds):
            while True:
                try:
                    with contextlib.ExitStack() as unless_admitted:
                        peer = unless_admitted.enter_context(await connection.connect(address))
                        await peer.introduce(Secret(token), _JOB)
                        await peer.send(hello)
                        await peer.receive()
                        unless_admitted.pop_all()
                        peer.keep_alive(_IDLE_SECONDS)
                        return peer.detach()
                except (RefusedError, ValueError):
                    raise RefusedError(_NO_WORKER) from None
                except ConnectionError as error:  # Dropped among many strangers: try again.
                    trouble = error
                await asyncio.sleep(RETRY_SECONDS)
    raise trouble


def process_mapping(hosts: Sequence[str]) -> str:
    """Returns the placement of workers on hosts, in MPI's notation.

    `(vector,(0,1,2),(1,1,1))`: from host 0 on, 1 host with 2 workers; from host 1 on, 1 with 1.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(hosts))}
    runs = itertools.groupby(numbers[name] for name in hosts)
    blocks = ",".join(f"({number},1,{len(list(workers))})" for number, workers in runs)
    return f"(vector,{blocks})"


async def _say(peer, line):
    # Lines are short and few: they fit the socket's buffer. Reading detects a lost peer.
    with contextlib.suppress(OSError):
        await peer.send_line(line.encode() + b"\n")
