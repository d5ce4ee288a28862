"""The workers of a job, connected by MPI.

A collective is a Python function in TensorFlow's graph (`tf.numpy_function`) that reads the tensors
in place and returns arrays that TensorFlow aliases. All collectives of a worker run in program
order, because each one reads and then writes the same variable.

16-bit numbers are summed in 32 bits and rounded once, not at every step as in TensorFlow's ring.

`join` makes the workers ranks of one MPI program, whatever launched them. Under `mpiexec` and
`srun`, MPI already knows its processes. Under `tfparallel launch`, TF_CONFIG or Kubernetes it does
not: worker 0 then serves the small part of the process-management interface that the MPI library
needs (`tfparallel.cluster.pmi`). The workers connect as if `mpiexec` had started them, at the same
speed, and stay under the control of our supervisor.
"""

import atexit
import contextlib
import functools
import os
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfparallel.cluster import pmi
from tfparallel.cluster.address import join_address
from tfparallel.cluster.environment import available_cores
from tfparallel.cluster.listener import is_loopback_here_only
from tfparallel.cluster.loopback import are_loopback
from tfparallel.cluster.wire import Secret, new_nonce
from tfparallel.collectives.chief_alone import check_all_take_part
from tfparallel.collectives.mpi import library
from tfparallel.collectives.mpi.communicator import Communicator
from tfparallel.collectives.mpi.waiting import Waiting
from tfparallel.collectives.packing import by_dtype
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.collectives.traffic import ROWS, SUMS
from tfparallel.flight.marks import around_python

