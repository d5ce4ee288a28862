"""The body of `tfparallel bench`: everything that needs TensorFlow loaded."""

import os
import platform
from collections.abc import Iterable, Iterator, Sequence

from absl import flags

from tfparallel import devices as device_lib
from tfparallel.bench import table
from tfparallel.bench.between_workers import Workers, worker_contenders, worker_refusals
from tfparallel.bench.collectives import REDUCING
from tfparallel.bench.contender import Contender, OneProcess, World
from tfparallel.bench.in_process import device_contenders
from tfparallel.bench.inputs import itemsize
from tfparallel.bench.measure import measure
from tfparallel.bench.row import Row
from tfparallel.bench.sizes import parse_size, sweep
from tfparallel.cluster.spec import Cluster
from tfparallel.collectives import cross_device
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.commands.bench_files import conclude
from tfparallel.commands.bench_task import advice, gradient_counts
from tfparallel.commands.flags import StartError, UsageError
from tfparallel.diagnostics.report import versions
from tfparallel.replication.drop_in import MultiWorkerMirroredStrategy
from tfparallel.startup import quiet_stderr
from tfparallel.task import load_task

__all__ = ["bench"]


def bench(collective: str, task_path: str | None, values: flags.FlagValues) -> int:
    """Measures and shows; returns 1 if an element was wrong."""
    started = _start(values)
    parts = None if task_path is None else gradient_counts(load_task(task_path))
    if parts is None:
        counts = sweep(
            parse_size(values.min_bytes),
            parse_size(values.max_bytes),
            values.step_factor,
            itemsize(values.dtype),
        )
    else:
        counts = [sum(parts)]
    world, contenders = _participants(collective, values, started, parts)
    is_chief = world.ranks[0] == 0
    say = print if is_chief else _silent
    found: Iterable[Row] = _measured(world, contenders, counts, collective, values)
    if parts is not None:
        found = list(found)
        say(advice(found, len(parts)))  # What was asked comes before what it rests on.
    say("\n".join(table.header(_settings(collective, world, values, parts))), flush=True)
    rows: list[Row] = []
    for row in found:
        rows.append(row)
        say(table.line(row), flush=True)
    say("\n".join(table.footer(rows)), flush=True)
    if is_chief:
        conclude(values, world, rows)
    return 1 if any(row.num_wrong for row in rows) else 0


def _measured(world, contenders, counts, collective, values) -> Iterator[Row]:
    return measure(
        world,
        contenders,
        counts,
        collective=collective,
        dtype=values.dtype,
        iters=values.iters,
        warmup_iters=values.warmup_iters,
    )


def _silent(*_, **__):
    """What a worker says that is not the chief."""


def _start(values: flags.FlagValues) -> ProcessGroup | list[str]:
    """Joins the workers of the job, or makes this process's devices: before anything is built."""
    try:
        if values.device_type == "cpu":
            device_lib.hide_gpus()
        if Cluster.from_env().num_workers > 1:
            return _start_workers()
        devices = device_lib.choose_devices(
            num_devices=values.num_devices, device_type=values.device_type
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    if len(devices) < 2:
        raise UsageError(
            "An all-reduce needs two ranks. Received: one device. Add --num_devices=4, or "
            "--nproc_per_node=2 for processes."
        )
    return devices


def _participants(
    collective: str, values: flags.FlagValues, started: ProcessGroup | list[str], parts
) -> tuple[World, list[Contender]]:
    """Who takes part and what is measured: the workers of a job, or this process's devices."""
    if isinstance(started, ProcessGroup):
        every = worker_contenders(started)
        found = [c for c in every if collective in c.collectives]
        lacking = {c.name: f"it has no {collective}" for c in every if c not in found}
        names = _chosen(values, [c.name for c in found], worker_refusals(started) | lacking)
        return Workers(started), [c for c in found if c.name in names]
    if collective != "all_reduce":
        raise UsageError(
            "Between the devices of one process all_reduce is measured. Processes are required for "
            f"another collective. Received: {collective}. Add --nproc_per_node=2."
        )
    refused = cross_device.refusals(started)
    names = _chosen(values, cross_device.runnable(started), refused)
    return OneProcess(len(started), started), list(device_contenders(started, names, parts))


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


def _settings(collective, world, values, parts=None) -> dict[str, object]:
    found = versions()
    sizes = f"{values.min_bytes} to {values.max_bytes}, factor {values.step_factor}"
    if parts is not None:
        sizes = f"the {len(parts)} gradients of the model, together"
    return {
        "collective": f"{collective}, type {values.dtype}",
        "ranks": world.place,
        "sizes": sizes,
        "iterations": f"{values.iters}, warm-up {values.warmup_iters}, algorithms interleaved",
        "time": "median of the slowest rank's, the null step (no exchange) included",
        "validation": "whole numbers exact, random ones within the rounding of 2n terms"
        if collective in REDUCING
        else "every element exact",
        "machine": f"{os.cpu_count()} logical cores, {platform.machine()}",
        "versions": ", ".join(f"{name} {version}" for name, version in found.items()),
    }
