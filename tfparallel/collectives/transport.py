"""Transports of tensors between workers, by name.

| name | implementation |
| --- | --- |
| `ring` | TensorFlow's ring over gRPC, with its own settings |
| `ring_tuned` | the same, but sends a large sum in pieces while it sums others |
| `nccl` | NVIDIA's NCCL, between GPUs; NCCL_ALGO and NCCL_PROTO are read at its first use |
| `tensorflow` | the fastest of TensorFlow's own: NCCL between GPUs, `ring_tuned` between CPUs |
| `mpi`, `mpi_…` | MPI, through host memory: `tfparallel.collectives.mpi` |
| `auto` | the fastest, measured: `tfparallel.collectives.transport_selection` |
| None | NCCL between GPUs; `mpi` on one host if all workers have it; else `ring_tuned` |

The environment variable TFPARALLEL_ALL_REDUCE overrides `auto` and None. NCCL needs a whole GPU for
each worker (`nccl.py`). Sums that TensorFlow's strategy computes itself, in custom loops, use its
ring unless the user's `communication_options` name NCCL: NCCL requires a single order of all
collectives on a GPU, and TensorFlow's calls are not ordered against the ones here.
"""

import os

import tensorflow as tf

from tfparallel.cluster.environment import ALL_REDUCE
from tfparallel.collectives import nccl
from tfparallel.collectives.mpi import communicator, workers
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.startup import has_nvidia_gpu

_TENSORFLOWS = "tensorflow"
NAMES = ("auto", _TENSORFLOWS, "ring", "ring_tuned", "nccl", *communicator.ALGORITHMS)


def check_name(name: str | None, source: str = "all_reduce") -> None:
    """Checks that a transport of that name exists, whether or not it can run here.

    Raises:
        ValueError: If the name is unknown.
    """
    if name is not None and name not in NAMES:
        raise ValueError(
            f"`all_reduce` between workers must be one of {', '.join(NAMES)}. Received: "
            f"{source}={name!r}. Omit it for the default."
        )


def chosen(name: str | None) -> str | None:
    """Returns the transport that the user's `all_reduce` or the environment names.

    Raises:
        ValueError: If the name is unknown, or NCCL is named and there is no GPU.
    """
    source = "all_reduce"
    if name in (None, "auto") and os.environ.get(ALL_REDUCE):
        name, source = os.environ[ALL_REDUCE], ALL_REDUCE
    check_name(name, source)
    if name == "nccl" and not has_nvidia_gpu():
        raise ValueError(
            f"NCCL needs a GPU for each worker. Received: {source}='nccl', but this host has none. "
            "Use all_reduce='auto'."
        )
    return name


def options(
    name: str | None, user_options: tf.distribute.experimental.CommunicationOptions | None
) -> tf.distribute.experimental.CommunicationOptions:
    """Returns TensorFlow's options for a transport, based on the user's options."""
    options_class = tf.distribute.experimental.CommunicationOptions
    user_options = user_options or options_class()
    if name is None or not name.startswith("ring"):
        return user_options
    return options_class(
        bytes_per_pack=user_options.bytes_per_pack,
        timeout_seconds=user_options.timeout_seconds,
        implementation=tf.distribute.experimental.CommunicationImplementation.RING,
    )


def named_by(
    user_options: tf.distribute.experimental.CommunicationOptions | None,
) -> str | None:
    """Returns the transport that the user's communication options name; None if none."""
    named = tf.distribute.experimental.CommunicationImplementation
    names = {named.NCCL: "nccl", named.RING: "ring_tuned"}
    return names.get(user_options.implementation) if user_options is not None else None


def joined(group: ProcessGroup, name: str | None) -> ProcessGroup:
    """Connects the workers by a transport. All workers call it at the same point of the program.

    Args:
        group: The workers, connected by TensorFlow.
        name: The transport, one of `NAMES`; None and "auto" leave the group unchanged.

    Raises:
        RuntimeError: If a worker lacks MPI.
        ValueError: If the algorithm cannot run here.
    """
    group = group.by_tensorflow
    if name in (None, "auto"):
        return group
    if name in (_TENSORFLOWS, "nccl"):
        reason = nccl_refusal(group)
        if name == _TENSORFLOWS:
            return group if reason else group.with_transport("nccl")
        if reason:
            raise ValueError(
                "NCCL needs a separate, whole GPU for each worker. Received: all_reduce='nccl', "
                f"but {reason}. Use all_reduce='auto'."
            )
    if not name.startswith("mpi"):
        return group.with_transport(name)
    return workers.join(group, name)


def nccl_refusal(group: ProcessGroup) -> str:
    """Returns why NCCL cannot connect the workers; "" if it can. Called by all of them."""
    return nccl.refusal_between(group.exchange(nccl.offer(group.device), "the offers of GPUs"))
