"""A barrier between the workers, whose error names those that did not come.

Rests on TensorFlow's coordination service (`seams.tensorflow.coordination_service`), which its
multi-worker strategy starts and which has no public face. No collective could do it: what waits
in one cannot be told who else does.
"""

import itertools

import tensorflow as tf

from tfparallel.cluster.differences import name_workers
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.seams.tensorflow import coordination_service

_LOOK_MS = 500  # What a worker left is there at once, or never; a busy machine answers late.
_numbers = itertools.count()  # Every worker makes the same calls, and so counts alike.


def wait_for_all(workers: ProcessGroup, timeout_seconds: float) -> None:
    """Waits until all workers have called this.

    Args:
        workers: The workers.
        timeout_seconds: For how long.

    Raises:
        RuntimeError: If a worker did not come in time, or has died; on all workers, also on one
            that comes too late.
    """
    name = f"tfparallel/barrier/{next(_numbers)}"
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
