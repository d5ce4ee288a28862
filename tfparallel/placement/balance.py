"""Where to cut a model into stages: the optimal contiguous partition of its layers.

The layers stand in a topological order, and a stage is a range of them. A stage's cost is that of
its layers plus that of the tensors that it is sent, each once, however many of its layers read it:

    cost(i, j) = Σ_{i ≤ k < j} c_k + Σ_{tensors made before i and read in [i, j)} t

The best partition makes the largest of these as small as can be, and among those the sum of what is
sent. With every cost(i, j) in a table it is found by dynamic programming over the number of stages:

    best(s, j) = min_i max(best(s - 1, i), cost(i, j))

Plain Python and NumPy. The unit is the caller's: seconds, or bytes.
"""

from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["NoPartition", "partition"]

Edges = Mapping[int, tuple[float, Sequence[int]]]
"""For each layer that others read: the cost of sending its output, and who reads it."""


class NoPartition(ValueError):
    """No partition meets the cap.

    Attributes:
        smallest: The largest stage of the best partition.
    """

    def __init__(self, smallest: float, cap: float):
        super().__init__(f"The best partition has a stage of {smallest:g}, above {cap:g}.")
        self.smallest = smallest


def partition(
    costs: Sequence[float],
    num_stages: int,
    edges: Edges | None = None,
    cap: float | None = None,
) -> list[int]:
    """Cuts layers into stages, none of them empty.

    Args:
        costs: Of each layer, in topological order; 0 or more.
        num_stages: At least 1, at most the number of layers.
        edges: What passes between the layers. None: what is sent costs nothing.
        cap: What no stage may exceed.

    Returns:
        The number of layers of each stage.

    Raises:
        ValueError: If there are more stages than layers.
        NoPartition: If no partition meets the cap.

    Example:
        >>> partition([3, 1, 1, 3], 2)
        [2, 2]
        >>> partition([3, 1, 1, 3], 2, {1: (5, [2])})  # The tensor between 1 and 2 is large.
        [1, 3]
    """
    num_layers = len(costs)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            "A stage needs a layer at least. Received: "
            f"{num_stages} stages for {num_layers} layers."
        )
    sent = _received(num_layers, edges or {})
    ends = np.concatenate([[0.0], np.cumsum(costs)])
    table = ends[None, :] - ends[:, None] + sent
    # Row i, column j: the stage [i, j). Below the diagonal there is none.
    table[np.tril_indices(num_layers + 1)] = np.inf
    largest, _ = _solve(table, num_stages)
    if cap is not None and largest > cap:
        raise NoPartition(largest, cap)
    # Of the partitions with this largest stage, the one that is sent least.
    allowed = np.where(table <= largest * (1 + 1e-12), sent, np.inf)
    _, choices = _solve(allowed, num_stages, np.add)
    bounds = [num_layers]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    bounds.reverse()
    return [end - start for start, end in zip(bounds, bounds[1:], strict=False)]


def _solve(table, num_stages, join=np.maximum):
    """Returns the best value of all layers in that many stages, and each stage's best starts."""
    best = np.full(len(table), np.inf)
    best[0] = 0.0
    choices = []
    for _ in range(num_stages):
        values = join(best[:, None], table)
        choices.append(np.argmin(values, 0))
        best = np.min(values, 0)
    return float(best[-1]), choices


def _received(num_layers, edges):
    """What each stage [i, j) is sent, as a table, from differences at the corners."""
    corners = np.zeros((num_layers + 2, num_layers + 2))
    for producer, (cost, readers) in edges.items():
        # A stage that starts in (previous, reader] and ends behind the reader reads it first there.
        previous = producer
        for reader in sorted(set(readers)):
            corners[previous + 1, reader + 1] += cost
            corners[reader + 1, reader + 1] -= cost
            previous = reader
    return np.cumsum(np.cumsum(corners, 0), 1)[: num_layers + 1, : num_layers + 1]
