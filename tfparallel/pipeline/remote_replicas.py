"""Replicas in other processes: their rows, and the exchange with them.

Each worker runs the whole program and reads the whole batch; its replicas take their pieces of it.
The results of all pieces are summed over the workers with the gradients; outputs are joined if a
loss or a metric needs them together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfparallel.collectives.packing import is_summable
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.collectives.traffic import ROWS
from tfparallel.piece import Piece, times


class Others(NamedTuple):
    """The workers of a job, seen from one of them.

    Attributes:
        num_replicas: D, the number of replicas of all workers; each worker has the same number.
        workers: The workers; None for one process.
    """

    num_replicas: int
    workers: ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this worker contributes what exists once rather than once per piece."""
        return self.workers is None or self.workers.worker_index == 0

    @property
    def first_replica(self) -> int:
        """The index of this worker's first replica among all."""
        if self.workers is None:
            return 0
        return self.num_replicas // self.workers.num_workers * self.workers.worker_index

    def local(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Returns the pieces of this worker's replicas, given those of the whole batch."""
        return self._by_worker(pieces)[0 if self.workers is None else self.workers.worker_index]

    def summed(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over the workers, in one collective per dtype."""
        if self.workers is None or not tensors:
            return list(tensors)
        if all(map(is_summable, tensors)):
            return self.workers.all_reduce(tensors)
        return [tf.reduce_sum(each, 0) for each in self.stacked(tensors)]

    def stacked(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Stacks the tensors of all workers along a new first axis."""
        if self.workers is None:
            return [tensor[None] for tensor in tensors]
        ones = [1] * self.workers.num_workers
        return self.workers.all_gather([tensor[None] for tensor in tensors], ones)

    def joined(
        self, rows: tf.Tensor, pieces: Sequence[Piece], per_example: int | tf.Tensor | None
    ) -> tf.Tensor:
        """Joins the rows of all workers, in order.

        Args:
            rows: The rows of the local pieces, shape `(rows, …)`.
            pieces: The pieces of the whole batch.
            per_example: How many rows an example has; None for a single piece.
        """
        if self.workers is None:
            return rows
        counts = [
            times(_sum([piece.num_rows for piece in of_one]), per_example)
            for of_one in self._by_worker(pieces)
        ]
        (joined,) = self.workers.all_gather([rows], counts, ROWS)
        return joined

    def _by_worker(self, pieces):
        count = 1 if self.workers is None else self.workers.num_workers
        each = len(pieces) // count
        return [pieces[w * each : (w + 1) * each] for w in range(count)]


def _sum(numbers):
    return sum(numbers) if all(isinstance(n, int) for n in numbers) else tf.add_n(numbers)
