"""One line of a measurement, with nccl-tests' names and units.

    algbw = S / t,    busbw = algbw · f(n)

f(n) is 2(n−1)/n for an all-reduce: what each rank must send and receive of S bytes, so that busbw
can be held against the speed of a wire, whatever n is.
"""

import dataclasses
from typing import Any

from tfparallel.bench.collectives import REDUCING

_SHORT = {"float16": "half", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}


@dataclasses.dataclass(frozen=True)
class Row:
    """What one algorithm did at one size.

    Attributes:
        algorithm: Its name.
        implementation: What truly ran.
        collective: Such as "all_reduce".
        num_ranks: n.
        count: Elements of each rank.
        size_bytes: S.
        dtype: Such as "float32".
        times_seconds: One for each iteration, the slowest rank's.
        null_seconds: Median of the same call without the exchange; times include it.
        num_wrong: Wrong elements over all ranks and both kinds of input.
    """

    algorithm: str
    implementation: str
    collective: str
    num_ranks: int
    count: int
    size_bytes: int
    dtype: str
    times_seconds: tuple[float, ...]
    null_seconds: float
    num_wrong: int

    def quantile_seconds(self, fraction: float) -> float:
        """Returns a quantile of the times, between two of them by a straight line."""
        ordered = sorted(self.times_seconds)
        place = fraction * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    @property
    def median_seconds(self) -> float:
        """The median time."""
        return self.quantile_seconds(0.5)

    @property
    def alg_bw(self) -> float:
        """Bytes a second over 10⁹."""
        return self.size_bytes / self.median_seconds / 1e9

    @property
    def bus_bw(self) -> float:
        """`alg_bw` times f(n)."""
        return self.alg_bw * bus_factor(self.collective, self.num_ranks)

    @property
    def type_name(self) -> str:
        """The type as nccl-tests calls it."""
        return _SHORT[self.dtype]

    @property
    def redop(self) -> str:
        """What is done to the elements, as nccl-tests calls it."""
        return "sum" if self.collective in REDUCING else "none"

    def as_json(self) -> dict[str, Any]:
        """Returns nccl-tests' keys, times in microseconds, and then our own."""
        return {
            "algorithm": self.algorithm,
            "size": self.size_bytes,
            "count": self.count,
            "type": self.type_name,
            "redop": self.redop,
            "time": self.median_seconds * 1e6,
            "alg_bw": self.alg_bw,
            "bus_bw": self.bus_bw,
            "nwrong": self.num_wrong,
            "collective": self.collective,
            "implementation": self.implementation,
            "num_ranks": self.num_ranks,
            "median": self.median_seconds * 1e6,
            "p10": self.quantile_seconds(0.1) * 1e6,
            "p90": self.quantile_seconds(0.9) * 1e6,
            "null": self.null_seconds * 1e6,
            "iters": len(self.times_seconds),
        }


def bus_factor(collective: str, num_ranks: int) -> float:
    """Returns f(n): what a rank must send, in sizes S."""
    share = (num_ranks - 1) / num_ranks
    return {
        "all_reduce": 2 * share,
        "reduce_scatter": share,
        "all_gather": share,
        "all_to_all": share,
        "broadcast": 1.0,
    }[collective]
