"""How long to wait before what has failed soon is tried again, twice as long each time.

    joins, fails soon   10 s   joins, fails soon   20 s   joins, fails soon   40 s   …  10 minutes

Each host that joins has all workers save their state and start again, and so has each that fails.
One that fails again and again would leave the others no time to train.

    fails   at once   fails soon   1 s   fails soon   2 s   fails soon   4 s   …  1 minute

Workers that fail as soon as they have started mostly fail by what takes a while to change: a file
system or a host that cannot be reached, a full disk. All restarts would be used up in seconds.
"""

__all__ = ["BackOff", "RestartBackOff"]

_FIRST_SECONDS, _MOST_SECONDS = 10.0, 600.0
_SOON_SECONDS = 300.0


class BackOff:
    """The wait of the hosts that would join.

    Args:
        first_seconds: How long it is after the first failure; each further one doubles it.
        most_seconds: What it never exceeds.
        soon_seconds: What fails later than this after its start has done some work: what was
            before is forgotten.
    """

    def __init__(
        self,
        first_seconds: float = _FIRST_SECONDS,
        most_seconds: float = _MOST_SECONDS,
        soon_seconds: float = _SOON_SECONDS,
    ):
        self._first, self._most, self._soon = first_seconds, most_seconds, soon_seconds
        self._seconds = 0.0
        self._until = 0.0

    def failed(self, lasted_seconds: float, now: float) -> float:
        """Takes note that a host that joined has failed.

        Args:
            lasted_seconds: How long it took part.
            now: The time, by the monotonic clock.

        Returns:
            How long the next one waits.
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
    """The wait before all workers start again. After the first failure there is none.

    Args:
        most_seconds: What it never exceeds.
    """

    def __init__(self, most_seconds: float = 60.0):
        self._back_off = BackOff(1.0, most_seconds, soon_seconds=60.0)
        self._has_failed = False

    def failed(self, lasted_seconds: float) -> float:
        """Takes note that the workers have failed.

        Args:
            lasted_seconds: How long they ran.

        Returns:
            How many seconds to wait.
        """
        if not self._has_failed:
            self._has_failed = True
            return 0.0
        return self._back_off.failed(lasted_seconds, now=0.0)
