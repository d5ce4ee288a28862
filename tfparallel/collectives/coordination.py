"""Coordination of workers without a collective: barriers, joint stops, an orderly exit.

Relies on TensorFlow's coordination service (`seams.tensorflow.coordination_service`), which its
multi-worker strategy starts and which has no public API.
"""

import atexit
import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Iterator

import tensorflow as tf

from tfparallel.cluster.differences import name_workers
from tfparallel.collectives.chief_alone import check_all_take_part
from tfparallel.collectives.group import Group
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.seams.tensorflow import coordination_service

_LOOK_MS = 500  # A key that was set is there at once; a busy machine may answer late.
_LISTEN_MS = 1000
_ANSWER_SECONDS = 60.0
_LEAVE_SECONDS = 5.0
# Every worker makes the same calls, so the counts agree.
_barriers, _agreements = itertools.count(), itertools.count()
_group_barriers: dict[tuple[int, ...], Iterator[int]] = {}


def wait_for_all(workers: ProcessGroup, timeout_seconds: float) -> None:
    """Blocks until all workers have called this; the error names those that did not.

    Raises:
        RuntimeError: On all workers, if one does not arrive in time or has died; a late worker
            raises too.
    """
    check_all_take_part()
    name = f"tfparallel/barrier/{next(_barriers)}"
    service = coordination_service()
    service.set_config_key_value(f"{name}/{workers.worker_index}", "here")
    try:
        service.wait_at_barrier(name, max(1, round(timeout_seconds * 1000)))
    except tf.errors.OpError as error:
        everyone = range(workers.num_workers)
        raise RuntimeError(
            _who_is_missing(service, name, everyone, workers.worker_index, timeout_seconds)
        ) from error
    service.delete_config_key_value(f"{name}/{workers.worker_index}")


def wait_for_group(group: Group, timeout_seconds: float) -> None:
    """Blocks until all members of a group have called this; the error names those that did not.

    Raises:
        RuntimeError: If a member does not arrive in time.
    """
    check_all_take_part()
    name, service = f"tfparallel/barrier/{group.ranks}", coordination_service()
    number = next(_group_barriers.setdefault(group.ranks, itertools.count()))
    worker, deadline = group.ranks[group.rank], time.monotonic() + timeout_seconds
    service.set_config_key_value(f"{name}/{number}/{worker}", "here")
    for other in group.ranks:
        left_ms = max(1, round(1000 * (deadline - time.monotonic())))
        try:
            service.get_config_key_value(f"{name}/{number}/{other}", timeout_in_ms=left_ms)
        except tf.errors.OpError as error:
            place = f"{name}/{number}"
            raise RuntimeError(
                _who_is_missing(service, place, group.ranks, worker, timeout_seconds)
            ) from error
    if number:  # Everyone has left the barrier before.
        service.delete_config_key_value(f"{name}/{number - 1}/{worker}")


def _who_is_missing(service, name, workers, own_index, timeout_seconds):
    present, missing = [], []
    for worker in workers:
        try:
            if worker != own_index:
                service.get_config_key_value(f"{name}/{worker}", timeout_in_ms=_LOOK_MS)
            present.append(worker)
        except tf.errors.OpError:
            missing.append(worker)
    if missing:
        received = f"{name_workers(present)} arrived, {name_workers(missing)} did not"
    else:
        received = "the last one arrived too late"
    return (
        f"Not all {len(workers)} workers reached the barrier within {timeout_seconds:g} s "
        f"of the first. All are required. Received: {received}. Check what the others were doing, "
        "or allow more time with `timeout_seconds`."
    )


class PreemptionSync:
    """Stops all workers of a job before the same step. All of them enter it as a context manager.

    Any worker can request a stop. Steps contain collectives, so a worker that stopped before step n
    would hang the workers that are already in it. Each worker therefore publishes the next step
    that it could stop before, and all of them stop before the largest:

        worker 0   waits before step 12              12 ─┐
        worker 1   is in step 12                     13 ─┴─►  all stop before step 13

    A background thread publishes the number, even while a step runs.

    Args:
        workers: The workers; None for a single process.
    """

    def __init__(self, workers: ProcessGroup | None):
        self._workers = workers
        self._name = f"tfparallel/stop/{next(_agreements)}"
        self._lock = threading.RLock()
        self._requested, self._over = threading.Event(), threading.Event()
        self._next = 0  # The step that runs now or begins next.
        self._in_step = False
        self._published: int | None = None
        self._last: int | None = None  # The step that all workers stop before.

    def __enter__(self) -> "PreemptionSync":
        if self._workers is not None:
            threading.Thread(target=self._listen, name="stop agreement", daemon=True).start()
        return self

    def __exit__(self, *_):
        self._over.set()

    def ask(self) -> None:
        """Requests a stop of all workers; callable from any thread of any worker."""
        if self._workers is not None:
            with contextlib.suppress(tf.errors.OpError):  # Another worker has asked already.
                coordination_service().set_config_key_value(f"{self._name}/asked", "yes")
        self._learn()

    def stops_before(self, step: int) -> bool:
        """Whether all workers stop before `step`, the step that this worker would run next."""
        with self._lock:
            self._next, self._in_step = step, False
        if self._requested.is_set():
            self._publish()
            if self._workers is None:
                return True
            if self._last is None:
                self._last = self._agreed()
            if step >= self._last:
                return True
        with self._lock:
            self._in_step = True
            if self._requested.is_set() and self._published is None:  # Requested meanwhile.
                self._publish()
        return False

    def ended(self) -> None:
        """Records the end of the step."""
        with self._lock:
            if self._in_step:
                self._next, self._in_step = self._next + 1, False

    def _learn(self):
        with self._lock:
            self._requested.set()
            if self._in_step:
                self._publish()

    def _publish(self):
        with self._lock:
            if self._published is not None:
                return
            self._published = self._next + self._in_step
            if self._workers is not None:
                key = f"{self._name}/{self._workers.worker_index}"
                coordination_service().set_config_key_value(key, str(self._published))

    def _agreed(self) -> int:
        """Returns the step that all workers stop before; never, if a worker does not answer."""
        deadline, steps = time.monotonic() + _ANSWER_SECONDS, []
        for worker in range(self._workers.num_workers):
            left_ms = max(1, round(1000 * (deadline - time.monotonic())))
            try:
                key = f"{self._name}/{worker}"
                step = coordination_service().get_config_key_value(key, timeout_in_ms=left_ms)
            except tf.errors.OpError:
                return 2**62  # That worker is gone: the next step fails with its own error.
            steps.append(int(step))
        return max(steps)

    def _listen(self):
        while not self._over.is_set() and not self._requested.is_set():
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
    """Makes worker 0 wait at exit for the other workers, for at most five seconds.

    Worker 0 hosts the coordination service. A worker that outlives it even briefly misses a
    heartbeat, and TensorFlow logs a spurious error.
    """
    atexit.register(_leave, workers.worker_index, workers.num_workers)


def _leave(worker_index, num_workers):
    service = coordination_service()
    with contextlib.suppress(tf.errors.OpError):  # A worker is already gone, or late.
        if worker_index:
            service.set_config_key_value(f"tfparallel/left/{worker_index}", "left")
        elif getattr(sys, "last_value", None) is None:  # After a real error, do not wait.
            deadline = time.monotonic() + _LEAVE_SECONDS
            for worker in range(1, num_workers):
                left_ms = max(1, round(1000 * (deadline - time.monotonic())))
                name = f"tfparallel/left/{worker}"
                service.get_config_key_value(name, timeout_in_ms=left_ms)
