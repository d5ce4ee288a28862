"""The table of a measurement, as nccl-tests writes it, with columns for what ran."""

from collections.abc import Mapping, Sequence

from tfparallel.bench.row import Row

_COLUMNS = (
    ("size", "(B)", 11),
    ("count", "(elements)", 11),
    ("type", "", 8),
    ("redop", "", 5),
    ("algorithm", "", 20),
    ("time", "(us)", 10),
    ("p10", "(us)", 10),
    ("p90", "(us)", 10),
    ("null", "(us)", 7),
    ("algbw", "(GB/s)", 7),
    ("busbw", "(GB/s)", 7),
    ("#wrong", "", 6),
)


def header(settings: Mapping[str, object]) -> list[str]:
    """Returns the settings, then the two lines of column names and units."""
    width = max(map(len, settings))
    lines = [f"# {name:<{width}} : {value}" for name, value in settings.items()]
    names = " ".join(f"{name:>{size}}" for name, _, size in _COLUMNS)
    units = " ".join(f"{unit:>{size}}" for _, unit, size in _COLUMNS)
    return [*lines, "#", f"#{names}  implementation", f"#{units}".rstrip()]


def line(row: Row) -> str:
    """Returns one row."""
    values = (
        str(row.size_bytes),
        str(row.count),
        row.type_name,
        row.redop,
        row.algorithm,
        _micro(row.median_seconds),
        _micro(row.quantile_seconds(0.1)),
        _micro(row.quantile_seconds(0.9)),
        _micro(row.null_seconds),
        f"{row.alg_bw:.2f}",
        f"{row.bus_bw:.2f}",
        str(row.num_wrong),
    )
    cells = [f"{value:>{size}}" for value, (_, _, size) in zip(values, _COLUMNS, strict=True)]
    return f" {' '.join(cells)}  {row.implementation}"


def footer(rows: Sequence[Row]) -> list[str]:
    """Returns the verdict and the average over all rows."""
    num_wrong = sum(row.num_wrong for row in rows)
    average = sum(row.bus_bw for row in rows) / len(rows)
    return [
        f"# Out of bounds values : {num_wrong} {'FAILED' if num_wrong else 'OK'}",
        f"# Avg bus bandwidth    : {average:.3f}",
    ]


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"
