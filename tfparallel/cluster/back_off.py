"""How long hosts that would join a running job wait, after others that joined have failed.

    joins, fails soon   10 s   joins, fails soon   20 s   joins, fails soon   40 s   …  10 minutes

Each host that joins has all workers save their state and start again, and so has each that fails.
One that fails again and again would leave the others no time to train.
"""

__all__ = ["BackOff"]

_FIRST_SECONDS, _MOST_SECONDS = 10.0, 600.0
_SOON_SECONDS = 300.0


class BackOff:
    """The wait of the hosts that would join.

    Args:
        first_seconds: How long it is after the first failure; each further one doubles it.
        most_seconds: What it never exceeds.
        soon_seconds: A host that fails later than this after it joined has taken part: what was
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
