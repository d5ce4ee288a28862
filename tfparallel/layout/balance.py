"""The optimal cut of a model's layers into stages.

The layers are in topological order, and a stage is a run of consecutive layers. Its cost is that of
its layers plus that of the tensors it receives, each counted once, however many layers read it:

    cost(i, j) = Σ_{i ≤ k < j} c_k + max_{i ≤ k < j} p_k
                 + Σ_{tensors made before i and read in [i, j)} t

where the peak p_k is what layer k needs temporarily and frees before the next layer runs.
The best partition minimizes the largest stage cost and, among the partitions with that cost, the
total size of the tensors sent. Dynamic programming over the number of stages finds it:

    best(s, j) = min_i max(best(s - 1, i), cost(i, j))

To balance both time and memory, each is counted as a share of its total, and a stage costs the
larger of its two shares.

Plain Python and NumPy. The caller chooses the unit: seconds or bytes.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

Edges = Mapping[int, tuple[float, Sequence[int]]]
"""For each layer that others read: the cost of sending its output, and its readers."""


class NoPartition(ValueError):
    """No partition fits the cap.

    Attributes:
        smallest: The cost of the largest stage of the best partition.
    """

    def __init__(self, smallest: float, cap: float):
        super().__init__(f"The best partition has a stage of {smallest:g}, above {cap:g}.")
        self.smallest = smallest


@dataclasses.dataclass(frozen=True)
class Weighed:
    """A quantity to balance: seconds or bytes.

    Attributes:
        costs: The cost of each layer, in topological order; 0 or more.
        edges: The tensors sent between layers. None: sending costs nothing.
        cap: The highest cost allowed for a stage.
        peaks: What each layer needs temporarily. None: nothing.
    """

    costs: Sequence[float]
    edges: Edges | None = None
    cap: float | None = None
    peaks: Sequence[float] | None = None

    def table(self) -> np.ndarray:
        """Returns the cost of the stage [i, j) at row i, column j; infinite if it is empty."""
        ends = np.concatenate([[0.0], np.cumsum(self.costs)])
        table = ends[None, :] - ends[:, None] + _received(len(self.costs), self.edges or {})
        if self.peaks is not None:
            for start in range(len(self.costs)):
                table[start, start + 1 :] += np.maximum.accumulate(self.peaks[start:])
        table[np.tril_indices(len(table))] = np.inf
        return table


def partition(num_stages: int, *balanced: Weighed, capped: Sequence[Weighed] = ()) -> list[int]:
    """Cuts layers into stages, none of them empty.

    Args:
        num_stages: At least 1, at most the number of layers.
        *balanced: The quantities to balance; if several, by their shares.
        capped: Further quantities that are capped and not balanced.

    Returns:
        The number of layers of each stage.

    Raises:
        ValueError: If there are more stages than layers.
        NoPartition: If no partition meets a cap.

    Example:
        >>> partition(2, Weighed([3, 1, 1, 3]))
        [2, 2]
        >>> # The tensor between 1 and 2 is large.
        >>> partition(2, Weighed([3, 1, 1, 3], {1: (5, [2])}))
        [1, 3]
    """
    num_layers = len(balanced[0].costs)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            "Each stage needs at least one layer. Received: "
            f"{num_stages} stages for {num_layers} layers."
        )
    table = np.zeros((num_layers + 1, num_layers + 1))
    for weighed in balanced:
        costs = weighed.table()
        table = np.maximum(table, costs / (costs[0, -1] or 1.0) if len(balanced) > 1 else costs)
    for weighed in (*balanced, *capped):
        if weighed.cap is not None:
            costs = weighed.table()
            smallest, _ = _solve(costs, num_stages)
            if smallest > weighed.cap:
                raise NoPartition(smallest, weighed.cap)
            table = np.where(costs <= weighed.cap, table, np.inf)
    largest, _ = _solve(table, num_stages)
    if largest == np.inf:  # Each cap can be met, but not all of them by one partition.
        raise NoPartition(np.inf, min(w.cap for w in (*balanced, *capped) if w.cap is not None))
    # Among the partitions with this largest stage, take the one that sends least.
    sent = _received(num_layers, balanced[-1].edges or {})
    allowed = np.where(table <= largest * (1 + 1e-12), sent, np.inf)
    _, choices = _solve(allowed, num_stages, np.add)
    bounds = [num_layers]
    for choice in reversed(choices):
        bounds.append(int(choice[bounds[-1]]))
    bounds.reverse()
    return [end - start for start, end in zip(bounds, bounds[1:], strict=False)]


def _solve(table, num_stages, join=np.maximum):
    """Returns the best cost of all layers in `num_stages` stages, and each stage's best starts."""
    best = np.full(len(table), np.inf)
    best[0] = 0.0
    choices = []
    for _ in range(num_stages):
        values = join(best[:, None], table)
        choices.append(np.argmin(values, 0))
        best = np.min(values, 0)
    return float(best[-1]), choices


def _received(num_layers, edges):
    """Returns a table of what each stage [i, j) receives, from differences at the corners."""
    corners = np.zeros((num_layers + 2, num_layers + 2))
    for producer, (cost, readers) in edges.items():
        # A stage that starts in (previous, reader] and ends behind the reader reads it first there.
        previous = producer
        for reader in sorted(set(readers)):
            corners[previous + 1, reader + 1] += cost
            corners[reader + 1, reader + 1] -= cost
            previous = reader
    return np.cumsum(np.cumsum(corners, 0), 1)[: num_layers + 1, : num_layers + 1]
