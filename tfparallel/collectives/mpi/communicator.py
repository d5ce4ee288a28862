"""Collectives of NumPy arrays over MPI, with consistency checks and deadlines.

Before a collective, the workers compare digests of the call: its number, name, shapes and dtypes.
On a mismatch all of them raise an error that shows each worker's call; none is left waiting. On one
host that is free, as the digest travels with the first barrier; between hosts it is one more
exchange of 8 bytes.

| algorithm | implementation |
| --- | --- |
| `mpi` | `mpi_shared_memory` if all workers share memory, else `mpi_library` |
| `mpi_shared_memory` | `shared_memory.py` |
| `mpi_library` and the others in `library.py` | MPI_Iallreduce, polled for completion |
"""

import contextlib
import functools
import hashlib
import math
import threading
import types
from collections.abc import Sequence

import numpy as np

from tfparallel.cluster.differences import who_said
from tfparallel.collectives.lost_worker import WorkerLostError
from tfparallel.collectives.mpi import library
from tfparallel.collectives.mpi.buffers import KeptBuffers, layout
from tfparallel.collectives.mpi.shared_memory import SMALL_BYTES, SharedMemory
from tfparallel.collectives.mpi.waiting import Waiting

ALGORITHMS = ("mpi", "mpi_shared_memory", *library.MPICH_ALGORITHMS)
_NOTE_BYTES = 2048
_FUNCTIONS = {
    "all_reduce": "MPI_Iallreduce",
    "all_gather": "MPI_Iallgather",
    "reduce_scatter": "MPI_Ireduce_scatter_block",
    "broadcast": "MPI_Ibcast",
    "all_to_all": "MPI_Ialltoall",
    "scatter": "MPI_Iscatter",
    "send_recv": "MPI_Isend",
}
_OPS = {"sum": "SUM", "max": "MAX", "min": "MIN"}


