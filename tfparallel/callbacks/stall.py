"""Ends a worker that makes no progress, since the workers that wait for it cannot.

TensorFlow notices a worker that dies, because its connections close. It does not notice one that
hangs: the connections stay open, and collectives wait for it forever. TensorFlow's
`timeout_seconds` keeps a timer alive for every collective, of which there are tens per step. So
each worker watches itself from a thread: if a step, or a pause between two steps, lasts too long,
the process ends. The hanging worker ends first, and its stack shows where; the others, whose step
waits for it, end a little later unless that has released them.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfparallel.cluster.preemption import TRY_AGAIN

_HEAD_START = 0.1  # Fraction of the timeout by which the other workers end later.


class StallGuard(keras.callbacks.Callback):
    """Watches the steps of `fit`, `evaluate` or `predict` on one worker.

    List it after all other callbacks, whose work counts as the pause between two steps. Outside
    these calls, it watches blocks in the context of `waiting`.

    Args:
        timeout_seconds: Maximum pause between two steps; a step may last a tenth longer. Tracing,
            validation and checkpoints count, so this should be minutes, not seconds.
        worker_index: Index of this worker, for messages.
    """

    async_safe = takes_tensors = True  # It inspects the logs' devices, but reads no values.

    def __init__(self, timeout_seconds: float, worker_index: int):
        super().__init__()
        self.timeout_seconds = timeout_seconds
        self._worker_index = worker_index
        # (in a step, since when): a single value, so that the thread reads it atomically.
        self._watched: tuple[bool, float] | None = None
        self._ended = threading.Event()

    def __enter__(self):
        self._tick(False)
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self) -> None:
        """Starts the thread. Nothing is timed until `__enter__` or `waiting` begins."""
        threading.Thread(target=self._watch, name="stall guard", daemon=True).start()

    def stop(self) -> None:
        """Ends the thread."""
        self._ended.set()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Times a collective block like a step, so that the hanging worker ends first."""
        outer = self._watched
        self._tick(True)
        try:
            yield
        finally:
            self._watched = None if outer is None else (outer[0], time.monotonic())

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._tick(True)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the end of a step, unless its logs are on a GPU, which may still be working."""
        logs = (logs or {}).values()
        self._tick(any(map(_is_on_gpu, logs)))

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Records the end of a step of `predict`: Keras has waited for its outputs."""
        self._tick(False)

    on_test_batch_begin = on_predict_batch_begin = on_train_batch_begin
    on_test_batch_end = on_train_batch_end

    def _tick(self, in_step):
        self._watched = in_step, time.monotonic()

    def _watch(self):
        while not self._ended.wait(min(self.timeout_seconds / 20, 5.0)):
            if (watched := self._watched) is None:
                continue
            in_step, since = watched
            allowed = self.timeout_seconds * (1 + _HEAD_START * in_step)
            if time.monotonic() - since > allowed:
                self._end(allowed, in_step)

    def _end(self, allowed, in_step):
        what = (
            "a step has taken longer: another worker, or the data that the step waits for, hangs"
            if in_step
            else "no step has started for longer: a callback, the data or the program hangs here"
        )
        print(
            f"\nWorker {self._worker_index} makes no progress; a step, or the pause between two "
            f"steps, may take at most {allowed:.0f} s. Received: {what}. The worker exits. To "
            "allow more time, set --stall_timeout or "
            "MultiWorkerMirroredStrategy(stall_timeout=...). The stacks of its threads:",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        os._exit(TRY_AGAIN)  # No exception may reach the main thread where it hangs.


def _is_on_gpu(log) -> bool:
    return tf.is_tensor(log) and "GPU" in log.device
