"""The processes of an asynchronous job: how they connect, what they serve, and lost processes.

```
 chief: the program              worker k: a server             ps: a server
 ┌───────────────────────┐      ┌────────────────────┐      ┌────────────────────┐
 │ data, fit, callbacks  │      │ forward, backward  │ ◄──  │ weights            │
 │ dispatches batches ───┼────► │          gradients ┼────► │ optimizer, slots   │
 └───────────────────────┘      └────────────────────┘      └────────────────────┘
```

All of them run the same program up to `join`. From there only the chief continues; the other
processes execute the functions that it sends, until it ends.
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfparallel.cluster.gpu_binding import visible_gpus
from tfparallel.cluster.ports import hold_until_gone, is_there, wait_for_server
from tfparallel.cluster.roles import Roles
from tfparallel.collectives.lost_worker import WorkerLostError
from tfparallel.device_listing import reached_devices
from tfparallel.join_job import join_job, serving
from tfparallel.keras_compat import MultiOptimizer
from tfparallel.layout.layout import Layout
from tfparallel.layout.mesh import Mesh
from tfparallel.seams.keras import set_storage
from tfparallel.startup import quiet_stderr
from tfparallel.update.built_optimizers import own_variables

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LOST_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: a restart may help.
_LOOK_SECONDS, _MISSES = 1.0, 5


class Servers:
    """The chief's handle on the other processes of a job.

    Args:
        roles: The processes, all of which are running and serving.

    Attributes:
        roles: The processes.
        strategy: TensorFlow's strategy, whose scope creates variables on the servers.
        coordinator: Schedules functions on free workers.
    """

    of_process: "Servers | None" = None

    def __init__(self, roles: Roles):
        self.roles = roles
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(roles.jobs), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        with serving(roles.addresses, 0), quiet_stderr():
            self.strategy = tf.distribute.ParameterServerStrategy(resolver)
            self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        # When the coordinator is garbage-collected, for example at exit, TensorFlow stops it, and
        # waits forever for a lost worker. So it must never be collected.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.coordinator))

    @property
    def num_workers(self) -> int:
        """The number of processes that compute gradients."""
        return len(self.roles.workers)

    @property
    def all_hold(self) -> bool:
        """Whether all servers are alive."""
        return all(map(is_there, self.roles.servers))

    @property
    def device(self) -> str:
        """The device of the first server, which runs each update."""
        return "/job:ps/task:0/device:CPU:0"

    @property
    def layout(self) -> Layout:
        number = len(self.roles.servers)
        return Layout(
            Mesh(data=self.num_workers),
            [self._device_of(index) for index in range(self.num_workers)],
            reduction=f"not summed; the weights are on {number} server{'s' * (number > 1)}",
        )

    def _device_of(self, index: int) -> str:
        """Returns a worker's first GPU, or its CPU."""
        gpu = f"/job:worker/task:{index}/device:GPU:0"
        return gpu if gpu in reached_devices() else gpu.replace("GPU", "CPU")

    def scope(self):
        """Returns the scope that creates variables on the servers, round-robin."""
        return self.strategy.scope()

    @contextlib.contextmanager
    def naming_lost_server(self, is_waiting: Callable[[], bool]) -> Iterator[None]:
        """Converts the error of a step that has lost a server to one that names the server.

        If all workers have ended, TensorFlow waits silently; a watch thread then ends the process.

        Args:
            is_waiting: Returns whether there are steps in flight.

        Raises:
            WorkerLostError: If a server has ended.
        """
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(over, is_waiting), daemon=True)
        watch.start()
        try:
            yield
        except tf.errors.OpError:
            lost = [address for address in self.roles.servers if not is_there(address)]
            if not lost:
                raise
            raise WorkerLostError(
                f"A server of the job has exited: {', '.join(lost)}. Every server is required, and "
                "the weights that it held are lost. See its output for the cause; `tfparallel "
                "launch --max_restarts=3` restarts the job, which resumes from its checkpoint if "
                "there is one."
            ) from None
        finally:
            over.set()
            watch.join()

    def _watch(self, over: threading.Event, is_waiting: Callable[[], bool]) -> None:
        """Ends a program that would wait forever because no worker is left."""
        misses = 0
        while misses < _MISSES:
            if over.wait(_LOOK_SECONDS):
                return
            is_lost = is_waiting() and not any(map(is_there, self.roles.workers))
            misses = misses + 1 if is_lost else 0
        print(
            f"\nAll workers of the job have exited: {', '.join(self.roles.workers)}. At least one "
            "is required. See their output for the cause.",
            file=sys.stderr,
            flush=True,
        )
        sys.stdout.flush()
        os._exit(_LOST_EXIT_CODE)


