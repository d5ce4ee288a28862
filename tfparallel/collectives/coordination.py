"""What workers agree on without a collective: that all are here, when all stop, who leaves last.

Rests on TensorFlow's coordination service (`seams.tensorflow.coordination_service`), which its
multi-worker strategy starts and which has no public face.
"""

import atexit
import contextlib
import itertools
import sys
import threading
import time

import tensorflow as tf

from tfparallel.cluster.differences import name_workers
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.seams.tensorflow import coordination_service

_LOOK_MS = 500  # What a worker left is there at once, or never; a busy machine answers late.
_LISTEN_MS = 1000
_ANSWER_SECONDS = 60.0
_LEAVE_SECONDS = 5.0
# Every worker makes the same calls, and so counts alike.
_barriers, _agreements = itertools.count(), itertools.count()


def wait_for_all(workers: ProcessGroup, timeout_seconds: float) -> None:
    """Waits until all workers have called this; the error names those that did not.

    Raises:
        RuntimeError: If a worker did not come in time, or has died; on all workers, also on one
            that comes too late.
    """
    name = f"tfparallel/barrier/{next(_barriers)}"
    service = coordination_service()
    service.set_config_key_value(f"{name}/{workers.worker_index}", "here")
    try:
        service.wait_at_barrier(name, max(1, round(timeout_seconds * 1000)))
    except tf.errors.OpError as error:
        raise RuntimeError(_who_is_missing(service, name, workers, timeout_seconds)) from error
    service.delete_config_key_value(f"{name}/{workers.worker_index}")


def _who_is_missing(service, name, workers, timeout_seconds):
    present, missing = [], []
    for worker in range(workers.num_workers):
        try:
            if worker != workers.worker_index:
                service.get_config_key_value(f"{name}/{worker}", timeout_in_ms=_LOOK_MS)
            present.append(worker)
        except tf.errors.OpError:
            missing.append(worker)
    if missing:
        received = f"{name_workers(present)} came, {name_workers(missing)} did not"
    else:
        received = "the last came too late"
    return (
        f"Not all of the {workers.num_workers} workers came to the barrier within "
        f"{timeout_seconds:g} s of the first. All are required. Received: {received}. Look at what "
        "the others were doing, or give them more time with `timeout_seconds`."
    )


class PreemptionSync:
    """When the workers of a job stop; a context manager, entered by all of them.

    All stop before the same step, when one of them is told to. Workers step together: who stands
    before step n waits in vain for those that are in it, if they wait for this one. So each says
    which step it could stop before,

        worker 0   stands before step 12             12 ─┐
        worker 1   is in step 12, and says for it    13 ─┴─►  all stop before step 13

    which the thread of a worker can, while its step runs; and the largest is when all of them stop.

    Args:
        workers: They; None for one process, which need not ask.
    """

    def __init__(self, workers: ProcessGroup | None):
        self._workers = workers
        self._name = f"tfparallel/stop/{next(_agreements)}"
        self._lock = threading.RLock()
        self._asked, self._over = threading.Event(), threading.Event()
        self._next = 0  # The step that would begin next,
        self._in_step = False  # if none is running.
        self._said: int | None = None
        self._last: int | None = None  # Before it all stop.

    def __enter__(self) -> "PreemptionSync":
        if self._workers is not None:
            threading.Thread(target=self._listen, name="stop agreement", daemon=True).start()
        return self

    def __exit__(self, *_):
        self._over.set()

    def ask(self) -> None:
        """Asks all workers to stop; any thread may, and any worker."""
        if self._workers is not None:
            with contextlib.suppress(tf.errors.OpError):  # Another worker was faster.
                coordination_service().set_config_key_value(f"{self._name}/asked", "yes")
        self._learn()

    def stops_before(self, step: int) -> bool:
        """Whether all workers stop before this step of the training, which comes next here."""
        with self._lock:
            self._next, self._in_step = step, False
        if self._asked.is_set():
            self._say()
            if self._workers is None:
                return True
            if self._last is None:
                self._last = self._agreed()
            if step >= self._last:
                return True
        with self._lock:
            self._in_step = True
            if self._asked.is_set() and self._said is None:  # It came between.
                self._say()
        return False

    def ended(self) -> None:
        """Notes that the step has ended."""
        with self._lock:
            if self._in_step:
                self._next, self._in_step = self._next + 1, False

    def _learn(self):
        with self._lock:
            self._asked.set()
            if self._in_step:
                self._say()

    def _say(self):
        with self._lock:
            if self._said is not None:
                return
            self._said = self._next + self._in_step
            if self._workers is not None:
                key = f"{self._name}/{self._workers.worker_index}"
                coordination_service().set_config_key_value(key, str(self._said))

    def _agreed(self) -> int:
        """The step that all stop before; none at all if a worker does not answer."""
        deadline, said = time.monotonic() + _ANSWER_SECONDS, []
        for worker in range(self._workers.num_workers):
            left_ms = max(1, round(1000 * (deadline - time.monotonic())))
            try:
                key = f"{self._name}/{worker}"
                found = coordination_service().get_config_key_value(key, timeout_in_ms=left_ms)
            except tf.errors.OpError:
                return 2**62  # It is gone: the next step fails, and says so.
            said.append(int(found))
        return max(said)

    def _listen(self):
        while not self._over.is_set() and not self._asked.is_set():
            try:
                coordination_service().get_config_key_value(
                    f"{self._name}/asked", timeout_in_ms=_LISTEN_MS
                )
            except tf.errors.DeadlineExceededError:
                continue
            except tf.errors.OpError:
                return  # The job ends.
            if not self._over.is_set():
                self._learn()


def leave_in_order(workers: ProcessGroup) -> None:
    """Has worker 0 wait for the others when its program ends, for five seconds at most.

    The service lives in its process: a worker that outlives it, be it by a moment, misses a
    heartbeat, and TensorFlow writes of an error where there is none.
    """
    atexit.register(_leave, workers.worker_index, workers.num_workers)


def _leave(worker_index, num_workers):
    service = coordination_service()
    with contextlib.suppress(tf.errors.OpError):  # Somebody is gone already, or comes too late.
        if worker_index:
            service.set_config_key_value(f"tfparallel/left/{worker_index}", "left")
        elif getattr(sys, "last_value", None) is None:  # After an error, there is one to tell of.
            deadline = time.monotonic() + _LEAVE_SECONDS
            for worker in range(1, num_workers):
                left_ms = max(1, round(1000 * (deadline - time.monotonic())))
                name = f"tfparallel/left/{worker}"
                service.get_config_key_value(name, timeout_in_ms=left_ms)
