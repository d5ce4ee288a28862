"""Reusable result buffers, which are never overwritten while something still reads them.

A new array for each call costs as much in page faults as the exchange itself. TensorFlow aliases an
aligned array instead of copying it, so a buffer must not be reused while a tensor, or a variable
that took over the tensor, still reads it. Reference counting tells: every reader holds a reference
to the array that was handed out, and the memory returns to the pool once the last one is gone.

    memory ──lease──> array ──> views ──> tensors of TensorFlow
       ^                │
       └── weakref.finalize: the last reader has gone
"""

import collections
import mmap
import weakref

import numpy as np

ALIGNMENT = 64  # Bytes; TensorFlow's EIGEN_MAX_ALIGN_BYTES.
_MIN_BYTES = 4096


class KeptBuffers:
    """A pool of memory by size: powers of two, and the midpoints between them."""

    def __init__(self):
        self._free: dict[int, collections.deque] = collections.defaultdict(collections.deque)
        self.num_made = 0

    def take(self, size_bytes: int) -> np.ndarray:
        """Returns unused, aligned memory: uint8, shape `(size_bytes,)`."""
        size = _rounded_up(size_bytes)
        free = self._free[size]
        try:
            memory = free.pop()
        except IndexError:
            memory = mmap.mmap(-1, size)
            self.num_made += 1
            if hasattr(mmap, "MADV_HUGEPAGE") and size >= 2**21:
                memory.madvise(mmap.MADV_HUGEPAGE)
        # The memory is not an array itself, so that views reference this array and not its base.
        lease = np.frombuffer(memory, np.uint8)
        weakref.finalize(lease, free.append, memory).atexit = False
        return lease[:size_bytes]


def _rounded_up(size_bytes):
    size = max(size_bytes, _MIN_BYTES)
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if size <= power * 3 // 4 else power


def layout(sizes_bytes: list[int]) -> tuple[list[int], int]:
    """Returns the aligned start offsets of consecutive arrays, and their end."""
    starts, end = [], 0
    for size in sizes_bytes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end