def join(
    roles: Roles, *, start_timeout: float = 120.0, facts: Mapping[str, Any] | None = None
) -> Servers:
    """Connects the processes of the job; returns in the chief only.

    The other processes serve until the chief has ended, and then exit with code 0.

    Args:
        roles: The processes.
        start_timeout: Seconds to wait for the other processes.
        facts: JSON-serializable values, by name, that all processes must agree on.

    Raises:
        RuntimeError: If a process is missing, is unreachable, or disagrees.
    """
    if Servers.of_process is not None:
        return Servers.of_process
    if roles.task_type == "worker":
        os.environ.update(visible_gpus(os.environ, *roles.place_on_host))
    else:
        os.environ[_VISIBLE] = "-1"  # Leave the GPUs' memory to the workers.
    roles = roles.moved_to(join_job(roles.addresses, roles.place, facts or {}, start_timeout))
    if not roles.is_chief:
        _serve(roles, start_timeout)
    deadline = time.monotonic() + start_timeout
    for address in roles.addresses[1:]:
        if not wait_for_server(address, deadline):
            raise RuntimeError(
                f"The process at {address} joined the job, but did not start its server within "
                f"{start_timeout:.0f} s. Every process is required. See its output."
            )
    Servers.of_process = Servers(roles)
    return Servers.of_process


def _serve(roles: Roles, start_timeout: float) -> None:
    """Executes the chief's functions until it has ended."""
    # Functions wait for each other in inter-op threads; TensorFlow recommends several.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)
    with serving(roles.addresses, roles.place), quiet_stderr():
        server = tf.distribute.Server(
            tf.train.ClusterSpec(roles.jobs),
            job_name=roles.task_type,
            task_index=roles.task_index,
            protocol="grpc",
            config=config,
        )
    wait_for_server(roles.chief, time.monotonic() + start_timeout)
    hold_until_gone(roles.chief)
    del server
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # TensorFlow's threads would wait for the chief forever.


def _update(variable, function: Callable, args: tuple = (), kwargs=None, **_) -> Any:
    """Calls a function that updates a variable, on the variable's device."""
    with tf.device(variable.device):
        return function(variable, *args, **(kwargs or {}))


def move_to_servers(optimizer: keras.Optimizer, strategy: tf.distribute.Strategy) -> None:
    """Moves the storage of an optimizer's variables to the servers, keeping their values.

    The optimizer stays the same object of the same class. Keras updates variables through a
    strategy; here it gets a minimal one, for which a variable has no copies.

    Raises:
        ValueError: If the optimizer wraps other optimizers.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer | MultiOptimizer):
        raise ValueError(
            "Under sync='async' the optimizer must not wrap others. Received: a "
            f"{type(optimizer).__name__}. Compile with one that does not, or use sync='every_step'."
        )
    for variable in own_variables(optimizer):
        if "/job:ps" not in variable.value.device:
            with tf.init_scope(), strategy.scope():
                value = variable.value.numpy()
                set_storage(variable, tf.Variable(value, dtype=variable.dtype, trainable=False))
    # Replaces the strategy in a step that is traced outside of any scope.
    extended = types.SimpleNamespace(
        colocate_vars_with=strategy.extended.colocate_vars_with, update=_update
    )
    optimizer._distribution_strategy = types.SimpleNamespace(extended=extended)