class Communicator:
    """Collectives between the workers of a job, with the buffers of this worker.

    Every worker must make the same calls in the same order.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: A communicator whose ranks are the worker indices.
        algorithm: The algorithm for sums, one of `ALGORITHMS`.
        waiting: How to wait for the other workers.
        workers: The index of each rank in the job; by default the ranks themselves.

    Raises:
        ValueError: If the algorithm cannot run here.
    """

    def __init__(
        self,
        mpi: types.ModuleType,
        comm,
        algorithm: str,
        waiting: Waiting,
        workers: Sequence[int] | None = None,
    ):
        self._mpi, self._comm = mpi, comm
        self._waiting = waiting
        self.num_ranks = comm.Get_size()
        self._workers = range(self.num_ranks) if workers is None else workers
        self._buffers = KeptBuffers()
        self._lock = threading.Lock()
        self._num_calls = 0
        self._variable = library.AlgorithmVariable(mpi)
        self._shared = None
        host = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.Get_rank())
        if host.Get_size() == comm.Get_size():
            self._shared = SharedMemory(mpi, comm, self._waiting, self._workers)
        self.use(algorithm)

    def subgroup(self, workers: Sequence[int], timeout_seconds: float) -> "Communicator | None":
        """Returns the communicator of some workers, with their ranks in this order.

        All workers call it; the others get None. Each member allocates a window of shared memory.
        """
        is_member = self._comm.Get_rank() in workers
        with self._lock:
            color = 0 if is_member else self._mpi.UNDEFINED
            comm = self._comm.Split(color, key=self._comm.Get_rank())
        if not is_member:
            return None
        waiting = self._waiting.with_timeout(timeout_seconds).for_members(workers)
        return Communicator(self._mpi, comm, self.algorithm, waiting, workers)

    def use(self, algorithm: str) -> None:
        """Switches the algorithm for sums; all workers must call it.

        Raises:
            ValueError: If the algorithm is unknown or cannot run here.
        """
        if algorithm not in ALGORITHMS:
            raise ValueError(
                f"`all_reduce` through MPI must be one of {', '.join(ALGORITHMS)}. "
                f"Received: {algorithm!r}."
            )
        if algorithm == "mpi":
            algorithm = "mpi_shared_memory" if self._shared is not None else "mpi_library"
        if algorithm == "mpi_shared_memory" and self._shared is None:
            raise ValueError(
                "'mpi_shared_memory' connects workers of one host. One host is required. Received: "
                f"{self.num_ranks} workers that do not all share memory. Use all_reduce='mpi'."
            )
        self._write(algorithm)
        self.algorithm = algorithm

    def implementation(self, collective: str) -> str:
        """Returns the name of a collective's implementation."""
        is_sum = collective == "all_reduce"
        if (is_sum and self.algorithm == "mpi_shared_memory") or (
            self._shared is not None and collective in ("all_gather", "reduce_scatter")
        ):
            return "MPI shared memory, pipelined"
        name = " ".join(self._mpi.Get_library_version().split("\n")[0].split())
        chosen = self.algorithm.removeprefix("mpi_")
        is_chosen = is_sum and chosen not in ("library", "shared_memory")
        words = [name.replace(" Version:", ""), _FUNCTIONS[collective]]
        return " ".join([*words, f"({chosen})"] if is_chosen else words)

    def all_reduce(self, op: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Reduces several arrays over the workers, in one message.

        Args:
            op: "sum", "max" or "min".
            arrays: Contiguous arrays of one dtype.

        Returns:
            The results, in reusable buffers: see `KeptBuffers`.

        Raises:
            WorkerLostError: If a worker has ended, or missed the deadline.
            ValueError: If the workers do not make the same call.
        """
        dtype = arrays[0].dtype
        sources = [_bytes_of(array) for array in arrays]
        starts, num_bytes, note = _planned(op, dtype, tuple([a.shape for a in arrays]))
        with self._lock:
            out = self._buffers.take(num_bytes)
            if self.algorithm == "mpi_shared_memory":
                if num_bytes <= SMALL_BYTES:
                    self._shared.put_small(sources, starts)
                    self._announce(note)
                    self._shared.sum_small(op, out, dtype)
                else:
                    self._announce(note)
                    self._shared.all_reduce(op, sources, starts, out, dtype)
            else:
                self._announce(note)
                packed = sources[0]
                if len(sources) > 1:
                    packed = self._buffers.take(num_bytes)
                    for source, start in zip(sources, starts, strict=True):
                        packed[start : start + source.size] = source
                # MPICH's halving needs at least one element per worker.
                is_tiny = packed.size < self.num_ranks * dtype.itemsize
                self._write("mpi_library" if is_tiny else self.algorithm)
                sent, received = packed.view(dtype), out[: packed.size].view(dtype)
                operation = getattr(self._mpi, _OPS[op])
                self._finish(self._comm.Iallreduce(sent, received, operation))
        return [
            out[start : start + source.size].view(dtype).reshape(array.shape)
            for source, start, array in zip(sources, starts, arrays, strict=True)
        ]

    def all_gather(self, array: np.ndarray) -> np.ndarray:
        """Concatenates the workers' arrays, all of one shape, along axis 0."""
        source = _bytes_of(array)
        with self._lock:
            out = self._buffers.take(source.size * self.num_ranks)
            self._announce(f"all_gather() of {array.dtype.name} {array.shape}")
            if self._shared is not None:
                self._shared.all_gather(source, out)
            else:
                self._finish(self._comm.Iallgather(source, out))
        return out.view(array.dtype).reshape(-1, *array.shape[1:])

    def reduce_scatter(self, array: np.ndarray) -> np.ndarray:
        """Sums the workers' arrays; each worker receives its share. W must divide the size."""
        with self._lock:
            out = self._buffers.take(array.nbytes // self.num_ranks).view(array.dtype)
            self._announce(f"reduce_scatter() of {array.dtype.name} {array.shape}")
            if self._shared is not None:
                self._shared.reduce_scatter(_bytes_of(array), _bytes_of(out), array.dtype)
            else:
                self._finish(self._comm.Ireduce_scatter_block(array, out))
        return out

    def broadcast(self, array: np.ndarray) -> np.ndarray:
        """Returns worker 0's array."""
        with self._lock:
            out = self._buffers.take(array.nbytes)
            self._announce(f"broadcast() of {array.dtype.name} {array.shape}")
            if self._comm.Get_rank() == 0:
                out[:] = _bytes_of(array)
            self._finish(self._comm.Ibcast(out, 0))
        return out.view(array.dtype).reshape(array.shape)

    def all_to_all(self, array: np.ndarray) -> np.ndarray:
        """Splits the array into n equal parts, and sends part k to worker k."""
        with self._lock:
            out = self._buffers.take(array.nbytes)
            self._announce(f"all_to_all() of {array.dtype.name} {array.shape}")
            self._finish(self._comm.Ialltoall(_bytes_of(array), out))
        return out.view(array.dtype).reshape(array.shape)

    def scatter(self, array: np.ndarray, root: int = 0) -> np.ndarray:
        """Returns this worker's of n equal parts of the root's array, along axis 0."""
        with self._lock:
            out = self._buffers.take(array.nbytes // self.num_ranks)
            self._announce(f"scatter(root={root}) of {array.dtype.name} {array.shape}")
            sent = _bytes_of(array) if self._comm.Get_rank() == root else None
            self._finish(self._comm.Iscatter(sent, out, root))
        return out.view(array.dtype).reshape(len(array) // self.num_ranks, *array.shape[1:])

    def send(self, array: np.ndarray, rank: int, timeout_seconds: float) -> None:
        """Sends an array to one other worker, which is in `receive`."""
        with self._lock:
            request = self._comm.Isend(_bytes_of(array), rank)
            self._finish(request, waiting=self._waiting.with_timeout(timeout_seconds))

    def receive(
        self, shape: Sequence[int], dtype: np.dtype, rank: int, timeout_seconds: float
    ) -> np.ndarray:
        """Returns the array that one other worker passes to `send`."""
        with self._lock:
            out = self._buffers.take(math.prod(shape) * dtype.itemsize)
            request = self._comm.Irecv(out, rank)
            self._finish(request, waiting=self._waiting.with_timeout(timeout_seconds))
        return out.view(dtype).reshape(shape)

    def part(self, timeout_seconds: float) -> None:
        """Waits for pending messages to the other workers, with a deadline.

        On one host there are none. Between hosts, messages may still be in flight when a collective
        returns; they have arrived once all workers have reached this call. MPI_Finalize would wait
        too, but without a deadline, and a worker that has failed would never arrive.
        """
        if self._shared is None:
            self._waiting.timeout_seconds = timeout_seconds
            with contextlib.suppress(WorkerLostError):
                self._finish(self._comm.Ibarrier(), may_sleep=True)

    def _write(self, algorithm):
        if algorithm in library.MPICH_ALGORITHMS:
            self._variable.write(algorithm)

    def _announce(self, note):
        self._num_calls += 1
        num_calls = self._num_calls
        digest = _digest(note) + num_calls

        def numbered():
            return f"call {num_calls}, {note}"

        if self._shared is not None:
            notes = self._shared.announce(numbered, digest)
        else:
            notes = self._compare(numbered, digest)
        if notes is not None:
            raise ValueError(
                "The workers made different calls. All of them must call the same collectives, "
                "with the same shapes and types, in the same order. Received: "
                f"{who_said(notes, self._workers)}. Run the same program on all workers, and look "
                "for a call under a condition that differs between workers."
            )

    def _compare(self, note, digest):
        local_digest, digests = np.array([digest]), np.empty(self.num_ranks, np.int64)
        self._finish(self._comm.Iallgather(local_digest, digests), may_sleep=True)
        if (digests == digest).all():
            return None
        text = np.zeros(_NOTE_BYTES, np.uint8)
        encoded = note().encode()[: _NOTE_BYTES - 1]
        text[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        texts = np.empty((self.num_ranks, _NOTE_BYTES), np.uint8)
        self._finish(self._comm.Iallgather(text, texts), may_sleep=True)
        return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in texts]

    def _finish(self, request, may_sleep=False, waiting=None):
        (waiting or self._waiting).until(
            request.Test, lambda: "not all of the others arrived", may_sleep=may_sleep
        )


@functools.lru_cache(maxsize=1024)
def _planned(op, dtype, shapes):
    """Returns the start of each part of a message, its size, and a description of the call.

    Cached, since each step sums the same hundreds of shapes.
    """
    starts, num_bytes = layout([math.prod(shape) * dtype.itemsize for shape in shapes])
    parts = ", ".join(f"{dtype.name} {shape}" for shape in shapes)
    return starts, num_bytes, f"all_reduce(op={op!r}) of {parts}"


@functools.lru_cache(maxsize=1024)
def _digest(note):
    return int.from_bytes(hashlib.blake2b(note.encode(), digest_size=7).digest())


def _bytes_of(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
