"""All-reduce of workers on one host, through memory that all of them have mapped.

Each worker has a window of a few blocks. A sum of many blocks goes through it as through a pipe,
with one barrier a block, so that the windows stay in the cache and each worker's own memory is
read once and written once:

    barrier   worker 0                  worker 1
       0      x[0] ─> window            x[0] ─> window                 block 0: put in
       1      x[1] ─> window            x[1] ─> window                 block 1: put in
              Σ first half of block 0   Σ second half of block 0       block 0: sum own part
       2      x[2] ─> window            x[2] ─> window                 …
              Σ first half of block 1   Σ second half of block 1
              y[0] <─ both halves       y[0] <─ both halves            block 0: take out

One worker sums an element, in the order of the workers: the result is the same everywhere to the
last bit, and from run to run. A message below `SMALL_BYTES` takes one barrier: all sum all of it.

The windows are MPI's (MPI_Win_allocate_shared), and so is the order of reads and writes
(MPI_Win_sync, MPI-3 §11.7). What is written before barrier t may be read until barrier t + 1, and
its place is written again only behind that: places alternate with t.

Every call is announced at its first barrier by a digest of what it is; a worker that reads another
digest than its own goes no further.
"""

import bisect
import types
from collections.abc import Callable

import numpy as np

from tfparallel.collectives.mpi.waiting import Waiting

BLOCK_BYTES = 2**20  # Large enough that barriers cost little, small enough for a cache.
SMALL_BYTES = 64 * 1024
_NOTE_BYTES = 2000
_CONTROL_BYTES = 8192
_SUMS = {"sum": np.add, "max": np.maximum, "min": np.minimum}
# Indices of 64-bit numbers in a control area; of the digest there are two, in turn.
_BARRIER, _DIGEST = 0, 8
_NOTES = 256  # Bytes from the start.


