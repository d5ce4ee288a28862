"""The body of `tfparallel bench`: everything that needs TensorFlow loaded."""

import contextlib
import csv
import json
import os
import platform
from collections.abc import Sequence

from absl import flags

from tfparallel import devices as device_lib
from tfparallel.bench import table
from tfparallel.bench.between_workers import Workers, worker_contenders, worker_refusals
from tfparallel.bench.contender import Contender, OneProcess, World
from tfparallel.bench.in_process import device_contenders
from tfparallel.bench.inputs import itemsize
from tfparallel.bench.measure import measure
from tfparallel.bench.row import Row
from tfparallel.bench.sizes import parse_size, sweep
from tfparallel.cluster.spec import Cluster
from tfparallel.collectives import cross_device
from tfparallel.commands.flags import StartError, UsageError, resolved
from tfparallel.diagnostics.report import versions
from tfparallel.replication.drop_in import MultiWorkerMirroredStrategy
from tfparallel.startup import quiet_stderr

__all__ = ["bench"]


def bench(collective: str, task_path: str | None, values: flags.FlagValues) -> int:
    """Measures and shows; returns 1 if an element was wrong."""
    del task_path
    counts = sweep(
        parse_size(values.min_bytes),
        parse_size(values.max_bytes),
        values.step_factor,
        itemsize(values.dtype),
    )
    world, contenders = _participants(collective, values)
    is_chief = world.ranks[0] == 0
    say = print if is_chief else _silent
    say("\n".join(table.header(_settings(collective, world, values))), flush=True)
    rows: list[Row] = []
    for row in measure(
        world,
        contenders,
        counts,
        collective=collective,
        dtype=values.dtype,
        iters=values.iters,
        warmup_iters=values.warmup_iters,
    ):
        rows.append(row)
        say(table.line(row), flush=True)
    say("\n".join(table.footer(rows)), flush=True)
    if is_chief:
        _write(values, world, rows)
    return 1 if any(row.num_wrong for row in rows) else 0


def _silent(*_, **__):
    """What a worker says that is not the chief."""


def _participants(
    collective: str, values: flags.FlagValues
) -> tuple[World, list[Contender]]:
    """Who takes part and what is measured: the workers of a job, or this process's devices."""
    try:
        if Cluster.from_env().num_workers > 1:
            group = _start_workers()
            found = [c for c in worker_contenders(group) if collective in c.collectives]
            names = _chosen(values, [c.name for c in found], worker_refusals(group))
            return Workers(group), [c for c in found if c.name in names]
        devices = device_lib.choose_devices(
            num_devices=values.num_devices, device_type=values.device_type
        )
        if len(devices) < 2:
            raise UsageError(
                "An all-reduce needs two ranks. Received: one device. Add --num_devices=4, or "
                "--nproc_per_node=2 for processes."
            )
        refused = cross_device.refusals(devices)
        names = _chosen(values, cross_device.runnable(devices), refused)
        return OneProcess(len(devices)), list(device_contenders(devices, names))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _start_workers():
    try:
        with quiet_stderr():
            return MultiWorkerMirroredStrategy.of_process().workers
    except RuntimeError as error:
        raise StartError(str(error)) from error


def _chosen(values, runnable: Sequence[str], refused: dict[str, str]) -> list[str]:
    if values.algorithms == ["all"]:
        return list(runnable)
    unknown = [name for name in values.algorithms if name not in runnable]
    if unknown or not values.algorithms:
        raise UsageError(cross_device.unknown(unknown or ["nothing"], runnable, refused))
    return list(dict.fromkeys(values.algorithms))


def _settings(collective, world, values) -> dict[str, object]:
    found = versions()
    return {
        "collective": f"{collective}, redop sum, type {values.dtype}",
        "ranks": world.place,
        "sizes": f"{values.min_bytes} to {values.max_bytes}, factor {values.step_factor}",
        "iterations": f"{values.iters}, warm-up {values.warmup_iters}, algorithms interleaved",
        "time": "median of the slowest rank's, the null step (no exchange) included",
        "validation": "whole numbers exact, random ones within the rounding of 2n terms",
        "machine": f"{os.cpu_count()} logical cores, {platform.machine()}",
        "versions": ", ".join(f"{name} {version}" for name, version in found.items()),
    }


def _write(values, world: World, rows: list[Row]) -> None:
    records = [row.as_json() for row in rows]
    if values.json is not None:
        environment = {
            "place": world.place,
            "num_cores": os.cpu_count(),
            "machine": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "versions": versions(),
        }
        with _written(values.json) as file:
            content = {"configuration": resolved(values), "environment": environment}
            json.dump({**content, "rows": records}, file, indent=2)
            file.write("\n")
    if values.csv is not None:
        with _written(values.csv) as file:
            writer = csv.DictWriter(file, fieldnames=list(records[0]))
            writer.writeheader()
            writer.writerows(records)


@contextlib.contextmanager
def _written(path):
    with open(path, "w", newline="") as file:
        yield file
    print(f"wrote {path}")
