"""What carries tensors between workers, by name.

| name | what runs |
| --- | --- |
| `ring` | TensorFlow's ring over gRPC, with its own settings |
| `ring_tuned` | the same, large sums in pieces that travel while others are summed |
| `nccl` | NVIDIA's NCCL, between GPUs; NCCL_ALGO and NCCL_PROTO are read at its first use |
| `tensorflow` | what TensorFlow takes: NCCL between GPUs, `ring_tuned` between CPUs |
| `mpi`, `mpi_…` | MPI, through host memory: `tfparallel.collectives.mpi` |
| `auto` | the fastest, measured: `tfparallel.collectives.worker_choice` |
| None | NCCL between GPUs; on one host `mpi` if all have it; else `ring_tuned` |

What the environment's TFPARALLEL_ALL_REDUCE says stands before `auto` and None.
"""

import os

import tensorflow as tf

from tfparallel.cluster.environment import ALL_REDUCE
from tfparallel.collectives.between_workers import WorkerGroup
from tfparallel.collectives.mpi import communicator, start
from tfparallel.collectives.mpi.workers import MpiWorkerGroup
from tfparallel.startup import has_nvidia_gpu

_TENSORFLOWS = "tensorflow"
NAMES = ("auto", _TENSORFLOWS, "ring", "ring_tuned", "nccl", *communicator.ALGORITHMS)


def chosen(name: str | None) -> str | None:
    """Returns the transport that a user's `all_reduce` means, or what the environment says.

    Raises:
        ValueError: If there is none of that name, or it needs what is not here.
    """
    source = "all_reduce"
    if name in (None, "auto") and os.environ.get(ALL_REDUCE):
        name, source = os.environ[ALL_REDUCE], ALL_REDUCE
    if name is not None and name not in NAMES:
        raise ValueError(
            f"`all_reduce` between workers must be one of {', '.join(NAMES)}. "
            f"Received: {source}={name!r}."
        )
    if name == "nccl" and not has_nvidia_gpu():
        raise ValueError(
            "NCCL joins GPUs, of which each worker needs one. Received: "
            f"{source}='nccl', and this host shows none. Take all_reduce='auto'."
        )
    return name


def options(
    name: str | None, given: tf.distribute.experimental.CommunicationOptions | None
) -> tf.distribute.experimental.CommunicationOptions:
    """Returns TensorFlow's options for a transport, with what the user has set in them."""
    own = tf.distribute.experimental.CommunicationOptions
    given = given or own()
    if name in (None, "auto", _TENSORFLOWS) or name.startswith("mpi"):
        return given
    kind = "NCCL" if name == "nccl" else "RING"
    return own(
        bytes_per_pack=given.bytes_per_pack,
        timeout_seconds=given.timeout_seconds,
        implementation=tf.distribute.experimental.CommunicationImplementation[kind],
    )


def joined(group: WorkerGroup, name: str | None) -> WorkerGroup:
    """Returns the workers, joined by a transport.

    Args:
        group: The workers, joined by TensorFlow.
        name: The transport, of `NAMES`; None and "auto" for TensorFlow's, as it is.

    Raises:
        RuntimeError: If a worker lacks MPI.
        ValueError: If the algorithm cannot run here.
    """
    group = group.by_tensorflow
    if name in (None, "auto", _TENSORFLOWS):
        return group
    if not name.startswith("mpi"):
        return group.with_transport(name)
    ranks = start.join(
        group.exchange, group.worker_index, group.first_host, name, group.timeout_seconds
    )
    return MpiWorkerGroup(group, ranks)
