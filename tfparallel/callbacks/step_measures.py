"""Measures each step of `fit`: seconds, and bytes passed to other workers."""

import array
import time
from typing import Any

import keras
import numpy as np

from tfparallel.collectives.process_group import ProcessGroup

# The first steps of a `fit` also compare the workers' batches, and the last batch of an epoch may
# be short.
_STEP = 3


class StepTime(keras.callbacks.Callback):
    """Records the wall time of every training step.

    A step is timed between Keras's callbacks before and after the batch: fetching the batch, the
    forward and backward pass, the reduction and the update. The first step of a `fit` also traces
    and compiles the program, so it is reported separately. Keras reads the step's logs for this
    callback, so the GPU has finished when the clock stops, and idles until the next step.

    Attributes:
        seconds: One entry per step, including the first (per execution, with
            `steps_per_execution`).

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
        """Returns percentiles in seconds, as far as there are measurements.

        Returns:
            `"first"` for the first step, and `"p10"`, `"p50"`, `"p90"` over the other steps.
        """
        if not self.seconds:
            return {}
        result = {"first": self.seconds[0]}
        if len(self.seconds) > 1:
            p10, p50, p90 = np.percentile(self.seconds[1:], [10, 50, 90])
            result |= {"p10": float(p10), "p50": float(p50), "p90": float(p90)}
        return result


class SentBytes(keras.callbacks.Callback):
    """Records the number of bytes that a training step passes to the other workers.

    Attributes:
        in_a_step: Bytes of "sums" (gradients, losses, metrics), "slices" (gradients of embeddings)
            and "rows" (such as gathered predictions) in the third step of the latest epoch, or in
            its last step if it has fewer. None before the first step, and in a single process. With
            `steps_per_execution`, the bytes of one execution.

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
