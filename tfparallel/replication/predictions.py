"""Gathers the predictions of several workers.

| `gather_to` | each step | after the last step |
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

_CHUNK_BYTES = 2**22  # The most that a worker other than the chief receives at a time.


def check_gather_to(gather_to: str | None, keeps_rows: bool) -> None:
    """Raises unless predictions can be gathered this way.

    Args:
        gather_to: As for `DataParallelModel.predict`.
        keeps_rows: Whether the model's step of prediction is Keras's own.

    Raises:
        ValueError: If the value is unknown, or not "all" for a user's own `predict_step`.
    """
    if gather_to not in ("all", "chief", None):
        raise ValueError(
            '`gather_to` must be "all", "chief", or None, which leaves predictions where they are. '
            f"Received: gather_to={gather_to!r}."
        )
    if gather_to != "all" and not keeps_rows:
        raise ValueError(
            "A custom `predict_step` may combine rows, so it needs the rows of all workers and the "
            "default `gather_to`. Received: a model with a custom `predict_step`, and "
            f"gather_to={gather_to!r}. Remove `gather_to` or `predict_step`."
        )


class PredictionsOfWorkers(keras.callbacks.Callback):
    """Counts this worker's rows of each batch, and gathers all rows on the chief.

    Args:
        workers: The strategy's `ProcessGroup`.
    """

    def __init__(self, workers: ProcessGroup):
        super().__init__()
        self._workers = workers
        self._counts: list[list[int]] = []

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the rows of a batch; for the first batch, checks that they can be sent."""
        leaves = keras.tree.flatten(logs["outputs"])
        if not self._counts:
            for leaf in leaves:
                movable(tf.convert_to_tensor(leaf))
        self._counts.append([int(leaf.shape[0]) for leaf in leaves])

    def at_chief(self, predictions: Any) -> Any:
        """Gathers the predictions of all batches on the chief.

        Args:
            predictions: Structure of arrays, shape `(rows, …)`: this worker's predictions, batch
                by batch.

        Returns:
            On the chief, the same structure with the rows of all workers, in the order of the
            examples; None on other workers.
        """
        counts = np.array(  # (worker, batch, output)
            self._workers.exchange(self._counts, "the end of `predict(gather_to=…)`")
        )
        leaves = [
            self._joined(np.asarray(leaf), counts[:, :, index])
            for index, leaf in enumerate(keras.tree.flatten(predictions))
        ]
        is_chief = self._workers.worker_index == 0
        return keras.tree.pack_sequence_as(predictions, leaves) if is_chief else None

    def _joined(self, output, counts):
        """Gathers the rows of one output; `counts[w, b]` are those of worker w in batch b."""
        totals = counts.sum(axis=1)
        size = max(1, _CHUNK_BYTES // max(1, output.itemsize * int(np.prod(output.shape[1:]))))
        by_worker: list[list[np.ndarray]] = [[] for _ in totals]
        for start in range(0, int(totals.max()), size):
            sizes = np.clip(totals - start, 0, size).tolist()
            chunk = tf.convert_to_tensor(output[start : start + size])
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
