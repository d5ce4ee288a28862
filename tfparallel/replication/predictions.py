"""Where the predictions of several workers go.

| `gather_to` | a step | behind the last step |
| --- | --- | --- |
| "all" | joins them on each worker | nothing |
| "chief" | keeps its rows | the chief gets them, a few MiB at a time |
| None | keeps its rows | nothing |
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfparallel.collectives.packing import movable
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.collectives.traffic import ROWS

__all__ = ["PredictionsOfWorkers", "check_gather_to"]

_CHUNK_BYTES = 2**22  # What a worker that is not the chief holds of the others at a time.


def check_gather_to(gather_to: str | None, keeps_rows: bool) -> None:
    """Raises unless predictions can go there.

    Args:
        gather_to: As for `DataParallelModel.predict`.
        keeps_rows: Whether the model's step of prediction is Keras's own.

    Raises:
        ValueError: If it is none of the places, or the step is one that may do anything with rows.
    """
    if gather_to not in ("all", "chief", None):
        raise ValueError(
            'Predictions go to "all" workers, to the "chief", or stay where they are (None). '
            f"Received: gather_to={gather_to!r}."
        )
    if gather_to != "all" and not keeps_rows:
        raise ValueError(
            "What a `predict_step` of one's own makes of the rows is known to itself alone, so it "
            "is given those of all workers. Received: a model with such a step, and "
            f"gather_to={gather_to!r}. Leave out `gather_to`, or `predict_step`."
        )


class PredictionsOfWorkers(keras.callbacks.Callback):
    """Counts this worker's rows of each batch, and brings all to the chief.

    Args:
        workers: The strategy's `ProcessGroup`.
    """

    def __init__(self, workers: ProcessGroup):
        super().__init__()
        self._workers = workers
        self._counts: list[list[int]] = []

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the rows of a batch; of the first it asks whether they can be sent."""
        leaves = keras.tree.flatten(logs["outputs"])
        if not self._counts:
            for leaf in leaves:
                movable(tf.convert_to_tensor(leaf))
        self._counts.append([int(leaf.shape[0]) for leaf in leaves])

    def at_chief(self, own: Any) -> Any:
        """Brings the rows of all batches together.

        Args:
            own: Structure of arrays, shape `(rows, …)`: what this worker predicted, batch by batch.

        Returns:
            At the chief, the same structure of the rows of all workers, in the order of the
            examples; None elsewhere.
        """
        everyones = np.array(  # (worker, batch, output)
            self._workers.exchange(self._counts, "the end of `predict(gather_to=…)`")
        )
        leaves = [
            self._joined(np.asarray(leaf), everyones[:, :, index])
            for index, leaf in enumerate(keras.tree.flatten(own))
        ]
        is_chief = self._workers.worker_index == 0
        return keras.tree.pack_sequence_as(own, leaves) if is_chief else None

    def _joined(self, own, counts):
        """The rows of one output, `counts[w, b]` of worker w in batch b."""
        totals = counts.sum(axis=1)
        size = max(1, _CHUNK_BYTES // max(1, own.itemsize * int(np.prod(own.shape[1:]))))
        by_worker: list[list[np.ndarray]] = [[] for _ in totals]
        for start in range(0, int(totals.max()), size):
            sizes = np.clip(totals - start, 0, size).tolist()
            chunk = tf.convert_to_tensor(own[start : start + size])
            (rows,) = self._workers.all_gather([chunk], sizes, ROWS)
            if self._workers.worker_index == 0:
                parts = np.split(rows.numpy(), np.cumsum(sizes)[:-1])
                for received, part in zip(by_worker, parts, strict=True):
                    received.append(part)
        if self._workers.worker_index:
            return None
        batches = [
            np.split(np.concatenate(received), np.cumsum(of_batches)[:-1])
            for received, of_batches in zip(by_worker, counts, strict=True)
        ]
        return np.concatenate([part for batch in zip(*batches, strict=True) for part in batch])
