"""Cost model of an all-reduce, from the parameters of a transport and the terms of an algorithm.

Over a network, ranks work in parallel, and the cost is the critical path (Hockney's model, with
additions):

    T = r·(t₀ + a·α + b·S·β + c·S·γ)      a, b, c: `terms` of the algorithm

r is the number of ranks per core, at least 1: ranks that share a core take turns.

In one process the ranks share cores and memory, and the cost is the total work:

    T = t₀ + m·α + d·S·β + e·S·γ          m messages of all ranks, d·S bytes split and joined,
                                          e·S bytes added

t₀ (cost of a call), α (of a message), β (of a byte sent) and γ (of a byte added) are fitted to a
sweep by non-negative least squares on the relative errors.

References:
    Roger W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2",
    Parallel Computing 20(3), 1994.
"""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfparallel.collectives.algorithms import ALGORITHMS, GROUPED, double_binary_tree
from tfparallel.collectives.algorithms.schedule import MessageSchedule, Terms

TRANSPORTS = ("wire", "shared")
_PARAMETERS = ("fixed", "alpha", "beta", "gamma")


class Measurement(NamedTuple):
    """One measured time of a sweep."""

    algorithm: str
    num_ranks: int
    size_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Link:
    """A network link: seconds per message and per byte."""

    alpha: float
    beta: float


@dataclasses.dataclass(frozen=True)
class CostModel:
    """The cost parameters of a transport.

    Attributes:
        alpha: Seconds per message.
        beta: Seconds per byte sent.
        gamma: Seconds per byte added.
        fixed: t₀, seconds per call.
        transport: One of `TRANSPORTS`.
        across: The link between groups, if it differs.
        num_cores: Cores per host, if networked ranks share them; None if each rank has its own.
        residuals: Prediction / measurement - 1, for each fitted measurement.
    """

    alpha: float
    beta: float
    gamma: float = 0.0
    fixed: float = 0.0
    transport: str = "wire"
    across: Link | None = None
    num_cores: int | None = None
    residuals: tuple[float, ...] = ()

    @property
    def median_error(self) -> float:
        """The median of the residuals' magnitudes."""
        return statistics.median(map(abs, self.residuals)) if self.residuals else 0.0

    def seconds(
        self, algorithm: str, num_ranks: int, size_bytes: float, local_ranks: int | None = None
    ) -> float:
        """Predicts the time of an algorithm.

        Args:
            algorithm: One of `algorithms.ALGORITHMS`.
            num_ranks: n.
            size_bytes: S.
            local_ranks: Ranks per group. For algorithms outside `GROUPED`, whose every step waits
                for the slowest link, it only tells whether there is more than one group.
        """
        if self.transport == "shared":
            messages, copied, added = _shared_row(algorithm, num_ranks)
            per_byte = copied * self.beta + added * self.gamma
            return self.fixed + messages * self.alpha + per_byte * size_bytes
        inside = Link(self.alpha, self.beta)
        across = self.across or inside
        if algorithm not in GROUPED and local_ranks is not None and local_ranks < num_ranks:
            inside = across  # Every step waits for the slowest link.
        terms = self._terms(algorithm, num_ranks, size_bytes, local_ranks, inside)
        return _turns(local_ranks or num_ranks, self.num_cores) * (
            self.fixed
            + terms.latencies * inside.alpha
            + terms.sent * size_bytes * inside.beta
            + terms.latencies_across * across.alpha
            + terms.sent_across * size_bytes * across.beta
            + terms.added * size_bytes * self.gamma
        )

    def crossovers(
        self,
        num_ranks: int,
        min_bytes: float,
        max_bytes: float,
        local_ranks: int | None = None,
        algorithms: Sequence[str] = tuple(ALGORITHMS),
    ) -> list[tuple[float, str]]:
        """Returns the sizes at which the fastest algorithm changes.

        Returns:
            Pairs of a size and the algorithm that is fastest from it on; the first size is
            `min_bytes`.
        """

        def best(size):
            return min(
                algorithms, key=lambda name: self.seconds(name, num_ranks, size, local_ranks)
            )

        changes = [(min_bytes, best(min_bytes))]
        # Scan in eighths of an octave, then bisect to a thousandth.
        sizes = np.exp2(np.arange(np.log2(min_bytes), np.log2(max_bytes) + 1 / 8, 1 / 8))
        for low, high in itertools.pairwise(np.minimum(sizes, max_bytes).tolist()):
            while best(high) != changes[-1][1]:
                below, above = low, high
                while above / below > 1.001:
                    middle = (above * below) ** 0.5
                    if best(middle) == changes[-1][1]:
                        below = middle
                    else:
                        above = middle
                changes.append((above, best(above)))
                low = above
        return changes

    def _terms(self, algorithm, num_ranks, size_bytes, local_ranks, link) -> Terms:
        terms = ALGORITHMS[algorithm].terms
        if algorithm in GROUPED:
            return terms(num_ranks, local_ranks)
        if algorithm == "double_binary_tree" and link.alpha > 0:
            packets = double_binary_tree.best_num_packets(
                num_ranks, size_bytes, link.alpha, link.beta
            )
            return terms(num_ranks, packets)
        return terms(num_ranks)


