"""What carries tensors between workers, by name.

| name | what runs |
| --- | --- |
| `ring` | TensorFlow's ring over gRPC, with its own settings |
| `ring_tuned` | the same, large sums in pieces that travel while others are summed |
| `nccl` | NVIDIA's NCCL, between GPUs; NCCL_ALGO and NCCL_PROTO are read at its first use |
| `tensorflow` | of TensorFlow's own the fastest: NCCL between GPUs, `ring_tuned` between CPUs |
| `mpi`, `mpi_…` | MPI, through host memory: `tfparallel.collectives.mpi` |
| `auto` | the fastest, measured: `tfparallel.collectives.transport_selection` |
| None | NCCL between GPUs; on one host `mpi` if all have it; else `ring_tuned` |

What the environment's TFPARALLEL_ALL_REDUCE says stands before `auto` and None. NCCL needs a whole
GPU for each worker (`nccl.py`). What TensorFlow's strategy sums by itself, in custom loops, goes
over its ring unless the user's `communication_options` name NCCL: NCCL asks for one order of all
that runs on a GPU, and TensorFlow's calls and these have no order between them.
"""

import os

import tensorflow as tf

from tfparallel.cluster.environment import ALL_REDUCE
from tfparallel.collectives import nccl
from tfparallel.collectives.mpi import communicator, start
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.startup import has_nvidia_gpu

_TENSORFLOWS = "tensorflow"
NAMES = ("auto", _TENSORFLOWS, "ring", "ring_tuned", "nccl", *communicator.ALGORITHMS)


def check_name(name: str | None, source: str = "all_reduce") -> None:
    """Raises unless a transport has that name, whether it can run here or not.

    Raises:
        ValueError: If there is none.
    """
    if name is not None and name not in NAMES:
        raise ValueError(
            f"`all_reduce` between workers must be one of {', '.join(NAMES)}. "
            f"Received: {source}={name!r}. Leave it out for the default."
        )


def chosen(name: str | None) -> str | None:
    """Returns the transport that a user's `all_reduce` means, or what the environment says.

    Raises:
        ValueError: If there is none of that name, or it needs what is not here.
    """
    source = "all_reduce"
    if name in (None, "auto") and os.environ.get(ALL_REDUCE):
        name, source = os.environ[ALL_REDUCE], ALL_REDUCE
    check_name(name, source)
    if name == "nccl" and not has_nvidia_gpu():
        raise ValueError(
            "NCCL needs a GPU for each worker. Received: "
            f"{source}='nccl', and this host shows none. Take all_reduce='auto'."
        )
    return name


def options(
    name: str | None, given: tf.distribute.experimental.CommunicationOptions | None
) -> tf.distribute.experimental.CommunicationOptions:
    """Returns TensorFlow's options for a transport, with what the user has set in them."""
    own = tf.distribute.experimental.CommunicationOptions
    given = given or own()
    if name is None or not name.startswith("ring"):
        return given
    return own(
        bytes_per_pack=given.bytes_per_pack,
        timeout_seconds=given.timeout_seconds,
        implementation=tf.distribute.experimental.CommunicationImplementation.RING,
    )


def named_by(
    given: tf.distribute.experimental.CommunicationOptions | None,
) -> str | None:
    """Returns the transport that TensorFlow's own options name; None for none."""
    named = tf.distribute.experimental.CommunicationImplementation
    names = {named.NCCL: "nccl", named.RING: "ring_tuned"}
    return names.get(given.implementation) if given is not None else None


def joined(group: ProcessGroup, name: str | None) -> ProcessGroup:
    """Returns the workers, joined by a transport. Called by all workers at the same place.

    Args:
        group: The workers, joined by TensorFlow.
        name: The transport, of `NAMES`; None and "auto" for TensorFlow's ring, as it is.

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
                "NCCL needs a whole GPU for each worker, its own. Received: "
                f"all_reduce='nccl', and {reason}. Take all_reduce='auto'."
            )
    if not name.startswith("mpi"):
        return group.with_transport(name)
    return start.join(group, name)


def nccl_refusal(group: ProcessGroup) -> str:
    """Returns why NCCL cannot join the workers; nothing if it can. Called by all of them."""
    return nccl.refusal_between(group.exchange(nccl.offer(group.device), "the offers of GPUs"))
