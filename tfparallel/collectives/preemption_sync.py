"""All workers stop before the same step, when one of them is told to.

Workers step together: who stands before step n waits in vain for those that are in it, if they
wait for this one. So each says which step it could stop before,

    worker 0   stands before step 12             12 ─┐
    worker 1   is in step 12, and says for it    13 ─┴─►  all stop before step 13

which the thread of a worker can, while its step runs; and the largest is when all of them stop.
What is said goes through TensorFlow's coordination service (`seams.tensorflow`).
"""

import itertools
import threading
import time

import tensorflow as tf

from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.seams.tensorflow import coordination_service

__all__ = ["PreemptionSync"]

_LOOK_MS = 1000
_ANSWER_SECONDS = 60.0
_numbers = itertools.count()  # Every worker makes the same agreements, and so counts alike.


class PreemptionSync:
    """When the workers of a job stop; a context manager, entered by all of them.

    Args:
        workers: They; None for one process, which need not ask.
    """

    def __init__(self, workers: ProcessGroup | None):
        self._workers = workers
        self._name = f"tfparallel/stop/{next(_numbers)}"
        self._lock = threading.Lock()
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
            try:
                coordination_service().set_config_key_value(f"{self._name}/asked", "yes")
            except tf.errors.OpError:
                pass  # Another worker was faster.
        self._learn()

    def stops_before(self, step: int) -> bool:
        """Whether all workers stop before a step, which this one is about to begin.

        Args:
            step: Its number in this training, the same on all workers.
        """
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
                self._say_locked()
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
                self._say_locked()

    def _say(self):
        with self._lock:
            self._say_locked()

    def _say_locked(self):
        if self._said is None:
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
                    f"{self._name}/asked", timeout_in_ms=_LOOK_MS
                )
            except tf.errors.DeadlineExceededError:
                continue
            except tf.errors.OpError:
                return  # The job ends.
            if not self._over.is_set():
                self._learn()