class SharedMemory:
    """The windows of the workers of a host, as one of them sees them.

    A message is given and taken as bytes, uint8; `dtype` says what the bytes are.

    Args:
        mpi: The module `mpi4py.MPI`.
        comm: A communicator of all workers, which share memory.
        waiting: How to wait for the others.
    """

    def __init__(self, mpi: types.ModuleType, comm, waiting: Waiting):
        self._rank, self._num_ranks = comm.Get_rank(), comm.Get_size()
        self._waiting = waiting
        self._window = mpi.Win.Allocate_shared(_CONTROL_BYTES + 4 * BLOCK_BYTES, 1, comm=comm)
        self._window.Lock_all()
        whole = [
            np.frombuffer(self._window.Shared_query(rank)[0], np.uint8)
            for rank in range(self._num_ranks)
        ]
        self._controls = [memoryview(area[:_NOTES]).cast("q") for area in whole]
        self._notes = [area[_NOTES:_CONTROL_BYTES] for area in whole]
        self._own, self._others = self._controls[self._rank], list(self._controls)
        del self._others[self._rank]
        blocks = [area[_CONTROL_BYTES:].reshape(4, BLOCK_BYTES) for area in whole]
        self._inputs = [area[:2] for area in blocks]
        self._sums = [area[2:] for area in blocks]
        self._turn = 0
        self._own[_BARRIER] = 0
        comm.Barrier()

    def announce(self, note: Callable[[], str], digest: int) -> list[str] | None:
        """Tells the others what comes next, at a barrier; returns everyone's note if they differ.

        Args:
            note: Says what the call is, for people; asked if the workers differ.
            digest: A number of 63 bits that stands for it.
        """
        place = _DIGEST + (self._turn + 1) % 2
        self._own[place] = digest
        self._barrier()
        if all(other[place] == digest for other in self._others):
            return None
        # Where two workers differ, each differs from one: all of them come here.
        text = note().encode()[:_NOTE_BYTES] + b"\0"
        self._notes[self._rank][: len(text)] = np.frombuffer(text, np.uint8)
        self._barrier()
        found = [area.tobytes() for area in self._notes]
        return [text.partition(b"\0")[0].decode(errors="replace") for text in found]

    def put_small(self, sources: list[np.ndarray], starts: list[int]) -> None:
        """Puts a message of at most `SMALL_BYTES` in, before the barrier of `announce`."""
        window = self._inputs[self._rank][(self._turn + 1) % 2]
        for source, start in zip(sources, starts, strict=True):
            window[start : start + source.size] = source

    def sum_small(self, op: str, out: np.ndarray, dtype: np.dtype) -> None:
        """Writes to `out` the "sum", "max" or "min" of what all have put in, behind the barrier."""
        terms = [inputs[self._turn % 2, : out.size].view(dtype) for inputs in self._inputs]
        _reduce(op, terms, out.view(dtype))

    def all_reduce(
        self, op: str, sources: list[np.ndarray], starts: list[int], out: np.ndarray,
        dtype: np.dtype,
    ) -> None:
        """Writes to `out` the "sum", "max" or "min" of messages of any size.

        Args:
            op: Which of them.
            sources: The parts of this worker's message.
            starts: Where each part starts in the message.
            out: The whole message.
            dtype: What the bytes are.
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
                else:  # What this worker sums itself it need not put in.
                    _copy(sources, starts, first, begin, window)
                    _copy(sources, starts, end, last, window[end - first :])
            if 0 <= turn - 1 < num_blocks:
                first = (turn - 1) * BLOCK_BYTES
                begin, end = self._part(turn - 1, num_bytes, rank, dtype)
                terms = [inputs[before, begin:end] for inputs in self._inputs]
                own = _whole(sources, starts, first + begin, first + end)
                terms[rank] = terms[rank] if own is None else own
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
        """Joins the workers' messages, of one size, in the order of the workers."""
        rows = out.reshape(self._num_ranks, -1)
        for first in range(0, source.size, BLOCK_BYTES):
            part = source[first : first + BLOCK_BYTES]
            self._inputs[self._rank][(self._turn + 1) % 2, : part.size] = part
            self._barrier()
            for row, inputs in zip(rows, self._inputs, strict=True):
                row[first : first + part.size] = inputs[self._turn % 2, : part.size]

    def reduce_scatter(self, source: np.ndarray, out: np.ndarray, dtype: np.dtype) -> None:
        """Sums the workers' messages, a share for each worker in order; each takes its share."""
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
        """The bytes of a block that a worker sums."""
        size = min(BLOCK_BYTES, num_bytes - block * BLOCK_BYTES) // dtype.itemsize
        n = self._num_ranks
        return (size * rank // n) * dtype.itemsize, (size * (rank + 1) // n) * dtype.itemsize

    def _barrier(self):
        self._turn += 1
        turn = self._turn
        self._window.Sync()
        self._own[_BARRIER] = turn
        for other in self._others:
            if other[_BARRIER] < turn:
                self._waiting.until(lambda other=other: other[_BARRIER] >= turn, self._late)
        self._window.Sync()

    def _late(self):
        late = [
            str(rank)
            for rank, control in enumerate(self._controls)
            if control[_BARRIER] < self._turn
        ]
        return f"worker{'s' * (len(late) > 1)} {', '.join(late)} did not come"


def _reduce(op, terms, out):
    if len(terms) == 1:
        out[:] = terms[0]
        return
    # A sum of infinities is the model's business; between parts lies what was there before.
    with np.errstate(all="ignore"):
        _SUMS[op](terms[0], terms[1], out=out)
        for term in terms[2:]:
            _SUMS[op](out, term, out=out)


def _copy(sources, starts, first, last, window):
    """Copies bytes `first` to `last` of a message that lies in parts."""
    for source, start in zip(sources, starts, strict=True):
        begin, end = max(first, start), min(last, start + source.size)
        if begin < end:
            window[begin - first : end - first] = source[begin - start : end - start]


def _whole(sources, starts, begin, end):
    """Returns bytes `begin` to `end` of a message if one part of it holds them all."""
    index = bisect.bisect_right(starts, begin) - 1
    source, start = sources[index], starts[index]
    return source[begin - start : end - start] if end <= start + source.size else None
