"""`tfparallel.init()`: a worker joins its job before its program does anything else."""

import numbers
from collections.abc import Sequence

from tfparallel import devices as device_lib
from tfparallel.asynchronous.servers import join
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.cluster.roles import Roles
from tfparallel.collectives import transport
from tfparallel.collectives.compression_name import CompressionName
from tfparallel.replication.drop_in_strategies import MultiWorkerMirroredStrategy


def init(
    *,
    devices: Sequence[str] | int | None = None,
    all_reduce: str | None = None,
    compression: str | None = None,
    start_timeout: float = 120.0,
    stall_timeout: float = 1800.0,
) -> None:
    """Joins the job of this worker process.

    Call it right after the imports of a program for several workers if the program creates data
    sets, tensors or layers before it calls `data_parallel`: TensorFlow's runtime must know the
    other workers when it starts. `data_parallel` and `MultiWorkerMirroredStrategy()` reuse the
    result. In a process without other workers it does nothing, so the same program runs there. In
    a job with servers (`launch --num_ps=1`) it returns only in the chief, which continues with the
    program; the other processes serve.

    Args:
        devices: As for `MultiWorkerMirroredStrategy`, like all other arguments.
        all_reduce: What carries tensors between the workers.
        compression: How to compress gradients.
        start_timeout: How many seconds to wait for the other workers.
        stall_timeout: How long a step may last.

    Raises:
        RuntimeError: If TensorFlow's runtime has already started, with what started it; or if a
            worker is missing at the deadline.
        ValueError: If the environment describes no cluster; an argument is wrong, or has no effect
            in a job with servers; or it is called again with arguments.

    Example:
        >>> import tfparallel
        >>> tfparallel.init()
        >>> dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
        >>> model = tfparallel.data_parallel(build_model)
    """
    for name, seconds in (("start_timeout", start_timeout), ("stall_timeout", stall_timeout)):
        if not isinstance(seconds, numbers.Real) or not seconds > 0:
            raise ValueError(
                f"`{name}` must be a number of seconds above 0. Received: {name}={seconds!r}. "
                "Leave it out for the default."
            )
    # Without effect in a single process, but a mistake is reported there, too.
    transport.check_name(all_reduce)
    CompressionName.parse(compression)
    if devices is not None:
        device_lib.check_devices(devices)
    if (roles := Roles.from_env()) is not None:
        passed = {"devices": devices, "all_reduce": all_reduce, "compression": compression}
        if received := [f"{name}={value!r}" for name, value in passed.items() if value is not None]:
            raise ValueError(
                "In a job with servers, workers do not sum gradients, and each has one device; "
                "tfparallel.init() must be called without these options. Received: "
                f"{', '.join(received)}. Remove them, or start the job without --num_ps."
            )
        join(roles, start_timeout=start_timeout)
    elif Cluster.from_env().num_workers > 1:
        MultiWorkerMirroredStrategy(
            devices=devices,
            all_reduce=all_reduce,
            compression=compression,
            start_timeout=start_timeout,
            stall_timeout=stall_timeout,
        )
