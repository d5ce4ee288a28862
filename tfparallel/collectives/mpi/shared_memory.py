"""All-reduce between workers on one host, through shared memory.

Each worker has a window of a few blocks. A long vector is pipelined through the windows with one
barrier per block, so that the windows stay in the cache, and each worker's own memory is read once
and written once:

    barrier   worker 0                  worker 1
       0      x[0] ─> window            x[0] ─> window                 block 0: copy in
       1      x[1] ─> window            x[1] ─> window                 block 1: copy in
              Σ first half of block 0   Σ second half of block 0       block 0: each sums a part
       2      x[2] ─> window            x[2] ─> window                 …
              Σ first half of block 1   Σ second half of block 1
              y[0] <─ both halves       y[0] <─ both halves            block 0: copy out

Each element is summed by one worker, in worker order: the result is bitwise equal on all workers
and from run to run. A message of at most `SMALL_BYTES` takes one barrier: every worker sums all of
it.

The windows are allocated by MPI (MPI_Win_allocate_shared), which also orders reads and writes
(MPI_Win_sync, MPI-3 §11.7). Data written before barrier t may be read until barrier t + 1, and its
slot is overwritten only after that: slots alternate with t.

At the first barrier of a call, each worker publishes a digest of the call; if the digests differ,
all workers stop there.
"""

import bisect
import types
from collections.abc import Callable, Sequence

import numpy as np

from tfparallel.collectives.mpi.waiting import Waiting

BLOCK_BYTES = 2**20  # Large enough that barriers cost little, small enough for the cache.
SMALL_BYTES = 64 * 1024
_NOTE_BYTES = 2000
_CONTROL_BYTES = 8192
_SUMS = {"sum": np.add, "max": np.maximum, "min": np.minimum}
# Indices of 64-bit numbers in the control area; the digest alternates between two.
_BARRIER, _DIGEST = 0, 8
_NOTES = 256  # Offset in bytes.


