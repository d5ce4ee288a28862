"""The steps in flight, and the bound on the staleness of a gradient.

The staleness of a step is the number of updates by other steps between its read of the weights and
its own update. Steps are dispatched in order, and step i only after step i - 1 - A has ended, so A
others can start during a step. When it starts, at most W - 1 of W workers are computing:

    staleness ≤ A + min(A, W - 1)

plus one for each worker that is lost in the meantime, whose step is dispatched again. With one
worker nothing is stale. With A = 0 the chief waits for each step, and callbacks see the same state
as in Keras.

References:
    Qirong Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
        Server", NeurIPS 2013.
"""

import collections
from collections.abc import Callable
from typing import Any


def least_staleness(num_workers: int) -> int:
    """Returns the smallest bound with which no worker waits for another."""
    return 2 * (num_workers - 1)


def default_staleness(num_workers: int) -> int:
    """Returns a bound that keeps a step queued for each worker; 0 for a single worker."""
    return 3 * num_workers if num_workers > 1 else 0


def steps_ahead(staleness: int, num_workers: int) -> int:
    """Returns A, the number of steps that may start during another, for a bound on the staleness.

    Raises:
        ValueError: If the bound is below `least_staleness`.
    """
    least = least_staleness(num_workers)
    if staleness < least:
        raise ValueError(
            f"{num_workers} workers need a staleness bound of at least {least}. Received: "
            f"sync='async:{staleness}'. Use 'async:{least}', fewer workers, or sync='every_step', "
            "which has no staleness."
        )
    return staleness - (num_workers - 1)


class InFlight:
    """The steps in flight, oldest first.

    Args:
        ahead: A.
        take: Called with the results of each step and its batch, in order.
        fetch: Waits for a `RemoteValue`; returns None if it was lost with its worker.
    """

    def __init__(
        self,
        ahead: int,
        take: Callable[[Any, Any], None],
        fetch: Callable[[Any], Any] = lambda remote: remote.fetch(),
    ):
        self._ahead = ahead
        self._fetch = fetch
        self._take = take
        self._steps: collections.deque[tuple[Any, Any]] = collections.deque()

    def begin(self, deal: Callable[[Any], Any], batch: Any) -> None:
        """Dispatches a step, and waits until the next one may start.

        `deal` takes the batch and returns TensorFlow's `RemoteValue`.
        """
        self._steps.append((deal(batch), batch))
        while len(self._steps) > self._ahead:
            self._end_oldest()

    def end_all(self) -> None:
        """Waits for all steps in flight."""
        while self._steps:
            self._end_oldest()

    def __len__(self) -> int:
        return len(self._steps)

    def forget(self) -> None:
        """Drops the steps that an interrupted run has left."""
        self._steps.clear()

    def _end_oldest(self) -> None:
        remote, batch = self._steps.popleft()
        results = self._fetch(remote)
        if results is not None:
            self._take(results, batch)
