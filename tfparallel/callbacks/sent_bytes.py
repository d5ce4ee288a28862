"""What a worker hands to the others in a step of `fit`."""

from typing import Any

import keras

from tfparallel.collectives.between_workers import WorkerGroup

__all__ = ["SentBytes"]


class SentBytes(keras.callbacks.Callback):
    """Records how many bytes the last training step handed to the other workers.

    Attributes:
        last_step: Bytes of "sums" (gradients, losses, metrics), of "slices" (gradients of
            embeddings) and of "rows" (such as predictions, where they meet). None before a step,
            and in a job of one process. With `steps_per_execution`, those of all its steps.
    """

    def __init__(self):
        super().__init__()
        self.last_step: dict[str, int] | None = None
        self._before: dict[str, int] | None = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads the counters."""
        self._before = _read()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads them again."""
        after = _read()
        if after is not None and self._before is not None:
            self.last_step = {kind: after[kind] - self._before[kind] for kind in after}


def _read() -> dict[str, int] | None:
    workers = WorkerGroup.of_process
    return None if workers is None else workers.traffic.read()
