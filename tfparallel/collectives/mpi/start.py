"""Makes the workers of a job ranks of one MPI program, whatever launched them.

Under `mpiexec` and `srun`, MPI already knows its processes. Under `tfparallel launch`, TF_CONFIG or
Kubernetes it does not: worker 0 then serves the small part of the process-management interface that
the MPI library needs (`tfparallel.cluster.pmi`). The workers connect as if `mpiexec` had started
them, at the same speed, and stay under the control of our supervisor.
"""

import atexit
import contextlib
import os
import socket
from typing import Any

from tfparallel.cluster import pmi
from tfparallel.cluster.address import join_address
from tfparallel.cluster.environment import available_cores
from tfparallel.cluster.loopback import are_loopback
from tfparallel.cluster.wire import Secret, new_nonce
from tfparallel.collectives.mpi import library
from tfparallel.collectives.mpi.communicator import Communicator
from tfparallel.collectives.mpi.waiting import Waiting
from tfparallel.collectives.mpi.workers import MpiProcessGroup
from tfparallel.collectives.process_group import ProcessGroup

# Set by `mpiexec` and `srun`: PMI-1 and 2 (MPICH, Intel, Slurm), PMIx (Open MPI).
_STARTED_BY_MPI = ("PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
# Network devices of UCX and libfabric, which listen on the network even if all traffic goes through
# shared memory.
_LOOPBACK_ONLY = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
_WHAT = "the start of MPI"  # Names the exchanges.
_CONNECT_SECONDS = 30.0
_END_SECONDS = 5.0


def offers(group: ProcessGroup, what: str) -> list[dict[str, Any]]:
    """Returns each worker's MPI capabilities, in worker order. Does not start MPI.

    "missing" is what the worker lacks, or None; "starts" whether its library can be started from
    here; "started" whether MPI's own launcher started it; "memory" identifies the memory that it
    shares; "cores" are the cores available to it. `what` names the exchange.
    """
    missing = library.missing()
    started = any(name in os.environ for name in _STARTED_BY_MPI)
    offer = {
        "missing": missing,
        "starts": missing is None and (started or library.speaks_pmi()),
        "started": started,
        "memory": _memory_name(),
        "cores": available_cores(),
    }
    return group.exchange(offer, what)


def join(group: ProcessGroup, algorithm: str) -> MpiProcessGroup:
    """Connects the workers of a TensorFlow group by MPI; see `Communicator` for `algorithm`.

    Raises:
        RuntimeError: If mpi4py or MPI's library is missing on a worker, or MPI did not start all
            workers.
        ValueError: If the algorithm cannot run here.
    """
    worker, host = group.worker_index, group.first_host
    server, nonce = None, new_nonce()
    peers = offers(group, _WHAT)
    missing = [other["missing"] for other in peers]
    lacking = [f"worker {k}: {problem}" for k, problem in enumerate(missing) if problem]
    if lacking:
        raise RuntimeError(
            "All-reduce through MPI needs mpi4py and an MPI library on every worker. Received: "
            f"{'; '.join(lacking)}. Install them: {library.PIP}"
        )
    secret = Secret(os.environ.get("TFPARALLEL_JOB_TOKEN", ""))
    if worker == 0:
        token = secret.derived(nonce)
        server = _serve(host, [other["memory"] for other in peers], token)
    endpoint = {"port": server.port, "nonce": nonce} if server else None
    place = group.exchange(endpoint, _WHAT)[0]
    address, token = (host, place["port"]), secret.derived(place["nonce"])
    if not any(other["started"] for other in peers):
        mpi = _load_by(address, token, worker, len(peers))
    else:
        mpi = library.load()
        if mpi.COMM_WORLD.Get_size() != len(peers):
            raise RuntimeError(
                f"MPI started {mpi.COMM_WORLD.Get_size()} processes, but the job has {len(peers)} "
                f"workers. The numbers must be equal. Received: worker {worker}. Start all workers "
                "with one mpiexec or srun, of the MPI library that mpi4py uses, or with "
                "`tfparallel launch`."
            )
    watch = pmi.Watch(pmi.connect(address, token, worker, "watch", _CONNECT_SECONDS))
    watch.start()
    comm = mpi.COMM_WORLD.Split(0, key=worker)
    comm.Barrier()
    _forget_names(mpi)
    waiting = Waiting(lambda: watch.lost, group.timeout_seconds, has_core=_have_cores(peers))
    communicator = Communicator(mpi, comm, algorithm, waiting)
    atexit.register(communicator.part, _END_SECONDS)
    return MpiProcessGroup(group, communicator)


def _serve(host, memories, token):
    try:
        server = pmi.Server(host, memories, token)
    except OSError:  # The name or address is not one of this host's own.
        server = pmi.Server("0.0.0.0", memories, token)
    server.start()
    return server


def _load_by(address, token, worker, num_workers):
    """Starts MPI, with our own server as its process manager."""
    connected = pmi.connect(address, token, worker, "pmi", _CONNECT_SECONDS)
    settings = {
        "PMI_FD": str(connected.detach()),
        "PMI_RANK": str(worker),
        "PMI_SIZE": str(num_workers),
    }
    if are_loopback([join_address(*address)]):
        settings = {k: v for k, v in _LOOPBACK_ONLY.items() if k not in os.environ} | settings
    os.environ.update(settings)
    try:
        return library.load()
    finally:
        # Otherwise child processes would mistake themselves for this rank.
        for name in settings:
            del os.environ[name]


def _have_cores(peers) -> bool:
    """Whether every host has at least one available core per worker."""
    by_host: dict[str, list] = {}
    for other in peers:
        by_host.setdefault(other["memory"], []).append(other["cores"])
    return all(len(set().union(*cores)) >= len(cores) for cores in by_host.values())


def _memory_name() -> str:
    """Identifies the shared memory of this process: that of the host, or of its container."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        status = os.stat("/dev/shm")
        parts += [str(status.st_dev), str(status.st_ino)]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        parts.append(file.read().strip())
    return "/".join(parts)


def _forget_names(mpi) -> None:
    """Unlinks the files of MPICH's shared memory, which every worker has mapped by now.

    Otherwise a killed worker would leave them behind.
    """
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        for line in file:
            name = line.split()[-1]
            if name.startswith("/dev/shm/mpich_shm_"):
                with contextlib.suppress(OSError):
                    os.unlink(name)
