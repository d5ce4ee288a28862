"""Datasets of which each worker reads only its own rows of a batch.

    batch of 7      x₀ x₁ x₂ x₃ x₄ x₅ x₆
    worker 0 reads  x₀ x₁ x₂                of 7
    worker 1 reads           x₃ x₄ x₅ x₆    of 7

This works for indexable data (`tfparallel.data.EpochBatches`): the order of the examples is a
function of the seed, so every worker knows which rows of a batch are its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfparallel.data.partition import RowRange, row_ranges

_KEY = "__rows_of_a_batch__"

Bounds = Callable[[int], RowRange]
Change = Callable[..., Any]


class Readings(NamedTuple):
    """How a worker reads only its own rows of a dataset.

    Attributes:
        share: Takes a function from the batch size to the worker's rows, and a function that maps
            each batch, or None; returns the dataset of the worker's rows, each batch marked.
        facts: Returns texts that must be equal on all workers, including a fingerprint of the first
            rows.
        batch_size: Number of rows in a full global batch.
    """

    share: Callable[[Bounds, Change | None], tf.data.Dataset]
    facts: Callable[[], dict[str, str]]
    batch_size: int


def offer(dataset: tf.data.Dataset, readings: Readings) -> tf.data.Dataset:
    """Attaches `readings` to a dataset of global batches, and returns the dataset.

    `fit` takes a TensorFlow dataset, so this is an attribute of the object. A dataset derived from
    it, for example by `map`, rightly lacks the attribute, and every worker reads all of it.
    """
    dataset._tfparallel_readings = readings
    return dataset


def readings_of(data: Any) -> Readings | None:
    """Returns the `Readings` attached to a dataset, or None."""
    return getattr(data, "_tfparallel_readings", None)


def rows_of_worker(strategy: Any) -> Bounds:
    """Returns a function from the size of a batch to the rows of this worker's replicas."""
    first, number = strategy.first_replica, len(strategy.devices)

    def bounds(num_rows: int) -> RowRange:
        ranges = row_ranges(num_rows, strategy.num_replicas, strategy.replica_weights)
        local_ranges = ranges[first : first + number]
        return RowRange(local_ranges[0].start, sum(rows.size for rows in local_ranges))

    return bounds


def rows_to_read(local_rows: RowRange, num_rows: Any, least: Callable, most: Callable) -> RowRange:
    """Returns the rows that a worker reads: its own, or one of another worker if it has none.

    A worker without rows still computes one, and drops the result, since not all operations accept
    an empty batch. A synthetic row would not do: a layer may reject it (a word outside the
    vocabulary) or turn it into NaN. `least` and `most` are `min` and `max`, or `tf.minimum` and
    `tf.maximum` if some numbers are tensors.
    """
    start = least(local_rows.start, most(num_rows - 1, 0))
    return RowRange(start, least(most(local_rows.size, 1), num_rows))


def mark(rows: Any, num_global_rows: tf.Tensor) -> dict[str, Any]:
    """Returns a dataset element with a worker's rows of a batch of `num_global_rows`."""
    return {_KEY: (rows, num_global_rows)}


def unmarked(element: Any) -> tuple[Any, Any] | None:
    """Returns the rows and the size of the batch of an element from `mark`; None for others."""
    is_marked = isinstance(element, dict) and list(element) == [_KEY]
    return element[_KEY] if is_marked else None
