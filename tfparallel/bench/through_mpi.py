"""Contenders between workers that go through MPI, all over one communicator."""

import tensorflow as tf

from tfparallel.bench.collectives import input_count
from tfparallel.bench.sizes import COLLECTIVES
from tfparallel.bench.step import PreparedStep
from tfparallel.collectives.mpi.communicator import ALGORITHMS
from tfparallel.collectives.mpi.workers import MpiProcessGroup


class MpiContender:
    """One of MPI's algorithms, as a training step uses it.

    Args:
        group: The workers, joined by MPI.
        name: One of `ALGORITHMS`; they are those of sums, and "mpi" has the other collectives too.
    """

    def __init__(self, group: MpiProcessGroup, name: str):
        self._group, self.name = group, name
        group.communicator.use(name)
        self.implementation = group.communicator.implementation("all_reduce")
        self.collectives = COLLECTIVES if name == "mpi" else ("all_reduce",)

    def prepare(self, collective: str, count: int, dtype: str) -> PreparedStep:
        """Traces a collective."""
        group = self._group
        own = input_count(collective, count, group.num_workers)
        if collective == "all_reduce":
            return PreparedStep(
                lambda x: group.all_reduce([x])[0],
                own,
                dtype,
                before=lambda: group.communicator.use(self.name),
            )
        self.implementation = group.communicator.implementation(collective)
        is_half = tf.as_dtype(dtype).size == 2
        if collective == "reduce_scatter" and is_half:  # Which MPI's library does not add.
            self.implementation += ", in float32"
            return PreparedStep(
                lambda x: tf.cast(
                    group.run_on_arrays(collective, tf.cast(x, tf.float32)), x.dtype
                ),
                own,
                dtype,
            )
        return PreparedStep(lambda x: group.run_on_arrays(collective, x), own, dtype)


def mpi_contenders(group: MpiProcessGroup) -> tuple[list[MpiContender], dict[str, str]]:
    """Returns a contender for each algorithm that can run here, and why the others cannot."""
    found, refused = [], {}
    for name in ALGORITHMS:
        try:
            found.append(MpiContender(group, name))
        except ValueError as error:
            refused[name] = str(error)
    return found, refused
