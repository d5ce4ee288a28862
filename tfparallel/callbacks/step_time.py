"""The time that each step of a `fit` takes."""

import array
import time
from typing import Any

import keras
import numpy as np

__all__ = ["StepTime"]


class StepTime(keras.callbacks.Callback):
    """Records the wall time of every training step.

    A step is timed from Keras's call before the batch to its call after it;
    fetching the batch, the forward and backward pass, the reduction and the
    update lie between the two. The first step of a `fit` also traces and
    compiles the program, so it is kept apart. Keras reads a step's logs for it,
    so that a GPU is done when the clock stops, and waits for the next step.

    Attributes:
        seconds: One entry a step (an execution of several steps, with
            `steps_per_execution`), the first step included.

    Example:
        >>> times = tfparallel.callbacks.StepTime()
        >>> model.fit(x, y, batch_size=16, callbacks=[times])
        >>> sorted(times.summary())
        ['first', 'p10', 'p50', 'p90']
    """

    def __init__(self):
        super().__init__()
        self.seconds = array.array("d")  # A list would take four times the memory.
        self._begin = 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forgets what an earlier `fit` took."""
        self.seconds = array.array("d")

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the clock."""
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Stops the clock."""
        self.seconds.append(time.perf_counter() - self._begin)

    def summary(self) -> dict[str, float]:
        """Returns the percentiles in seconds; only those that were measured.

        Returns:
            `"first"` for the first step, and `"p10"`, `"p50"`, `"p90"` of the others.
        """
        if not self.seconds:
            return {}
        result = {"first": self.seconds[0]}
        if len(self.seconds) > 1:
            p10, p50, p90 = np.percentile(self.seconds[1:], [10, 50, 90])
            result |= {"p10": float(p10), "p50": float(p50), "p90": float(p90)}
        return result
