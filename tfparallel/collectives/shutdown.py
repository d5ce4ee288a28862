"""Worker 0 leaves last, for TensorFlow's coordination service lives in its process.

A worker that outlives it, be it by a moment, misses a heartbeat, and TensorFlow writes of an error
where there is none.
"""

import atexit
import sys
import time

import tensorflow as tf

from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.seams.tensorflow import coordination_service

__all__ = ["leave_in_order"]

_DEADLINE_SECONDS = 5.0


def leave_in_order(workers: ProcessGroup) -> None:
    """Has worker 0 wait for the others when its program ends, for five seconds at most."""
    atexit.register(_leave, workers.worker_index, workers.num_workers)


def _leave(worker_index, num_workers):
    service = coordination_service()
    try:
        if worker_index:
            service.set_config_key_value(_key(worker_index), "left")
        elif getattr(sys, "last_value", None) is None:  # After an error, there is one to tell of.
            deadline = time.monotonic() + _DEADLINE_SECONDS
            for worker in range(1, num_workers):
                left_ms = max(1, round(1000 * (deadline - time.monotonic())))
                service.get_config_key_value(_key(worker), timeout_in_ms=left_ms)
    except tf.errors.OpError:
        pass  # Somebody is gone already, or comes too late.


def _key(worker):
    return f"tfparallel/left/{worker}"
