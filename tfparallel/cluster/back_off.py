"""How long to wait before what has failed soon is tried again, twice as long each time.

    joins, fails soon   10 s   joins, fails soon   20 s   joins, fails soon   40 s   …  10 minutes

Each host that joins has all workers save their state and start again, and so has each that fails.
One that fails again and again would leave the others no time to train.

    fails   at once   fails soon   1 s   fails soon   2 s   fails soon   4 s   …  1 minute

Workers that fail as soon as they have started mostly fail by what takes a while to change: a file
system or a host that cannot be reached, a full disk. All restarts would be used up in seconds.
"""

__all__ = ["BackOff", "RestartBackOff"]


class BackOff:
    """The wait of the hosts that would join: `first_seconds`, then twice as long, up to a maximum.

    What fails later than `soon_seconds` after its start has done some work: what was before is
    forgotten.
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
        """Takes note that a host that joined has failed, at the monotonic time `now`.

        Returns:
            How many seconds the next one waits.
        """
        if lasted_seconds > self._soon:
            self._seconds = 0.0
        else:
            self._seconds = min(max(self._first, 2 * self._seconds), self._most)
        self._until = now + self._seconds
        return self._seconds

    def remaining(self, now: float) -> float:
        """How many seconds of the wait are left."""
        return max(0.0, self._until - now)


class RestartBackOff:
    """The wait before all workers start again. After the first failure there is none."""

    def __init__(self, most_seconds: float = 60.0):
        self._back_off = BackOff(1.0, most_seconds, soon_seconds=60.0)
        self._has_failed = False

    def failed(self, lasted_seconds: float) -> float:
        """Takes note that the workers have failed; returns how many seconds to wait."""
        if not self._has_failed:
            self._has_failed = True
            return 0.0
        return self._back_off.failed(lasted_seconds, now=0.0)