class SharedMemory:
    """The windows of all workers of a host, as seen from one worker.

    Messages are passed as bytes (uint8); `dtype` is their element type.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: A communicator of all workers, which share memory.
        waiting: How to wait for the other workers.
        workers: The index of each rank in the job.
    """

    def __init__(self, mpi: types.ModuleType, comm, waiting: Waiting, workers: Sequence[int]):
        self._rank, self._num_ranks = comm.Get_rank(), comm.Get_size()
        self._waiting, self._workers = waiting, workers
        self._window = mpi.Win.Allocate_shared(_CONTROL_BYTES + 4 * BLOCK_BYTES, 1, comm=comm)
        self._window.Lock_all()
        whole = [
            np.frombuffer(self._window.Shared_query(rank)[0], np.uint8)
            for rank in range(self._num_ranks)
        ]
        self._controls = [memoryview(area[:_NOTES]).cast("q") for area in whole]
        self._notes = [area[_NOTES:_CONTROL_BYTES] for area in whole]
        self._control, self._other_controls = self._controls[self._rank], list(self._controls)
        del self._other_controls[self._rank]
        blocks = [area[_CONTROL_BYTES:].reshape(4, BLOCK_BYTES) for area in whole]
        self._inputs = [area[:2] for area in blocks]
        self._sums = [area[2:] for area in blocks]
        self._turn = 0
        self._control[_BARRIER] = 0
        comm.Barrier()

    def announce(self, note: Callable[[], str], digest: int) -> list[str] | None:
        """Publishes the next call at a barrier; returns all workers' notes if they differ.

        Args:
            note: Returns a readable description of the call; called only if the workers differ.
            digest: A 63-bit digest of the call.
        """
        place = _DIGEST + (self._turn + 1) % 2
        self._control[place] = digest
        self._barrier()
        if all(other[place] == digest for other in self._other_controls):
            return None
        # If any two workers differ, then every worker sees a difference, and reaches this point.
        text = note().encode()[:_NOTE_BYTES] + b"\0"
        self._notes[self._rank][: len(text)] = np.frombuffer(text, np.uint8)
        self._barrier()
        notes = [area.tobytes() for area in self._notes]
        return [text.partition(b"\0")[0].decode(errors="replace") for text in notes]

    def put_small(self, sources: list[np.ndarray], starts: list[int]) -> None:
        """Copies a message of at most `SMALL_BYTES` in, before the barrier of `announce`."""
        window = self._inputs[self._rank][(self._turn + 1) % 2]
        for source, start in zip(sources, starts, strict=True):
            window[start : start + source.size] = source

    def sum_small(self, op: str, out: np.ndarray, dtype: np.dtype) -> None:
        """Reduces the messages of all workers into `out`, after the barrier of `announce`."""
        terms = [inputs[self._turn % 2, : out.size].view(dtype) for inputs in self._inputs]
        _reduce(op, terms, out.view(dtype))

    def all_reduce(
        self, op: str, sources: list[np.ndarray], starts: list[int], out: np.ndarray,
        dtype: np.dtype,
    ) -> None:
        """Reduces messages of any size into `out`.

        Args:
            op: "sum", "max" or "min".
            sources: The parts of this worker's message.
            starts: Offset of each part in the message.
            out: The reduced message.
            dtype: The element type.
        """
        num_bytes, rank = out.size, self._rank
        num_blocks = -(-num_bytes // BLOCK_BYTES)
        for turn in range(num_blocks + 2):
            # Written before the barrier that ends this turn.
            after, before = (self._turn + 1) % 2, self._turn % 2
            if turn < num_blocks:
                first = turn * BLOCK_BYTES
                window, last = self._inputs[rank][after], min(first + BLOCK_BYTES, num_bytes)
                begin, end = (first + k for k in self._part(turn, num_bytes, rank, dtype))
                if _whole(sources, starts, begin, end) is None:
                    _copy(sources, starts, first, last, window)
                else:  # This worker sums its own part itself, so it need not copy it in.
                    _copy(sources, starts, first, begin, window)
                    _copy(sources, starts, end, last, window[end - first :])
            if 0 <= turn - 1 < num_blocks:
                first = (turn - 1) * BLOCK_BYTES
                begin, end = self._part(turn - 1, num_bytes, rank, dtype)
                terms = [inputs[before, begin:end] for inputs in self._inputs]
                local_term = _whole(sources, starts, first + begin, first + end)
                terms[rank] = terms[rank] if local_term is None else local_term
                terms = [term.view(dtype) for term in terms]
                _reduce(op, terms, self._sums[rank][before, begin:end].view(dtype))
            if 0 <= turn - 2:
                first = (turn - 2) * BLOCK_BYTES
                for other in range(self._num_ranks):
                    begin, end = self._part(turn - 2, num_bytes, other, dtype)
                    # Summed a turn ago, before the last barrier.
                    out[first + begin : first + end] = self._sums[other][after, begin:end]
            if turn <= num_blocks:
                self._barrier()

    def all_gather(self, source: np.ndarray, out: np.ndarray) -> None:
        """Concatenates the workers' messages, all of one size, in worker order."""
        rows = out.reshape(self._num_ranks, -1)
        for first in range(0, source.size, BLOCK_BYTES):
            part = source[first : first + BLOCK_BYTES]
            self._inputs[self._rank][(self._turn + 1) % 2, : part.size] = part
            self._barrier()
            for row, inputs in zip(rows, self._inputs, strict=True):
                row[first : first + part.size] = inputs[self._turn % 2, : part.size]

    def reduce_scatter(self, source: np.ndarray, out: np.ndarray, dtype: np.dtype) -> None:
        """Sums the workers' messages; worker w receives share w of the sum."""
        rank, n = self._rank, self._num_ranks
        shares = source.reshape(n, -1)
        size = BLOCK_BYTES // (n * dtype.itemsize) * dtype.itemsize
        for first in range(0, out.size, size):
            last = min(first + size, out.size)
            window = self._inputs[rank][(self._turn + 1) % 2]
            for other in range(n):
                if other != rank:
                    start = other * size
                    window[start : start + last - first] = shares[other, first:last]
            self._barrier()
            begin, end = rank * size, rank * size + last - first
            terms = [inputs[self._turn % 2, begin:end] for inputs in self._inputs]
            terms[rank] = shares[rank, first:last]
            _reduce("sum", [term.view(dtype) for term in terms], out[first:last].view(dtype))

    def _part(self, block, num_bytes, rank, dtype):
        """Returns the range of bytes of a block that a worker sums."""
        size = min(BLOCK_BYTES, num_bytes - block * BLOCK_BYTES) // dtype.itemsize
        n = self._num_ranks
        return (size * rank // n) * dtype.itemsize, (size * (rank + 1) // n) * dtype.itemsize

    def _barrier(self):
        self._turn += 1
        turn = self._turn
        self._window.Sync()
        self._control[_BARRIER] = turn
        for other in self._other_controls:
            if other[_BARRIER] < turn:
                self._waiting.until(lambda other=other: other[_BARRIER] >= turn, self._late)
        self._window.Sync()

    def _late(self):
        late = [
            str(worker)
            for worker, control in zip(self._workers, self._controls, strict=True)
            if control[_BARRIER] < self._turn
        ]
        return f"worker{'s' * (len(late) > 1)} {', '.join(late)} did not arrive"


def _reduce(op, terms, out):
    if len(terms) == 1:
        out[:] = terms[0]
        return
    # Overflow is the model's concern, and the padding between parts holds arbitrary bytes.
    with np.errstate(all="ignore"):
        _SUMS[op](terms[0], terms[1], out=out)
        for term in terms[2:]:
            _SUMS[op](out, term, out=out)


def _copy(sources, starts, first, last, window):
    """Copies bytes `first` to `last` of a message that consists of parts."""
    for source, start in zip(sources, starts, strict=True):
        begin, end = max(first, start), min(last, start + source.size)
        if begin < end:
            window[begin - first : end - first] = source[begin - start : end - start]


def _whole(sources, starts, begin, end):
    """Returns bytes `begin` to `end` of a message if a single part holds them, else None."""
    index = bisect.bisect_right(starts, begin) - 1
    source, start = sources[index], starts[index]
    return source[begin - start : end - start] if end <= start + source.size else None
