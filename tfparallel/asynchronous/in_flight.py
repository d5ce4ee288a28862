"""Steps that workers compute while others are dealt out, and how stale a gradient can be.

A step's staleness is how many updates others have made between its reading of the weights and its
own update. Steps are dealt out in order, and step i only once step i - 1 - A has ended, so that A
others can begin while one is computed. Of W workers, at most W - 1 were computing when it began:

    staleness ≤ A + min(A, W - 1)

and one more for each worker that is lost meanwhile, whose step is dealt out again. Of one worker
nothing is stale; A = 0 has the chief wait for each step, and callbacks see what they see in Keras.

References:
    Qirong Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
        Server", NeurIPS 2013.
"""

import collections
from collections.abc import Callable
from typing import Any

__all__ = ["InFlight", "default_staleness", "least_staleness", "steps_ahead"]


def least_staleness(num_workers: int) -> int:
    """The smallest bound under which no worker waits for another."""
    return 2 * (num_workers - 1)


def default_staleness(num_workers: int) -> int:
    """A bound under which a worker that is done has its next step waiting; 0 of one worker."""
    return 3 * num_workers if num_workers > 1 else 0


def steps_ahead(staleness: int, num_workers: int) -> int:
    """A, how many steps may begin while one is computed, with a bound on the staleness.

    Raises:
        ValueError: If the bound is below `least_staleness`.
    """
    least = least_staleness(num_workers)
    if staleness < least:
        raise ValueError(
            f"{num_workers} workers that compute at once can keep a staleness of at most {least}, "
            f"or more. Received: sync='async:{staleness}'. Take 'async:{least}', fewer workers, "
            "or sync='every_step', in which nothing is stale."
        )
    return staleness - (num_workers - 1)


class InFlight:
    """The steps that have begun, oldest first.

    Args:
        ahead: A.
        take: Called with what a step has left, and its batch, in order.
        fetch: Waits for a `RemoteValue`; returns None where a lost worker has taken it along.
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
        """Deals out a step, and waits until as many have ended as must before the next.

        `deal` takes the batch, and returns TensorFlow's `RemoteValue`.
        """
        self._steps.append((deal(batch), batch))
        while len(self._steps) > self._ahead:
            self._end_oldest()

    def end_all(self) -> None:
        """Waits for all steps that have begun."""
        while self._steps:
            self._end_oldest()

    def __len__(self) -> int:
        return len(self._steps)

    def forget(self) -> None:
        """Lets go of what a run that was interrupted has left."""
        self._steps.clear()

    def _end_oldest(self) -> None:
        remote, batch = self._steps.popleft()
        found = self._fetch(remote)
        if found is not None:
            self._take(found, batch)
