"""Exponential back-off before retrying after early failures.

    joins, fails soon   10 s   joins, fails soon   20 s   joins, fails soon   40 s   …  10 minutes

Whenever a host joins or fails, all workers save their state and restart. A host that keeps failing
would leave the others no time to train.

    fails   at once   fails soon   1 s   fails soon   2 s   fails soon   4 s   …  1 minute

Workers that fail right after their start usually fail for a lasting reason: an unreachable file
system or host, a full disk. Without a wait, all restarts would be used up in seconds.
"""

__all__ = ["BackOff", "RestartBackOff"]


class BackOff:
    """The wait of joining hosts: `first_seconds`, then doubled each time, up to `most_seconds`.

    A failure later than `soon_seconds` after the start resets it: the host has done some work.
    """

    def __init__(
        self,
        first_seconds: float = 10.0,
        most_seconds: float = 600.0,
        soon_seconds: float = 300.0,
    ):
        self._first, self._most, self._soon = first_seconds, most_seconds, soon_seconds
        self._seconds = self._until = 0.0

    def failed(self, lasted_seconds: float, now: float) -> float:
        """Records that a host that joined has failed, at the monotonic time `now`.

        Returns:
            How many seconds the next host must wait.
        """
        if lasted_seconds > self._soon:
            self._seconds = 0.0
        else:
            self._seconds = min(max(self._first, 2 * self._seconds), self._most)
        self._until = now + self._seconds
        return self._seconds

    def remaining(self, now: float) -> float:
        """Returns the remaining seconds of the wait."""
        return max(0.0, self._until - now)


class RestartBackOff:
    """The wait before all workers restart. There is none after the first failure."""

    def __init__(self, most_seconds: float = 60.0):
        self._back_off = BackOff(1.0, most_seconds, soon_seconds=60.0)
        self._has_failed = False

    def failed(self, lasted_seconds: float) -> float:
        """Records that the workers have failed; returns how many seconds to wait."""
        if not self._has_failed:
            self._has_failed = True
            return 0.0
        return self._back_off.failed(lasted_seconds, now=0.0)
