"""Devices of other processes for the layers of one model.

```
 process 0: the program          process 1: a server         process 2: a server
 ┌───────────────────────┐      ┌────────────────────┐      ┌────────────────────┐
 │ data, fit, callbacks  │      │                    │      │                    │
 │ first layers ─────────┼────► │ layers ────────────┼────► │ last layers, loss  │
 └───────────────────────┘      └────────────────────┘      └────────────────────┘
```

All of them run the same program, up to `connect_to_cluster`. From there, process 0 continues alone,
with the other processes' devices beside its own; the others run TensorFlow servers that execute the
operations of process 0 until it ends. A process cannot both use remote devices and take part in
collectives (TensorFlow: "Cannot enable remote execution as well as collective ops"), so a job uses
either these devices or a `MultiWorkerMirroredStrategy`.

Eager writes to variables of other processes are awaited (`after_writes`).
"""

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfparallel import devices as device_lib
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.cluster.ports import hold_until_gone, wait_for_server
from tfparallel.collectives.lost_worker import WorkerLostError, naming_lost_worker
from tfparallel.join_job import join_job, serving
from tfparallel.seams.tensorflow import wait_for_other_processes
from tfparallel.startup import has_nvidia_gpu, quiet_stderr

# A step that waits for a lost process has this long to fail on its own.
_GRACE_SECONDS = 10.0
_LOST_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: starting again may help.

# A thread of this pool sends a process's results. A single thread would send them only when
# nothing is left to compute, and the next stage would wait for one instruction longer.
_SENDING_THREADS = "TF_NUM_INTEROP_THREADS"

_addresses: list[str] = []  # Of all processes; set in process 0 once it is connected.
_lost: dict[int, str] = {}  # The processes that have ended, by index.
_reported = threading.Event()  # The program has received the error that names them.
_layer_devices: list[tuple[str, str]] = []  # Layer and device, of the model that trained last.


def connect_to_cluster(
    cluster: Cluster | None = None,
    *,
    start_timeout: float = 120.0,
    facts: Mapping[str, Any] | None = None,
) -> list[str]:
    """Connects the devices of all processes of the job; returns only in process 0.

    Call it in every process, before any other use of TensorFlow. In process 0, it returns the
    devices for `tfparallel.model_parallel`. In the others, it serves until process 0 has ended, and
    then ends the process by `SystemExit`.

    Args:
        cluster: The processes. Default: `Cluster.from_env()`, as `tfparallel launch`, Slurm, MPI,
            Kubernetes or torchrun name them.
        start_timeout: The seconds to wait for the other processes.
        facts: Values on which all processes must agree, by name, as JSON.

    Returns:
        The devices for layers, process by process: a process's GPUs if it has some, else its CPU,
        such as `["/job:worker/task:0/device:CPU:0", "/job:worker/task:1/device:CPU:0"]`. For a job
        of one process, its own devices.

    Raises:
        RuntimeError: If a process is missing, cannot be reached, or does not agree.

    Example:
        >>> devices = tfparallel.connect_to_cluster()
        >>> model = tfparallel.model_parallel(build_model, devices=devices)
    """
    cluster = cluster or Cluster.from_env()
    if cluster.num_workers < 2:
        return device_lib.choose_devices()
    if has_nvidia_gpu():
        os.environ.update(cluster.device_environment())
    if os.environ.get(_SENDING_THREADS) == "1":
        os.environ[_SENDING_THREADS] = "2"
    addresses, index = list(cluster.workers), cluster.worker_index
    addresses = join_job(addresses, index, facts or {}, start_timeout)
    if index > 0:
        _serve(addresses, index, start_timeout)
    _wait_for_servers(addresses, start_timeout)
    with serving(addresses, 0), quiet_stderr():
        devices = device_lib.connect(addresses)
    _addresses[:] = addresses
    for other in range(1, len(addresses)):
        name = f"watch of process {other}"
        threading.Thread(target=_watch, args=(other,), name=name, daemon=True).start()
    with_gpu = {_process_of(name) for name in devices if ":GPU:" in name}
    return [name for name in devices if _process_of(name) not in with_gpu or ":GPU:" in name]


