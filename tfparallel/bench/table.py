"""The rows of a measurement and their table, with nccl-tests' names and units.

    algbw = S / t,    busbw = algbw · f(n)

f(n) is 2(n−1)/n for an all-reduce: the multiple of S bytes that each rank must send and receive.
busbw can thus be compared with the speed of a wire, for any n.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfparallel.bench.collectives import REDUCING, ROOTED, bus_factor

_SHORT = {"float16": "half", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one algorithm at one size.

    Attributes:
        algorithm: Its name.
        implementation: The code that ran.
        collective: Such as "all_reduce".
        num_ranks: n.
        count: Elements of each rank.
        size_bytes: S.
        dtype: Such as "float32".
        times_seconds: The slowest rank's time of each iteration.
        null_seconds: The median of the same call without the exchange; times include it.
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
        """Returns a quantile of the times, linearly interpolated."""
        return float(np.quantile(self.times_seconds, fraction))

    @property
    def median_seconds(self) -> float:
        """The median time."""
        return self.quantile_seconds(0.5)

    @property
    def alg_bw(self) -> float:
        """The algorithm bandwidth in GB/s."""
        return self.size_bytes / self.median_seconds / 1e9

    @property
    def bus_bw(self) -> float:
        """The bus bandwidth in GB/s: `alg_bw` times f(n)."""
        return self.alg_bw * bus_factor(self.collective, self.num_ranks)

    @property
    def type_name(self) -> str:
        """nccl-tests' name of the type."""
        return _SHORT[self.dtype]

    @property
    def redop(self) -> str:
        """nccl-tests' name of the reduction."""
        return "sum" if self.collective in REDUCING else "none"

    def as_json(self) -> dict[str, Any]:
        """Returns nccl-tests' keys, with times in microseconds, followed by our own."""
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
            "p50": self.median_seconds * 1e6,
            "p90": self.quantile_seconds(0.9) * 1e6,
            "p99": self.quantile_seconds(0.99) * 1e6,
            "null": self.null_seconds * 1e6,
            "iters": len(self.times_seconds),
        }

    def as_result(self) -> dict[str, Any]:
        """Returns the row as an element of `results` in the file of nccl-tests' `--output_file`.

        Ours are out of place: inputs are kept. `algorithm` and `implementation` are added.
        """
        micro = np.asarray(self.times_seconds) * 1e6
        mean, deviation = float(micro.mean()), float(micro.std())
        return {
            "size": self.size_bytes,
            "count": self.count,
            "type": self.type_name,
            "redop": self.redop,
            "root": "0" if self.collective in ROOTED else "-1",
            "out_of_place": {
                "time": self.median_seconds * 1e6,
                "alg_bw": self.alg_bw,
                "bus_bw": self.bus_bw,
                "nwrong": self.num_wrong,
            },
            "out_of_place_per_iter": {
                "min_us": float(micro.min()),
                "max_us": float(micro.max()),
                "avg_us": mean,
                **{f"p{k}_us": self.quantile_seconds(k / 100) * 1e6 for k in (50, 95, 99)},
                "stdev_us": deviation,
                "cv_pct": 100 * deviation / mean,
                "times_us": micro.tolist(),
            },
            "actual_iterations": len(self.times_seconds),
            "experiment_name": self.collective,
            "algorithm": self.algorithm,
            "implementation": self.implementation,
        }


def as_nccl_tests(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the rows and their verdict under the keys of the file of nccl-tests."""
    num_wrong = sum(row.num_wrong for row in rows)
    average = sum(row.bus_bw for row in rows) / len(rows)
    return {
        "results": [row.as_result() for row in rows],
        "out_of_bounds": {"count": num_wrong, "okay": "false" if num_wrong else "true"},
        "average_bus_bandwidth": {"bandwidth": average, "okay": "unchecked"},
    }


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"


# Name, unit, width, and value of a cell.
_COLUMNS = (
    ("size", "(B)", 11, lambda row: row.size_bytes),
    ("count", "(elements)", 11, lambda row: row.count),
    ("type", "", 8, lambda row: row.type_name),
    ("redop", "", 5, lambda row: row.redop),
    ("algorithm", "", 20, lambda row: row.algorithm),
    ("time", "(us, p50)", 10, lambda row: _micro(row.median_seconds)),
    ("p10", "(us)", 10, lambda row: _micro(row.quantile_seconds(0.1))),
    ("p99", "(us)", 10, lambda row: _micro(row.quantile_seconds(0.99))),
    ("null", "(us)", 7, lambda row: _micro(row.null_seconds)),
    ("algbw", "(GB/s)", 7, lambda row: f"{row.alg_bw:.2f}"),
    ("busbw", "(GB/s)", 7, lambda row: f"{row.bus_bw:.2f}"),
    ("#wrong", "", 6, lambda row: row.num_wrong),
)


def header(settings: Mapping[str, object]) -> list[str]:
    """Returns the settings, then the two lines of column names and units."""
    width = max(map(len, settings))
    lines = [f"# {name:<{width}} : {value}" for name, value in settings.items()]
    names = " ".join(f"{name:>{size}}" for name, _, size, _ in _COLUMNS)
    units = " ".join(f"{unit:>{size}}" for _, unit, size, _ in _COLUMNS)
    return [*lines, "#", f"#{names}  implementation", f"#{units}".rstrip()]


def line(row: Row) -> str:
    """Returns the line of one row."""
    cells = [f"{cell(row):>{width}}" for _, _, width, cell in _COLUMNS]
    return f" {' '.join(cells)}  {row.implementation}"


def footer(rows: Sequence[Row]) -> list[str]:
    """Returns the verdict and the average over all rows."""
    num_wrong = sum(row.num_wrong for row in rows)
    average = sum(row.bus_bw for row in rows) / len(rows)
    return [
        f"# Out of bounds values : {num_wrong} {'FAILED' if num_wrong else 'OK'}",
        f"# Avg bus bandwidth    : {average:.3f}",
    ]
