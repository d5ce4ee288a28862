"""What each step of a `fit` takes: seconds, and bytes handed to other workers."""

import array
import time
from typing import Any

import keras
import numpy as np

from tfparallel.collectives.process_group import ProcessGroup

__all__ = ["SentBytes", "StepTime"]

# The first steps of a `fit` also hold the workers' batches against each other, and the last batch
# of an epoch may be short.
_STEP = 3


class StepTime(keras.callbacks.Callback):
    """Records the wall time of every training step.

    A step is timed from Keras's call before the batch to its call after it; fetching the batch, the
    forward and backward pass, the reduction and the update lie between the two. The first step of a
    `fit` also traces and compiles the program, so it is kept apart. Keras reads a step's logs for
    it, so that a GPU is done when the clock stops, and waits for the next step.

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
        self.seconds = array.array("d")

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
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


class SentBytes(keras.callbacks.Callback):
    """Records how many bytes a training step hands to the other workers.

    Attributes:
        in_a_step: Bytes of "sums" (gradients, losses, metrics), of "slices" (gradients of
            embeddings) and of "rows" (such as predictions, where they meet), in the third step of
            the latest epoch, or in its last where it has fewer. None before a step, and in a job
            of one process. With `steps_per_execution`, those of an execution.

    Example:
        >>> sent = tfparallel.callbacks.SentBytes()
        >>> model.fit(x, y, callbacks=[sent])
        >>> print(sent.in_a_step)  # One process sends nothing.
        None
    """

    async_safe = takes_tensors = True  # It reads no logs.

    def __init__(self):
        super().__init__()
        self.in_a_step: dict[str, int] | None = None
        self._num_steps = 0
        self._before: dict[str, int] = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._num_steps = 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._num_steps += 1
        if self._is_read:
            self._before = ProcessGroup.of_process.traffic.read()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._is_read:
            after = ProcessGroup.of_process.traffic.read()
            self.in_a_step = {kind: after[kind] - self._before[kind] for kind in after}

    @property
    def _is_read(self) -> bool:
        return ProcessGroup.of_process is not None and self._num_steps <= _STEP