def simulate(
    schedule: MessageSchedule,
    sizes_bytes: Sequence[float],
    model: CostModel,
    local_ranks: int | None = None,
) -> list[float]:
    """Simulates an all-reduce on a hypothetical cluster; returns the seconds for each size.

    Each rank has a clock, and each message advances two of them:

        a message starts when both ends are free        max(clock of source, clock of target)
        takes                                           α + bytes·β of the link between the two
        and is added in                                 bytes·γ

    A link carries one message per direction at a time. Ranks of a group share fast links; between
    groups each rank has its own slow link. If all ranks run in lockstep the result equals the
    closed formulas; otherwise (a flat ring over two kinds of link, packets in a tree) it is larger.

    Args:
        schedule: The messages of the algorithm.
        sizes_bytes: S; one pass over the schedule computes all sizes.
        model: The links; `across` is the one between groups.
        local_ranks: Ranks per group; by default all.
    """
    num_ranks = schedule.num_ranks
    inside = Link(model.alpha, model.beta)
    across = model.across or inside
    group = np.arange(num_ranks) // (local_ranks or num_ranks)
    block_bytes = np.asarray(sizes_bytes, float)[:, None] / schedule.num_blocks
    clock = np.zeros((len(sizes_bytes), num_ranks))
    for step in schedule.steps():
        crosses = group[step.sources] != group[step.targets]
        alpha = np.where(crosses, across.alpha, inside.alpha)
        beta = np.where(crosses, across.beta, inside.beta)
        sent_bytes = block_bytes * (step.stops - step.starts)
        start = np.maximum(clock[:, step.sources], clock[:, step.targets])
        end = start + alpha + sent_bytes * beta
        moved = clock.copy()
        moved[:, step.sources] = np.maximum(moved[:, step.sources], end)
        received = end + sent_bytes * model.gamma if step.adds else end
        moved[:, step.targets] = np.maximum(moved[:, step.targets], received)
        clock = moved
    return (model.fixed + clock.max(1)).tolist()


def fit(
    measurements: Sequence[Measurement], transport: str = "wire", num_cores: int | None = None
) -> CostModel:
    """Fits t₀, α, β and γ.

    Args:
        measurements: Times of algorithms in `algorithms.ALGORITHMS`.
        transport: One of `TRANSPORTS`.
        num_cores: Cores per host, if networked ranks share them.

    Returns:
        The model, with a residual for each measurement.

    Raises:
        ValueError: If there are fewer measurements than parameters, or the transport is unknown.
    """
    if transport not in TRANSPORTS:
        raise ValueError(
            f"`transport` must be one of {', '.join(TRANSPORTS)}. Received: {transport!r}."
        )
    if len(measurements) < len(_PARAMETERS):
        raise ValueError(
            f"At least {len(_PARAMETERS)} measurements are required to fit "
            f"{', '.join(_PARAMETERS)}. Received: {len(measurements)}. Sweep over more sizes."
        )
    matrix = np.array([_row(measurement, transport, num_cores) for measurement in measurements])
    times = np.array([measurement.seconds for measurement in measurements])
    # Relative errors: a microsecond matters more at 4 KiB than at 64 MiB.
    values = _least_squares(matrix / times[:, None], np.ones(len(times)))
    residuals = matrix @ values / times - 1
    fixed, alpha, beta, gamma = values.tolist()
    return CostModel(
        alpha,
        beta,
        gamma,
        fixed,
        transport,
        num_cores=num_cores,
        residuals=tuple(residuals.tolist()),
    )


def _turns(num_ranks, num_cores) -> float:
    """Returns the number of ranks per core, at least 1."""
    return max(1.0, num_ranks / num_cores) if num_cores else 1.0


def _row(measurement: Measurement, transport, num_cores):
    if transport == "shared":
        messages, copied, added = _shared_row(measurement.algorithm, measurement.num_ranks)
        return [1, messages, copied * measurement.size_bytes, added * measurement.size_bytes]
    # The default number of packets, as in the measured schedule.
    terms = ALGORITHMS[measurement.algorithm].terms(measurement.num_ranks)
    latencies = terms.latencies + terms.latencies_across
    sent = terms.sent + terms.sent_across
    row = [1, latencies, sent * measurement.size_bytes, terms.added * measurement.size_bytes]
    turns = _turns(measurement.num_ranks, num_cores)
    return [turns * value for value in row]


@functools.lru_cache(maxsize=256)
def _shared_row(algorithm: str, num_ranks: int) -> tuple[float, float, float]:
    """Returns m, d and e: the total work of all ranks."""
    schedule = ALGORITHMS[algorithm].schedule(num_ranks)
    messages, added = 0, 0.0
    for step in schedule.steps():
        num_blocks = int((step.stops - step.starts).sum())
        messages += num_blocks
        added += step.adds * num_blocks / schedule.num_blocks
    # With several blocks, each rank concatenates its tensors and splits the vector, and back.
    copied = 4.0 * num_ranks if schedule.num_blocks > 1 else 0.0
    return messages, copied, added


def _least_squares(matrix, target):
    """Non-negative least squares: the best over all subsets of columns without a negative value."""
    best, values = np.inf, np.zeros(matrix.shape[1])
    for number in range(1, matrix.shape[1] + 1):
        for columns in itertools.combinations(range(matrix.shape[1]), number):
            part, *_ = np.linalg.lstsq(matrix[:, columns], target, rcond=None)
            error = float(np.sum((matrix[:, columns] @ part - target) ** 2))
            # An extra column must improve the fit; otherwise keep the simpler one.
            if (part >= 0).all() and error < best * (1 - 1e-9):
                best, values = error, np.zeros(matrix.shape[1])
                values[list(columns)] = part
    return values
