"""Ends a worker that makes no step any more, since those that wait for it cannot.

A worker that dies is noticed by TensorFlow: its connections close. One that hangs is not: its
connections live, and a collective waits for it, for ever. A deadline for each collective,
TensorFlow's `timeout_seconds`, keeps a timer for each until it expires, of tens a step. So each
worker watches itself, from a thread: a step or a pause between two of them that lasts longer than
allowed ends the process. The one that hangs ends first, and its stack says where; the others, whose
step waits for it, end a little later if that has not freed them.
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

__all__ = ["StallGuard"]

_HEAD_START = 0.1  # Of the timeout: how much later than the one that hangs the others end.


class StallGuard(keras.callbacks.Callback):
    """Watches over the steps of `fit`, `evaluate` or `predict` of one worker.

    Its place is behind all other callbacks, whose work belongs to the pause between two steps.
    Between such calls it watches what is done within `waiting`.

    Args:
        timeout_seconds: How long a pause between two steps may last; a step a tenth more. Tracing,
            validation and checkpoints count, so it is minutes, not seconds.
        worker_index: The worker's own, for what it says.
    """

    async_safe = takes_tensors = True  # It looks whether there are logs, and reads none.

    def __init__(self, timeout_seconds: float, worker_index: int):
        super().__init__()
        self.timeout_seconds = timeout_seconds
        self._worker_index = worker_index
        # Whether a step is watched, and since when: one value, which the thread reads at once.
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
        """Counts what all workers do together as a step: the one that hangs ends first."""
        outer = self._watched
        self._tick(True)
        try:
            yield
        finally:
            self._watched = None if outer is None else (outer[0], time.monotonic())

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._tick(True)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that a step has ended; not if its logs are on a GPU, which may be at work."""
        logs = (logs or {}).values()
        self._tick(any(map(_is_on_gpu, logs)))

    def on_predict_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that a step of `predict` has ended: Keras has waited for what it puts out."""
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
            "a step has lasted longer: another worker, or the data that the step waits for, hangs"
            if in_step
            else "no step has begun for longer: a callback, the data or the program hangs here"
        )
        print(
            f"\nWorker {self._worker_index} makes no progress; a step, or the pause between two, "
            f"of at most {allowed:.0f} s is required. Received: {what}. The worker ends. A larger "
            "deadline: --stall_timeout, or MultiWorkerMirroredStrategy(stall_timeout=...). The "
            "stacks of its threads:",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        os._exit(TRY_AGAIN)  # The main thread may be where no exception reaches it.


def _is_on_gpu(log) -> bool:
    return tf.is_tensor(log) and "GPU" in log.device
