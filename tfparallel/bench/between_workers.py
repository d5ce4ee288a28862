"""The world and the contenders of a job: one rank a process.

Other transports than TensorFlow's own join here: a class with `name`, `implementation`,
`collectives` and `prepare` (see `tfparallel.bench.contender`), and a line in `worker_contenders`.
"""

import functools
from collections.abc import Sequence

import tensorflow as tf

from tfparallel.bench.collectives import input_count
from tfparallel.bench.step import PreparedStep
from tfparallel.bench.through_mpi import mpi_contenders
from tfparallel.collectives import transport
from tfparallel.collectives.mpi.communicator import ALGORITHMS
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.collectives.transport_selection import names_of


class Workers:
    """The workers of a job, a rank each.

    Args:
        group: What joins them.
    """

    def __init__(self, group: ProcessGroup):
        self._group = group
        self.num_ranks = group.num_workers
        self.ranks = range(group.worker_index, group.worker_index + 1)
        self.place = f"{group.num_workers} processes"
        self.names = names_of(group)
        # Workers leave TensorFlow's ring up to 2 ms apart, which would count as the collective's.
        closest = _by_mpi(group)[0] or group
        self._meet = tf.function(
            lambda here: closest.all_reduce([here])[0], autograph=False, reduce_retracing=False
        )

    def barrier(self) -> None:
        """Sums a number that nobody needs, which takes until the last has sent its own."""
        self._meet(tf.ones([1])).numpy()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns every worker's values."""
        own = tf.constant([list(values)], tf.float64)
        rows = self._group.all_gather([own], [1] * self.num_ranks)[0]
        return rows.numpy().tolist()


class TensorFlowCollectives:
    """TensorFlow's own collectives between workers, as a training step uses them.

    Args:
        group: The workers, joined by TensorFlow.
        name: "ring", over gRPC with TensorFlow's settings; "ring_tuned"; or "nccl".
    """

    def __init__(self, group: ProcessGroup, name: str):
        self.name = name
        self._group = group.with_transport(name)
        self.implementation = self._group.implementation
        self.collectives = ("all_reduce",)
        if name in ("ring", "nccl"):
            self.collectives += ("all_gather", "broadcast")

    def prepare(self, collective: str, count: int, dtype: str) -> PreparedStep:
        """Traces a collective."""
        by = "NCCL" if self.name == "nccl" else "RING"
        if collective == "all_gather":
            self.implementation = f"TensorFlow CollectiveGatherV2 ({by})"
        if collective == "broadcast":
            self.implementation = f"TensorFlow CollectiveReduceV2 ({by}), zeros but on worker 0"
        num_workers = self._group.num_workers
        own = input_count(collective, count, num_workers)
        steps = {
            "all_reduce": lambda x: self._group.all_reduce([x])[0],
            "all_gather": lambda x: self._group.all_gather([x], [own] * num_workers)[0],
            "broadcast": lambda x: self._group.broadcast([x])[0],
        }
        return PreparedStep(steps[collective], own, dtype)


def worker_contenders(group: ProcessGroup) -> list:
    """Returns all that can run between these workers."""
    return _all_of(group)[0]


def worker_refusals(group: ProcessGroup) -> dict[str, str]:
    """Returns the algorithms that cannot run between these workers, and why."""
    return _all_of(group)[1]


@functools.lru_cache(maxsize=1)  # Workers join through MPI once.
def _by_mpi(group):
    """The workers, joined by MPI; or None, and why."""
    try:
        is_joined = group is not group.by_tensorflow
        return (group if is_joined else transport.joined(group, "mpi")), ""
    except RuntimeError as error:
        return None, str(error)


@functools.lru_cache(maxsize=1)
def _all_of(group):
    tensorflow = group.by_tensorflow
    names, refused = ["ring", "ring_tuned"], {}
    if reason := transport.nccl_refusal(tensorflow):
        refused["nccl"] = reason
    else:
        names.append("nccl")
    found: list = [TensorFlowCollectives(tensorflow, name) for name in names]
    by_mpi, problem = _by_mpi(group)
    if by_mpi is None:
        return found, refused | dict.fromkeys(ALGORITHMS, problem)
    contenders, refused_by_mpi = mpi_contenders(by_mpi)
    return found + contenders, refused | refused_by_mpi
