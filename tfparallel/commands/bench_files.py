"""What `tfparallel bench` concludes from a sweep, and the files that it writes."""

import contextlib
import csv
import importlib
import json
import os
import platform
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags

from tfparallel.bench import model as models
from tfparallel.bench.contender import OneProcess, World
from tfparallel.bench.limit import memory_bandwidth
from tfparallel.bench.row import Row
from tfparallel.collectives import profile
from tfparallel.commands.flags import resolved
from tfparallel.diagnostics.report import versions

__all__ = ["conclude", "save_profile"]


def conclude(values: flags.FlagValues, world: World, rows: Sequence[Row]) -> None:
    """Prints the cost model and the winners, and writes what the flags ask for.

    Args:
        values: The command's flags.
        world: Who took part.
        rows: The sweep.
    """
    shared = isinstance(world, OneProcess)
    is_sweep = len({row.size_bytes for row in rows}) > 1
    num_cores = os.cpu_count() if len(set(world.names)) == 1 else None
    found = models.fitted(rows, shared, num_cores) if is_sweep else {}
    winners = ", ".join(f"{name} from {size} B" for size, name in models.fastest(rows))
    print(f"# Fastest, as measured : {winners}")
    for transport, model in found.items():
        print(f"# Cost model, {transport:<8} : {models.describe(model)}")
    bandwidth = None
    if values.plot is not None or values.report is not None:
        bandwidth = memory_bandwidth()
    if values.report is not None:
        content = {
            "configuration": resolved(values),
            "environment": _environment(world, bandwidth),
            "models": {name: models.as_json(model) for name, model in found.items()},
            "rows": [row.as_json() for row in rows],
        }
        with _written(values.report) as file:
            json.dump(content, file, indent=2)
            file.write("\n")
    if values.csv is not None:
        records = [row.as_json() for row in rows]
        with _written(values.csv) as file:
            writer = csv.DictWriter(file, fieldnames=list(records[0]))
            writer.writeheader()
            writer.writerows(records)
    if values.plot is not None:
        title = f"{rows[0].collective}, {rows[0].dtype}, {world.place}"
        # Matplotlib is an extra: loaded where it is asked for.
        plot = importlib.import_module("tfparallel.bench.plot")
        plot.draw(values.plot, rows, title=title, models=found, bandwidth=bandwidth, shared=shared)
        print(f"wrote {values.plot}")
    if values.save_profile:
        save_profile(world.names, rows)


def save_profile(names: Sequence[str], rows: Sequence[Row]) -> None:
    """Keeps a sweep, as lower quartiles, for `--all_reduce=auto`."""
    times: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        times.setdefault(row.algorithm, []).append((row.size_bytes, row.quantile_seconds(0.25)))
    print(f"wrote {profile.save(names, times)}")


def _environment(world, bandwidth) -> dict[str, Any]:
    return {
        "place": world.place,
        "num_cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "memory_bandwidth": bandwidth,
        "versions": versions(),
    }


@contextlib.contextmanager
def _written(path) -> Iterator[Any]:
    with open(path, "w", newline="") as file:
        yield file
    print(f"wrote {path}")
