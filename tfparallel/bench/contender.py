"""The interfaces between the benchmark and its algorithms and ranks.

    world ──► ranks of all processes                  contender ──► one implementation
      barrier()   all have arrived                      prepare(collective, count, dtype)
      gather(x)   every process's x                        │
                                                           ▼
                                                        prepared ──► load, run, run_null, arrays

One process may have all ranks (its devices) or one (a worker of a job): a contender gets the inputs
of its process's ranks, and returns their results.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class World(Protocol):
    """The ranks of a measurement.

    Attributes:
        num_ranks: n, over all processes.
        ranks: The ranks of this process.
        place: A description of the ranks: "4 devices of one process".
        names: A name for each rank, the key of a profile.
    """

    num_ranks: int
    ranks: range
    place: str
    names: list[str]

    def barrier(self) -> None:
        """Returns once every process has called it."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns every process's values, in process order."""


class Prepared(Protocol):
    """One collective of one size and type, ready to run repeatedly."""

    def load(self, inputs: Sequence[np.ndarray]) -> None:
        """Sets the inputs, one vector for each rank of this process."""

    def run(self) -> Any:
        """Runs the collective once; returns its outcome when every rank's result is complete."""

    def run_null(self) -> None:
        """Does the same as `run` without the exchange."""

    def arrays(self, outcome: Any) -> list[np.ndarray]:
        """Returns the outcome of `run` as arrays, one for each rank of this process."""


class Contender(Protocol):
    """One implementation of an algorithm.

    Attributes:
        name: Its name in `--algorithms`.
        implementation: The code that runs, such as "tf.distribute.HierarchicalCopyAllReduce".
        collectives: The supported ones of `sizes.COLLECTIVES`.
    """

    name: str
    implementation: str
    collectives: tuple[str, ...]

    def prepare(self, collective: str, count: int, dtype: str) -> Prepared:
        """Sets up a collective, untimed; `count` is its size in elements of `dtype`."""


class OneProcess:
    """The world of one process, whose devices are all ranks."""

    def __init__(self, num_ranks: int, devices: Sequence[str] = ()):
        self.num_ranks = num_ranks
        self.names = list(devices)
        self.ranks = range(num_ranks)
        self.place = f"{num_ranks} devices of one process"

    def barrier(self) -> None:
        """Does nothing: there is no other process."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns this process's values."""
        return [list(values)]