_HALVES = (tf.float16, tf.bfloat16)
# Set by `mpiexec` and `srun`: PMI-1 and 2 (MPICH, Intel, Slurm), PMIx (Open MPI).
_STARTED_BY_MPI = ("PMI_RANK", "PMI_FD", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
# Network devices of UCX and libfabric, which listen on the network even if all traffic goes through
# shared memory.
_LOOPBACK_ONLY = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
_WHAT = "the start of MPI"  # Names the exchanges.
_CONNECT_SECONDS = 30.0
_END_SECONDS = 5.0


class MpiProcessGroup(ProcessGroup):
    """The workers of a job, connected by TensorFlow in `group` and by MPI in `communicator`."""

    def __init__(self, group: ProcessGroup, communicator: Communicator):
        vars(self).update({k: v for k, v in vars(group).items() if k != "for_users"})
        self._group = group
        self.communicator = communicator
        self.transport = communicator.algorithm

    @functools.cached_property
    def for_users(self) -> "MpiProcessGroup":
        """The same group: every call is compared, so user calls cannot pair with other calls."""
        return self

    @property
    def implementation(self) -> str:
        """Name of the implementation that computes the sums."""
        return self.communicator.implementation("all_reduce")

    @property
    def by_tensorflow(self) -> ProcessGroup:
        """The same workers, connected by TensorFlow's own collectives."""
        return self._group

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: str = "sum") -> list[tf.Tensor]:
        """Reduces each tensor over the workers. One collective for each dtype."""
        results: list = [None] * len(tensors)
        wide = [tf.cast(x, tf.float32) if x.dtype in _HALVES else x for x in tensors]
        for indices in by_dtype(wide).values():
            reduce = functools.partial(self._reduce, op)
            reduced = self._run(op, reduce, [wide[i] for i in indices])
            for i, y in zip(indices, reduced, strict=True):
                results[i] = tf.cast(tf.ensure_shape(y, tensors[i].shape), tensors[i].dtype)
        return results

    def reduce_scatter(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums each tensor over the workers; each receives its rows. See `ProcessGroup`."""
        wide = [tf.cast(x, tf.float32) if x.dtype in _HALVES else x for x in tensors]
        pairs = zip(super().reduce_scatter(wide), tensors, strict=True)
        return [tf.cast(y, x.dtype) for y, x in pairs]

    def all_reduce_halves(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums tensors of one 16-bit dtype over the workers, and sends them in 16 bits.

        MPI cannot sum such types. Each worker receives its part of all vectors, sums it in 32 bits,
        rounds once, and sends the result to the others.
        """
        flats = [tf.reshape(tensor, [-1]) for tensor in tensors]
        sizes = [flat.shape[0] for flat in flats]
        padding = -sum(sizes) % self.num_workers
        vector = tf.pad(tf.concat(flats, 0), [[0, padding]])
        (total,) = self._run("sum", self._reduce_halves, [vector])
        total = tf.ensure_shape(total, vector.shape)[: sum(sizes)]
        parts = zip(tf.split(total, sizes), tensors, strict=True)
        return [tf.reshape(part, tensor.shape) for part, tensor in parts]

    def all_to_all(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sends part k of W equal parts of axis 0 to worker k; returns the W that arrive."""
        (received,) = self._run("all_to_all", self._all_to_all, [tensor])
        return tf.ensure_shape(received, tensor.shape)

    def scatter(self, tensor: tf.Tensor, root: int) -> tf.Tensor:
        """Returns this worker's part of the root's tensor."""
        (part,) = self._run("scatter", functools.partial(self._scatter, root), [tensor])
        num_rows, *rest = tensor.shape
        num_rows = None if num_rows is None else num_rows // self.num_workers
        return tf.ensure_shape(part, [num_rows, *rest])

    def _scattered(self, flat: tf.Tensor) -> tf.Tensor:
        (shard,) = self._run("reduce_scatter", self._reduce_scatter, [flat])
        return shard

    def _collective(self, name: str, flat: tf.Tensor, kind: str = SUMS) -> tf.Tensor:
        if name != "all_gather":
            return self.all_reduce([flat], name)[0]
        (joined,) = self._run("all_gather", functools.partial(self._gather, kind), [flat])
        length = flat.shape[0]
        return tf.ensure_shape(joined, [None if length is None else length * self.num_workers])

    def run_on_arrays(self, name: str, tensor: tf.Tensor) -> tf.Tensor:
        """Runs a collective that only benchmarks use, such as "reduce_scatter"."""
        function = getattr(self.communicator, name)
        return self._run(name, lambda array: [function(array)], [tensor])[0]

    def _reduce(self, op: str, *arrays: np.ndarray) -> list[np.ndarray]:
        self.traffic.add(SUMS, sum(array.nbytes for array in arrays))
        return self.communicator.all_reduce(op, arrays)

    def _reduce_scatter(self, array: np.ndarray) -> list[np.ndarray]:
        self.traffic.add(SUMS, array.nbytes // 2)
        return [self.communicator.reduce_scatter(array)]

    def _all_to_all(self, array: np.ndarray) -> list[np.ndarray]:
        self.traffic.add(ROWS, array.nbytes)
        return [self.communicator.all_to_all(array)]

    def _scatter(self, root: int, array: np.ndarray) -> list[np.ndarray]:
        self.traffic.add(ROWS, array.nbytes if root == self.worker_index else 0)
        return [self.communicator.scatter(array, root)]

    def _reduce_halves(self, array: np.ndarray) -> list[np.ndarray]:
        self.traffic.add(SUMS, array.nbytes)  # Counted as one sum, despite its two steps.
        bits = self.communicator.all_to_all(array.view(np.uint16))
        terms = bits.view(array.dtype).reshape(self.num_workers, -1).astype(np.float32)
        total = terms.sum(0).astype(array.dtype)
        return [self.communicator.all_gather(total.view(np.uint16)).view(array.dtype)]

    def _gather(self, kind: str, array: np.ndarray) -> list[np.ndarray]:
        self.traffic.add(kind, array.nbytes)
        return [self.communicator.all_gather(array)]

    def _run(self, name, function, tensors) -> list[tf.Tensor]:
        check_all_take_part()

        def call(*arrays: Any) -> list[np.ndarray]:
            size = sum(array.size for array in arrays)
            try:
                with around_python(f"{name} {arrays[0].dtype}[{size}]"):
                    return function(*arrays)
            except Exception as error:
                ProcessGroup.failure = error  # TensorFlow preserves only its text.
                raise

        dtypes = [tensor.dtype for tensor in tensors]
        with tf.device("CPU:0"):
            if tf.executing_eagerly():
                try:
                    return tf.nest.flatten(tf.numpy_function(call, tensors, dtypes))
                except tf.errors.OpError as error:
                    if ProcessGroup.failure is None:
                        raise
                    raise ProcessGroup.failure from error
            # TensorFlow orders a read after the last write, and a write after the last read.
            ordering_token = self._ordering_tokens[self._host]
            before = ordering_token.read_value()
            with tf.control_dependencies([before]):
                results = tf.nest.flatten(tf.numpy_function(call, tensors, dtypes))
            with tf.control_dependencies(results):
                ordering_token.assign(before)
        return results


def subgroup(
    workers: MpiProcessGroup, group: ProcessGroup, members: Sequence[int]
) -> MpiProcessGroup | None:
    """Connects some workers by MPI; all workers call it, and None is what the others get.

    Args:
        workers: All workers.
        group: The members, connected by TensorFlow.
        members: Their indices.
    """
    communicator = workers.communicator.subgroup(members, group.timeout_seconds)
    if communicator is None:
        return None
    _forget_names()
    return MpiProcessGroup(group, communicator)


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
    num_processes = mpi.COMM_WORLD.Get_size()
    if num_processes != len(peers):
        _forget_names()
        version = " ".join(mpi.Get_library_version().split()[:3])
        raise RuntimeError(
            f"MPI connects {num_processes} processes, but the job has {len(peers)} workers. The "
            f"numbers must be equal. Received: worker {worker}, with {version}. Start all workers "
            "with one mpiexec or srun, of the MPI library that mpi4py uses; or with `tfparallel "
            "launch`, MPICH or Intel MPI, and no `import mpi4py.MPI` before."
        )
    watch = pmi.Watch(pmi.connect(address, token, worker, "watch", _CONNECT_SECONDS))
    watch.start()
    comm = mpi.COMM_WORLD.Split(0, key=worker)
    comm.Barrier()
    _forget_names()
    waiting = Waiting(lambda: watch.lost, group.timeout_seconds, has_core=_have_cores(peers))
    communicator = Communicator(mpi, comm, algorithm, waiting)
    atexit.register(communicator.part, _END_SECONDS)
    return MpiProcessGroup(group, communicator)


def _serve(host, memories, token):
    try:
        resolved = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        places = [(family, location) for family, _, _, _, location in resolved]
        if len(set(memories)) > 1 and is_loopback_here_only(host, places):
            host = "0.0.0.0"
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


def _forget_names() -> None:
    """Unlinks the files of MPICH's shared memory, which every worker has mapped by now.

    Otherwise a killed worker would leave them behind.
    """
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        for line in file:
            name = line.split()[-1]
            if name.startswith("/dev/shm/mpich_shm_"):
                with contextlib.suppress(OSError):
                    os.unlink(name)
