"""Waiting for the other workers: with a deadline, and an end when one of them is lost."""

import os
import time
from collections.abc import Callable

from tfparallel.collectives.lost_worker import WorkerLostError, lost_error

# Spin while the answer may come at any moment, and then sleep: who sleeps is woken in time on a
# busy machine, while who has used up its share of a core comes back milliseconds later. Workers
# that share cores do not spin but yield: what waits must not take the core of what it waits for.
# While it spins it must not sleep at all, not for zero seconds either: that gives the core up, and
# the whole call takes twice as long (docs/internals/mpi.md). Python's other threads get their turn
# by the interpreter's own switch, every 5 ms.
_SPIN_SECONDS = 3e-4
_NUM_SPINS = 50
_SLEEP_SECONDS = 5e-5
_MOST_SLEEP_SECONDS = 1e-3
_LOOK_EVERY = 256


class Waiting:
    """How this worker waits.

    Args:
        lost: Returns the index of a worker that has ended, or None.
        timeout_seconds: How long a collective waits for the others; 0 for ever.
        has_core: Whether every worker has a core to itself.
    """

    def __init__(
        self,
        lost: Callable[[], int | None],
        timeout_seconds: float = 0.0,
        has_core: bool = False,
    ):
        self._lost = lost
        self._spin_seconds = _SPIN_SECONDS if has_core else 0.0
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
        for _ in range(_NUM_SPINS):
            if done():
                return
        start, turns = time.monotonic(), 0
        while not done():
            turns += 1
            waited = time.monotonic() - start
            is_far = may_sleep and waited > _SPIN_SECONDS
            if turns % _LOOK_EVERY == 0 or is_far:
                self._look(waited, late)
            if is_far:
                # A hundredth of what it has waited for already: who waits for seconds asks seldom.
                time.sleep(min(max(_SLEEP_SECONDS, waited / 100), _MOST_SLEEP_SECONDS))
            elif waited > self._spin_seconds:
                os.sched_yield()

    def _look(self, waited, late):
        lost = self._lost()
        if lost is not None:
            raise lost_error(lost, "the end of its connection")
        if 0 < self.timeout_seconds < waited:
            raise WorkerLostError(
                f"A collective waited {self.timeout_seconds:g} s for the other workers. All are "
                f"required. Received: {late()}. Look at what it was doing, or give it more time "
                "with `timeout_seconds` in the strategy's communication options."
            )
