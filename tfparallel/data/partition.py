"""Batch partition: each global batch is split across the replicas, by rows.

The arithmetic is plain Python; it holds for Python integers and for scalar integer tensors alike,
so that the row count of a batch may be known only when the step runs.
"""

from typing import NamedTuple, TypeVar

Count = TypeVar("Count")


class RowRange(NamedTuple):
    """The consecutive rows `[start, start + size)` of a global batch."""

    start: Count
    size: Count


def row_ranges(num_rows: Count, num_shards: int) -> list[RowRange]:
    """Splits `num_rows` rows into `num_shards` consecutive ranges whose sizes differ by at most 1.

    Shard k gets the rows from floor(k·B/N) to floor((k+1)·B/N), with B = `num_rows` and
    N = `num_shards`. With fewer rows than shards some ranges are empty.

    Args:
        num_rows: B, a Python integer or a scalar integer tensor.
        num_shards: N, at least 1.

    Returns:
        One `RowRange` for each shard, in order.

    Example:
        >>> row_ranges(10, 3)
        [RowRange(start=0, size=3), RowRange(start=3, size=3), RowRange(start=6, size=4)]
    """
    bounds = [shard * num_rows // num_shards for shard in range(num_shards + 1)]
    return [RowRange(start, stop - start) for start, stop in zip(bounds, bounds[1:], strict=False)]
