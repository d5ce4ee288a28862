"""Data sets of which each worker reads its own rows of a batch, and nothing else.

    batch of 7      x₀ x₁ x₂ x₃ x₄ x₅ x₆
    worker 0 reads  x₀ x₁ x₂                of 7
    worker 1 reads           x₃ x₄ x₅ x₆    of 7

What can be indexed can be read so (`tfparallel.data.EpochBatches`): the order of the examples is a
function of the seed, so that every worker knows which rows of a batch are its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfparallel.data.partition import RowRange, row_ranges

__all__ = ["Readings", "mark", "offer", "readings_of", "rows_of_worker", "rows_to_read", "unmarked"]

_KEY = "__rows_of_a_batch__"

Bounds = Callable[[int], RowRange]
Change = Callable[..., Any]


class Readings(NamedTuple):
    """How a data set is read in shares.

    Attributes:
        share: Called with the bounds of a worker's rows in a batch of B, and what each batch is
            mapped by or None; returns the data set of its rows, each batch marked.
        facts: Called with nothing; returns texts of what must be the same on all workers, a
            fingerprint of the first rows among them.
        batch_size: The rows of a full batch, of all workers.
    """

    share: Callable[[Bounds, Change | None], tf.data.Dataset]
    facts: Callable[[], dict[str, str]]
    batch_size: int


def offer(dataset: tf.data.Dataset, readings: Readings) -> tf.data.Dataset:
    """Says of a data set of global batches that it can be read in shares, too.

    `fit` takes a data set of TensorFlow's, so this hangs on the object. One that is made of it, by
    `map` say, has nothing of it, as it should, and is read whole.
    """
    dataset._tfparallel_readings = readings
    return dataset


def readings_of(data: Any) -> Readings | None:
    """How some data is read in shares, if it can be."""
    return getattr(data, "_tfparallel_readings", None)


def rows_of_worker(strategy: Any) -> Bounds:
    """Returns the function that tells which rows of a batch this worker's replicas have."""
    first, number = strategy.first_replica, len(strategy.devices)

    def bounds(num_rows: int) -> RowRange:
        ranges = row_ranges(num_rows, strategy.num_replicas, strategy.replica_weights)
        own = ranges[first : first + number]
        return RowRange(own[0].start, sum(rows.size for rows in own))

    return bounds


def rows_to_read(own: RowRange, num_rows: Any, least: Callable, most: Callable) -> RowRange:
    """Returns the rows that a worker reads: its own, or one of another's if it has none.

    A worker without rows still computes one, and the result is dropped, since not all operations
    accept an empty batch. A made-up row would not do: a layer may refuse it (a word that is in no
    vocabulary), or make NaN of it. `least` and `most` are `min` and `max`, or `tf.minimum` and
    `tf.maximum`, of numbers of which some are tensors.
    """
    start = least(own.start, most(num_rows - 1, 0))
    return RowRange(start, least(most(own.size, 1), num_rows))


def mark(rows: Any, num_global_rows: tf.Tensor) -> dict[str, Any]:
    """Makes the element of a data set that holds a worker's rows of a batch of so many."""
    return {_KEY: (rows, num_global_rows)}


def unmarked(element: Any) -> tuple[Any, Any] | None:
    """The rows, and how many the batch has; None of what `mark` did not make."""
    is_marked = isinstance(element, dict) and list(element) == [_KEY]
    return element[_KEY] if is_marked else None
