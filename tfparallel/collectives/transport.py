"""What carries tensors between workers, by name.

| name | what runs |
| --- | --- |
| `ring` | TensorFlow's ring over gRPC |
| `nccl` | NVIDIA's NCCL, between GPUs; NCCL_ALGO and NCCL_PROTO are read at its first use |
| `mpi`, `mpi_…` | MPI, through host memory: `tfparallel.collectives.mpi` |
| `auto` | the environment's TFPARALLEL_ALL_REDUCE, or else what TensorFlow takes |
"""

import os

import tensorflow as tf


from tfparallel.collectives.between_workers import WorkerGroup
from tfparallel.collectives.mpi import communicator, start
from tfparallel.collectives.mpi.workers import MpiWorkerGroup
from tfparallel.startup import has_nvidia_gpu

VARIABLE = "TFPARALLEL_ALL_REDUCE"
NAMES = ("auto", "ring", "nccl", *communicator.ALGORITHMS)


def chosen(name: str) -> str:
    """Returns the transport that a user's `all_reduce` means.

    Raises:
        ValueError: If there is none of that name, or it needs what is not here.
    """
    source = "all_reduce"
    if name == "auto" and os.environ.get(VARIABLE):
        name, source = os.environ[VARIABLE], VARIABLE
    if name not in NAMES:
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
    name: str, given: tf.distribute.experimental.CommunicationOptions | None
) -> tf.distribute.experimental.CommunicationOptions:
    """Returns TensorFlow's options for a transport, with what the user has set in them."""
    own = tf.distribute.experimental.CommunicationOptions
    given = given or own()
    if name not in ("ring", "nccl"):
        return given
    return own(
        bytes_per_pack=given.bytes_per_pack,
        timeout_seconds=given.timeout_seconds,
        implementation=tf.distribute.experimental.CommunicationImplementation[name.upper()],
    )


def joined(group: WorkerGroup, name: str, host: str) -> WorkerGroup:
    """Returns the workers, joined by a transport.

    Args:
        group: The workers, joined by TensorFlow.
        name: The transport.
        host: Worker 0's host, as the others know it.

    Raises:
        RuntimeError: If a worker lacks MPI.
        ValueError: If the algorithm cannot run here.
    """
    if not name.startswith("mpi"):
        return group
    joined_by_mpi = start.join(
        group.exchange, group.worker_index, host, name, group.timeout_seconds
    )
    return MpiWorkerGroup(group, joined_by_mpi)
