"""Waiting for the other workers: with a deadline, and an end when one of them is lost."""

import os
import time
from collections.abc import Callable

from tfparallel.collectives.lost import WorkerLostError

# Spin while the answer may come at any moment, then let others run, then sleep: what waits must
# not take the core from the worker that it waits for.
_SPINS = 50
_YIELDS = 2000
_SLEEP_SECONDS = 5e-5
_LOOK_EVERY = 256


class Waiting:
    """How this worker waits.

    Args:
        lost: Returns the index of a worker that has ended, or None.
        timeout_seconds: How long a collective waits for the others; 0 for ever.
    """

    def __init__(self, lost: Callable[[], int | None], timeout_seconds: float = 0.0):
        self._lost = lost
        self.timeout_seconds = timeout_seconds

    def until(
        self, done: Callable[[], bool], late: Callable[[], str], *, may_sleep: bool = True
    ) -> None:
        """Returns once `done()` is true.

        Args:
            done: Asked again and again.
            late: Says who is missing, for the error.
            may_sleep: Whether the others may be far; a transfer that is going on needs this
                process to ask.

        Raises:
            WorkerLostError: If another worker has ended, or the deadline has passed.
        """
        for _ in range(_SPINS):
            if done():
                return
        start, turns = time.monotonic(), 0
        while not done():
            turns += 1
            if turns % _LOOK_EVERY == 0 or (may_sleep and turns > _YIELDS):
                self._look(start, late)
            if may_sleep and turns > _YIELDS:
                time.sleep(_SLEEP_SECONDS)
            elif turns % _LOOK_EVERY == 0:
                time.sleep(0)  # Lets Python's other threads run, too.
            else:
                os.sched_yield()

    def _look(self, start, late):
        lost = self._lost()
        if lost is not None:
            raise lost_error(lost)
        waited = time.monotonic() - start
        if 0 < self.timeout_seconds < waited:
            raise WorkerLostError(
                f"A collective waited {self.timeout_seconds:g} s for the other workers. All are "
                f"required. Received: {late()}. Look at what it was doing, or give it more time "
                "with `timeout_seconds` in the strategy's communication options."
            )


def lost_error(worker: int) -> WorkerLostError:
    """Returns the error for a worker that has ended."""
    return WorkerLostError(
        f"The connection to worker {worker} was lost: it has ended, or the network between the "
        "two. Every worker is required, and this process cannot join it again. Received: the end "
        "of its connection. The cause is in the output of the worker that was lost; `tfparallel "
        "launch --max_restarts=3` starts all again, and they resume from their checkpoint if "
        "there is one."
    )
