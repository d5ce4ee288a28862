"""Contenders between workers that go through MPI, all over one communicator."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfparallel.collectives.mpi.communicator import ALGORITHMS
from tfparallel.collectives.mpi.workers import MpiWorkerGroup


class MpiContender:
    """One of MPI's algorithms, as a training step uses it.

    Args:
        group: The workers, joined by MPI.
        name: One of `ALGORITHMS`.
    """

    collectives = ("all_reduce",)

    def __init__(self, group: MpiWorkerGroup, name: str):
        self._group, self.name = group, name
        group.communicator.use(name)
        self.implementation = group.communicator.implementation("all_reduce")

    def prepare(self, collective: str, count: int, dtype: str) -> "_Prepared":
        """Traces an all-reduce of `count` elements."""
        del collective  # There is one.
        return _Prepared(self._group, self.name, count, dtype)


class _Prepared:
    def __init__(self, group, name, count, dtype):
        self._group, self._name = group, name
        self._input = tf.Variable(tf.zeros([count], dtype), trainable=False)
        steps = (
            lambda: group.all_reduce([self._input.read_value()])[0],
            lambda: tf.identity(self._input.read_value()),
        )
        self._run, self._run_null = [tf.function(s).get_concrete_function() for s in steps]

    def load(self, inputs: Sequence[np.ndarray]) -> None:
        self._input.assign(inputs[0])

    def run(self) -> tf.Tensor:
        self._group.communicator.use(self._name)
        return self._run()

    def run_null(self) -> None:
        self._run_null()

    def arrays(self, outcome: tf.Tensor) -> list[np.ndarray]:
        return [outcome.numpy()]


def mpi_contenders(group: MpiWorkerGroup) -> tuple[list[MpiContender], dict[str, str]]:
    """Returns a contender for each algorithm that can run here, and why the others cannot."""
    found, refused = [], {}
    for name in ALGORITHMS:
        try:
            found.append(MpiContender(group, name))
        except ValueError as error:
            refused[name] = str(error)
    return found, refused
