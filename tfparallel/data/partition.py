"""Batch partition: each global batch is split across the replicas, by rows.

The arithmetic is plain Python. It works for Python integers and for scalar integer tensors, so the
number of rows may be unknown until the step runs.
"""

import itertools
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

Count = TypeVar("Count")


class RowRange(NamedTuple):
    """The consecutive rows `[start, start + size)` of a global batch."""

    start: Count
    size: Count


def row_ranges(
    num_rows: Count, num_shards: int, weights: Sequence[int] | None = None
) -> list[RowRange]:
    """Splits `num_rows` rows into `num_shards` consecutive ranges, equal or by weight.

    Shard k gets rows floor(W_k·B/W) to floor(W_{k+1}·B/W), with B = `num_rows`, W_k the sum of the
    weights before k, and W the sum of all weights. Without weights W_k = k, and the sizes differ by
    at most 1. If there are few rows, some ranges are empty.

    Args:
        num_rows: B, a Python integer or a scalar integer tensor.
        num_shards: N, at least 1.
        weights: N whole numbers of at least 1, such as `[3, 1]` for a device three times as fast
            as the other. None for equal shares.

    Returns:
        One `RowRange` for each shard, in order.

    Raises:
        ValueError: If the weights are not N whole numbers of at least 1.

    Example:
        >>> row_ranges(10, 3)
        [RowRange(start=0, size=3), RowRange(start=3, size=3), RowRange(start=6, size=4)]
        >>> row_ranges(8, 2, [3, 1])
        [RowRange(start=0, size=6), RowRange(start=6, size=2)]
    """
    check_weights(weights, num_shards)
    ends = list(itertools.accumulate(weights or [1] * num_shards, initial=0))
    bounds = [end * num_rows // ends[-1] for end in ends]
    return [RowRange(start, stop - start) for start, stop in zip(bounds, bounds[1:], strict=False)]


def rows_of_workers(strategy: Any, num_rows: Count) -> list[Count]:
    """Returns the number of rows of a batch on each worker's replicas, in worker order."""
    ranges = row_ranges(num_rows, strategy.num_replicas, strategy.replica_weights)
    sizes, per_worker = [rows.size for rows in ranges], len(strategy.devices)
    return [sum(sizes[k : k + per_worker]) for k in range(0, len(sizes), per_worker)]


def rows_by_replica(strategy: Any, num_rows: int) -> dict[str, int]:
    """Returns how a batch is split: the number of rows that each replica computes.

    Args:
        strategy: A `tfparallel.MirroredStrategy` or `MultiWorkerMirroredStrategy`, such as
            `model.distribute_strategy` of a model that `data_parallel` returned.
        num_rows: Number of rows in the global batch.

    Returns:
        The number of rows by worker and device of each replica, in row order.

    Raises:
        ValueError: If the strategy is none of these, or `num_rows` is invalid.

    Example:
        >>> model = tfparallel.data_parallel(build_model, devices=["CPU:0", "CPU:1"])
        >>> tfparallel.data.rows_by_replica(model.distribute_strategy, 51)
        {'CPU:0': 25, 'CPU:1': 26}
    """
    if not hasattr(strategy, "replica_weights"):
        raise ValueError(
            "`rows_by_replica` takes a tfparallel.MirroredStrategy or MultiWorkerMirroredStrategy. "
            f"Received: strategy={strategy!r}. Pass `model.distribute_strategy` of a model that "
            "`data_parallel` returned; on one device, that device gets all rows."
        )
    if not isinstance(num_rows, numbers.Integral) or num_rows < 0:
        raise ValueError(
            "`num_rows` must be the number of rows of a batch. Received: "
            f"num_rows={num_rows!r}. Pass, for example, num_rows=64."
        )
    ranges = row_ranges(num_rows, strategy.num_replicas, strategy.replica_weights)
    devices = [":".join(name.split(":")[-2:]) for name in strategy.devices]
    names = itertools.product(range(strategy.num_replicas // len(devices)), devices)
    return {
        f"worker {worker}, {device}" if strategy.workers else device: rows.size
        for (worker, device), rows in zip(names, ranges, strict=True)
    }


def check_weights(weights: Sequence[int] | None, num_shards: int) -> None:
    """Checks that the weights are None, or a whole number of at least 1 for each shard.

    Raises:
        ValueError: If they are not.
    """
    if weights is None:
        return
    are_whole = all(isinstance(w, numbers.Integral) and not isinstance(w, bool) for w in weights)
    if not are_whole or len(weights) != num_shards or min(weights) < 1:
        raise ValueError(
            "`replica_weights` must hold one whole number of at least 1 for each replica. "
            f"Received: {list(weights)} for {num_shards} replicas. [3, 1] gives the first of two "
            "replicas three rows of every four."
        )
