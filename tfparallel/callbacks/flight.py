"""Writes a worker's flight record during training."""

import contextlib
import hashlib
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any

import keras

from tfparallel.collectives.lost_worker import WorkerLostError
from tfparallel.flight.marks import Marks
from tfparallel.flight.record import FOLDER, FlightRecord, path_of
from tfparallel.user_log import notice

_LOOK_SECONDS = 0.5
_NUM_FRAMES = 8
_STANDS_SECONDS = 2.0  # An activity that lasts longer gets its stack recorded.


class FlightRecorder(keras.callbacks.Callback):
    """Records the steps of `fit`: when each one began, received its data, ran forward, and so on.

    It is a context manager around `fit`. List it after all other callbacks, and `step_end` before
    them: their work counts as the pause between two steps.

    Args:
        folder: The folder of the record, which is named after the worker.
        worker_index: The index of this worker.
        num_workers: The number of workers.

    Attributes:
        step_end: A callback that records the end of a step before the other callbacks run.
    """

    async_safe = takes_tensors = True  # It reads no logs.

    def __init__(self, folder: str, worker_index: int, num_workers: int):
        super().__init__()
        if Marks.current is None:  # Traced graphs keep writing to these marks in later `fit`s.
            attempt = int(os.environ.get("TFPARALLEL_RESTART_COUNT", "0"))
            token = os.environ.get("TFPARALLEL_JOB_TOKEN", "")
            about = {
                "worker": worker_index,
                "num_workers": num_workers,
                "num_local": int(os.environ.get("LOCAL_WORLD_SIZE", num_workers)),
                "job": hashlib.sha256(token.encode()).hexdigest()[:12],
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "attempt": attempt,
                "started": time.time(),
            }
            path = path_of(folder, worker_index, attempt)
            Marks.current = Marks(FlightRecord(path, about))
        self._marks = Marks.current
        self.step_end = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: self._end_step(),
            async_safe=True,
            takes_tensors=True,
        )
        self._step, self._num_before = -1, self._marks.step + 1 if self._marks.names else 0
        self._begin = self._last = time.time()
        self._pause = "before the first step"
        self._over = threading.Event()
        self._since, self._has_looked = self._begin, False

    @classmethod
    def if_enabled(cls, worker_index: int, num_workers: int) -> contextlib.AbstractContextManager:
        """Returns a recorder if `tfparallel launch` has created its folder, else a null context."""
        folder = os.environ.get(FOLDER)
        if not folder or not os.path.isdir(folder):
            return contextlib.nullcontext()
        try:
            return cls(folder, worker_index, num_workers)
        except (OSError, ValueError) as error:  # A full disk, or a file system without mmap.
            notice(f"No flight record is written to {folder}: {error}.")
            return contextlib.nullcontext()

    def __enter__(self) -> "FlightRecorder":
        self._marks.record.begin()
        self._now("before the first step")
        main = threading.get_ident()
        threading.Thread(target=self._watch, args=(main,), name="flight", daemon=True).start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._over.set()
        self._marks.read()
        self._marks.record.alive(time.time())
        lost = error.worker if isinstance(error, WorkerLostError) else None
        self._marks.record.end("well" if error is None else f"{kind.__name__}: {error}", lost)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step += 1
        self._begin = time.time()
        self._marks.step = step = self._num_before + self._step
        self._marks.record.add([(self._pause, step, self._last, self._begin)])
        self._pause = "between steps"
        self._now("in a step", self._begin)

    def _end_step(self):
        self._last = time.time()
        is_one = self.model.steps_per_execution == 1
        self._marks.end_step(self._begin, self._last, is_one=is_one)
        self._now("between steps", self._last)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._pause = "between epochs"
        self._now(f"between epochs {epoch} and {epoch + 1}")

    def on_test_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._now(f"in step {batch} of validation")

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._now("in validation, between steps")

    def _now(self, what, when=None):
        when = time.time() if when is None else when
        self._marks.record.now(what, self._marks.step, when)
        self._since, self._has_looked = when, False

    def _watch(self, main_thread):
        while not self._over.wait(_LOOK_SECONDS):
            self._marks.read()
            self._marks.record.alive(time.time())
            if not self._has_looked and time.time() - self._since > _STANDS_SECONDS:
                self._has_looked = True
                frame = sys._current_frames().get(main_thread)
                stack = traceback.extract_stack(frame)[-_NUM_FRAMES:]
                lines = [f"{each.filename}:{each.lineno}, in {each.name}" for each in stack]
                self._marks.record.stands_at("\n".join(lines))
