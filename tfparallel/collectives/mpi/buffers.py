"""Result buffers that are kept from call to call, and are never written while they are read.

A fresh array a call costs as much in page faults as the exchange itself. A kept one is aliased by
TensorFlow, not copied, if it is aligned as TensorFlow aligns its own; so it must not be written
again while a tensor, or a variable that took the tensor over, still reads it. NumPy knows: whoever
reads the memory holds a reference to the array that was handed out, and when the last has gone the
memory comes back here. Nothing is guessed from steps or calls.

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
    """Memory by size, in powers of two and halves between them."""

    def __init__(self):
        self._free: dict[int, collections.deque] = collections.defaultdict(collections.deque)
        self.num_made = 0

    def take(self, size_bytes: int) -> np.ndarray:
        """Returns memory that nobody reads: uint8, shape `(size_bytes,)`, aligned."""
        size = _rounded_up(size_bytes)
        free = self._free[size]
        try:
            memory = free.pop()
        except IndexError:
            memory = mmap.mmap(-1, size)
            self.num_made += 1
            if hasattr(mmap, "MADV_HUGEPAGE") and size >= 2**21:
                memory.madvise(mmap.MADV_HUGEPAGE)
        # An array over something that is no array: views of it refer to it, not past it.
        lease = np.frombuffer(memory, np.uint8)
        weakref.finalize(lease, free.append, memory).atexit = False
        return lease[:size_bytes]


def _rounded_up(size_bytes):
    size = max(size_bytes, _MIN_BYTES)
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if size <= power * 3 // 4 else power


def layout(sizes_bytes: list[int]) -> tuple[list[int], int]:
    """Returns where arrays start that stand one behind the other, aligned, and their end."""
    starts, end = [], 0
    for size in sizes_bytes:
        starts.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return starts, end
