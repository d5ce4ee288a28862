"""Replicas in other processes: which rows are theirs, and what is exchanged with them.

Each worker runs the whole program and is given the whole batch, and its replicas take their pieces
of it. What the pieces of all come to is summed over the workers with the gradients; outputs are
joined where a loss or a metric looks at them together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfparallel.collectives.packing import is_summable
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.collectives.traffic import ROWS
from tfparallel.data.rows_of_replica import Shard

__all__ = ["Others"]


class Others(NamedTuple):
    """The workers of a job, seen from one of them.

    Attributes:
        num_replicas: D, of all workers, each of which has as many.
        workers: They; None for one process.
    """

    num_replicas: int
    workers: ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether what is there once, and not once a piece, counts here."""
        return self.workers is None or self.workers.worker_index == 0

    @property
    def first_replica(self) -> int:
        """The index of this worker's first replica among those of all."""
        if self.workers is None:
            return 0
        return self.num_replicas // self.workers.num_workers * self.workers.worker_index

    def own(self, shards: Sequence[Shard]) -> list[Shard]:
        """The pieces of this worker's replicas, of those of the whole batch."""
        return self._by_worker(shards)[0 if self.workers is None else self.workers.worker_index]

    def summed(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sums over the workers, in one collective for each type."""
        if self.workers is None or not tensors:
            return list(tensors)
        if all(map(is_summable, tensors)):
            return self.workers.all_reduce(tensors)
        return [tf.reduce_sum(each, 0) for each in self.stacked(tensors)]

    def stacked(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors of all workers, one after the other along a new first axis."""
        if self.workers is None:
            return [tensor[None] for tensor in tensors]
        ones = [1] * self.workers.num_workers
        return self.workers.all_gather([tensor[None] for tensor in tensors], ones)

    def joined(self, rows: tf.Tensor, shards: Sequence[Shard]) -> tf.Tensor:
        """The rows of all workers, in order, of those of this one.

        Args:
            rows: Of the pieces here, shape `(rows, …)`.
            shards: The pieces of the whole batch.
        """
        if self.workers is None:
            return rows
        counts = [_sum([shard.num_rows for shard in own]) for own in self._by_worker(shards)]
        (joined,) = self.workers.all_gather([rows], counts, ROWS)
        return joined

    def _by_worker(self, shards):
        count = 1 if self.workers is None else self.workers.num_workers
        each = len(shards) // count
        return [shards[w * each : (w + 1) * each] for w in range(count)]


def _sum(numbers):
    return sum(numbers) if all(isinstance(n, int) for n in numbers) else tf.add_n(numbers)
