"""What a worker hands to the others in a step of `fit`."""

from typing import Any

import keras

from tfparallel.collectives.process_group import ProcessGroup

__all__ = ["SentBytes"]

# The first steps of a `fit` also hold the workers' batches against each other, and the last batch
# of an epoch may be short.
_STEP = 3


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
        """Counts from the first step again."""
        self._num_steps = 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads the counters."""
        self._num_steps += 1
        if self._is_read:
            self._before = ProcessGroup.of_process.traffic.read()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads them again."""
        if self._is_read:
            after = ProcessGroup.of_process.traffic.read()
            self.in_a_step = {kind: after[kind] - self._before[kind] for kind in after}

    @property
    def _is_read(self) -> bool:
        return ProcessGroup.of_process is not None and self._num_steps <= _STEP
