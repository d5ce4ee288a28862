"""Waits for other workers, with a deadline, and stops if one of them is lost."""

import copy
import os
import time
from collections.abc import Callable, Sequence

from tfparallel.collectives.lost_worker import WorkerLostError, lost_error

# Spin while the answer is imminent, then sleep. On a busy machine a sleeping process is woken
# promptly, while one that has used up its time slice resumes milliseconds later. Workers that share
# cores yield instead of spinning, so as not to occupy the core of the worker they wait for. A spin
# must not sleep, not even for zero seconds: that releases the core and doubles the time of the call
# (docs/internals/mpi.md). Python's other threads still run: the interpreter switches every 5 ms.
_SPIN_SECONDS = 3e-4
_NUM_SPINS = 50
_SLEEP_SECONDS = 5e-5
_MOST_SLEEP_SECONDS = 1e-3
_LOOK_EVERY = 256


class Waiting:
    """Waits for other workers.

    Args:
        lost: Returns the indices of the workers that have ended.
        timeout_seconds: How long a collective waits for the other workers; 0 means forever.
        has_core: Whether every worker has its own core.
    """

    def __init__(
        self,
        lost: Callable[[], Sequence[int]],
        timeout_seconds: float = 0.0,
        has_core: bool = False,
    ):
        self._lost = lost
        self._members: Sequence[int] | None = None
        self._spin_seconds = _SPIN_SECONDS if has_core else 0.0
        self.timeout_seconds = timeout_seconds

    def with_timeout(self, seconds: float) -> "Waiting":
        """Returns the same with another deadline."""
        waiting = copy.copy(self)
        waiting.timeout_seconds = seconds
        return waiting

    def for_members(self, workers: Sequence[int]) -> "Waiting":
        """Returns the same for some workers; the end of another one is no error."""
        waiting = copy.copy(self)
        waiting._members = workers
        return waiting

    def until(
        self, done: Callable[[], bool], late: Callable[[], str], *, may_sleep: bool = True
    ) -> None:
        """Returns once `done()` is true.

        Args:
            done: Called repeatedly.
            late: Describes the missing workers, for the error.
            may_sleep: Whether to sleep during a long wait; False for a transfer that only
                progresses while this process polls.

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
                # Sleep for a hundredth of the time waited so far: long waits poll rarely.
                time.sleep(min(max(_SLEEP_SECONDS, waited / 100), _MOST_SLEEP_SECONDS))
            elif waited > self._spin_seconds:
                os.sched_yield()

    def _look(self, waited, late):
        for lost in self._lost():
            if self._members is None or lost in self._members:
                raise lost_error(lost, "its connection was closed")
        if 0 < self.timeout_seconds < waited:
            raise WorkerLostError(
                f"A collective waited {self.timeout_seconds:g} s for the other workers. All are "
                f"required. Received: {late()}. Check what it was doing, or allow more time with "
                "`timeout_seconds`, of `new_group` or in the strategy's communication options."
            )
