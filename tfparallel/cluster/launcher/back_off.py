"""The wait before all workers restart, which grows while they fail early.

    fails   at once   fails soon   1 s   fails soon   2 s   fails soon   4 s   …  1 minute

Workers that fail right after their start usually fail for a lasting reason: an unreachable file
system or host, a full disk. Without a wait, all restarts would be used up in seconds.
"""

_SOON_SECONDS = 60.0


class RestartBackOff:
    """No wait after the first failure; then 1 s, doubled each time, up to `most_seconds`."""

    def __init__(self, most_seconds: float = 60.0):
        self._most = most_seconds
        self._next: float | None = None

    def failed(self, lasted_seconds: float) -> float:
        """Records that the workers have failed; returns how many seconds to wait."""
        if self._next is None or lasted_seconds > _SOON_SECONDS:
            seconds, self._next = 0.0, 1.0
        else:
            seconds = min(self._next, self._most)
            self._next = 2 * seconds
        return seconds
