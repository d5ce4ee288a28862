"""What the harness asks of an algorithm, and of those that take part.

    world ──► ranks of all processes                  contender ──► a way to do a collective
      barrier()   all are here                          prepare(collective, count, dtype)
      gather(x)   every process's x                        │
                                                           ▼
                                                        prepared ──► load, run, run_null, arrays

One process may hold all ranks (its devices) or one (a worker of a job): a contender is handed the
inputs of its own process's ranks, and hands back their results.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class World(Protocol):
    """The ranks of a measurement.

    Attributes:
        num_ranks: n, over all processes.
        ranks: Those that this process holds.
        place: What the ranks are, for people: "4 devices of one process".
        names: A name for each rank, by which a profile is found again.
    """

    num_ranks: int
    ranks: range
    place: str
    names: list[str]

    def barrier(self) -> None:
        """Returns once every process has come here."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns every process's values, in the order of the processes."""


class Prepared(Protocol):
    """One collective of one size and type, ready to be called again and again."""

    def load(self, inputs: Sequence[np.ndarray]) -> None:
        """Takes the inputs, vectors, of this process's ranks."""

    def run(self) -> Any:
        """Does the collective once; returns its outcome when every rank's is there in full."""

    def run_null(self) -> None:
        """Does all that `run` does, without the exchange."""

    def arrays(self, outcome: Any) -> list[np.ndarray]:
        """Returns the outcome of `run` as arrays, one for each of this process's ranks."""


class Contender(Protocol):
    """An algorithm, as one implementation offers it.

    Attributes:
        name: What `--algorithms` says.
        implementation: What truly runs, such as "tf.distribute.HierarchicalCopyAllReduce".
        collectives: What it can do, of `sizes.COLLECTIVES`.
    """

    name: str
    implementation: str
    collectives: tuple[str, ...]

    def prepare(self, collective: str, count: int, dtype: str) -> Prepared:
        """Sets up one of `collectives`, not timed; `count` is its size in elements of `dtype`."""


class OneProcess:
    """The world of one process that holds all ranks, as devices."""

    def __init__(self, num_ranks: int, devices: Sequence[str] = ()):
        self.num_ranks = num_ranks
        self.names = list(devices)
        self.ranks = range(num_ranks)
        self.place = f"{num_ranks} devices of one process"

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Returns this process's values alone."""
        return [list(values)]