def has_others() -> bool:
    """Returns whether this process uses devices of other processes."""
    return bool(_addresses)


@contextlib.contextmanager
def naming_lost_process(placement: Mapping[str, str]) -> Iterator[None]:
    """Replaces the error of a step whose device is lost by one that names the process.

    Args:
        placement: The device of each layer, by name.

    Raises:
        WorkerLostError: If a process of the job has ended.
    """
    _layer_devices[:] = placement.items()
    try:
        with naming_lost_worker():
            yield
    except (tf.errors.OpError, WorkerLostError):
        deadline = time.monotonic() + 2.0
        while _addresses and not _lost and time.monotonic() < deadline:
            time.sleep(0.05)
        if not _lost:
            raise
        _reported.set()
        raise WorkerLostError(_explanation()) from None


def peak_memory_bytes(device: str) -> int | None:
    """Returns the peak memory of a device's process, or None if it is not on Linux.

    An operation on that device reads the file, so it is that process's file.
    """
    try:
        with tf.device(device):
            status = tf.io.read_file("/proc/self/status").numpy().decode()
    except tf.errors.NotFoundError:
        return None
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _serve(addresses: Sequence[str], index: int, start_timeout: float) -> None:
    """Executes operations of process 0 until it has ended."""
    cluster = tf.train.ClusterSpec({"worker": list(addresses)})
    with serving(addresses, index), quiet_stderr():
        server = tf.distribute.Server(cluster, job_name="worker", task_index=index)
    wait_for_server(addresses[0], time.monotonic() + start_timeout)
    hold_until_gone(addresses[0])
    sys.stdout.flush()
    sys.stderr.flush()
    del server
    raise SystemExit(0)


def _watch(index: int) -> None:
    """Records in process 0 that another process has ended, and ends waits that would never end."""
    hold_until_gone(_addresses[index])
    _lost[index] = _addresses[index]
    if _reported.wait(_GRACE_SECONDS):
        return
    # No step has failed: the main thread may be in a call that no exception reaches.
    print(f"\n{_explanation()}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(_LOST_EXIT_CODE)


def _wait_for_servers(addresses: Sequence[str], start_timeout: float) -> None:
    """Waits until each other process, which has joined the job, executes operations."""
    deadline = time.monotonic() + start_timeout
    for index, address in enumerate(addresses[1:], start=1):
        if not wait_for_server(address, deadline):
            raise RuntimeError(
                f"Process {index} ({address}) was reached, but did not start to serve within "
                f"{start_timeout:.0f} s. Every process is required. See its output."
            )


def _explanation() -> str:
    names = " and ".join(f"process {i} ({address})" for i, address in sorted(_lost.items()))
    lost = tuple(f"/job:worker/task:{index}/" for index in _lost)
    lost_layers = [layer for layer, device in _layer_devices if device.startswith(lost)]
    layers = ", ".join(lost_layers) or "none"
    return (
        f"A process of the job has ended: {names}. Every process is required, and the layers that "
        f"it held are lost: {layers}. Its output shows the cause; `tfparallel launch "
        "--max_restarts=3` restarts all processes, which resume from their checkpoint, if any."
    )


def _process_of(device: str) -> str:
    return device.partition("/device:")[0]


def after_writes(function: Callable) -> Callable:
    """Makes a function wait for pending writes before each call.

    An eager write to a variable of another process (`reset_state`, `set_weights`) is a separate
    message, and a `tf.function` called next may overtake it: it reads the old value, and its own
    update is lost or undoes the write.
    """
    if hasattr(function, "waits_for_writes"):
        return function

    @functools.wraps(function)
    def waiting(*args, **kwargs):
        wait_for_other_processes()
        return function(*args, **kwargs)

    waiting.waits_for_writes = True
    return waiting
