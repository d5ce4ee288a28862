"""Signals that stop a job on Ray. Ray's own handlers would end the driver without a save."""

import os
import signal
from collections.abc import Sequence

from tfparallel.cluster.launcher.supervisor import StopRequest
from tfparallel.cluster.preemption import SignalWatch


class StopSignals(SignalWatch):
    """Notes signals until `check` is called: an exception from a handler would break a call of Ray.

    Enter it once Ray is initialized, which sets handlers. Ignored signals stay ignored.

    Args:
        numbers: The signals.
    """

    def __init__(self, numbers: Sequence[int]):
        watched = [each for each in numbers if signal.getsignal(each) is not signal.SIG_IGN]
        super().__init__(watched, self._note)
        self._received: int | None = None

    def check(self) -> None:
        """Raises `StopRequest` after a signal."""
        if self._received is not None:
            raise StopRequest(self._received)

    def _note(self, number):
        # A second Ctrl-C exits at once, and Ray ends the workers.
        if self._received is not None and number == signal.SIGINT:
            os._exit(128 + number)
        self._received = self._received or number
