"""`tfparallel bench all_reduce`: measures and verifies collective algorithms."""

import csv
import importlib
import os
import platform
from collections.abc import Iterable, Sequence

import keras
from absl import flags

from tfparallel import devices as device_lib
from tfparallel.bench import cost_fit, table
from tfparallel.bench.collectives import REDUCING
from tfparallel.bench.contenders import Workers, device_contenders, worker_contenders
from tfparallel.bench.measure import Contender, OneProcess, World, measure
from tfparallel.bench.sizes import ITEM_BYTES
from tfparallel.bench.table import Row
from tfparallel.cluster.cluster_spec import Cluster
from tfparallel.collectives import cross_device, profile
from tfparallel.collectives.algorithm_selection import MIN_GAIN
from tfparallel.collectives.process_group import ProcessGroup
from tfparallel.command_line.contradictions import counts_of
from tfparallel.command_line.exits import StartError, UsageError
from tfparallel.command_line.flag_parsing import resolved
from tfparallel.diagnostics.report import versions, write_report
from tfparallel.replication.drop_in_strategies import MultiWorkerMirroredStrategy
from tfparallel.startup import quiet_stderr
from tfparallel.task import Task, TaskError, load_task

# TensorFlow's defaults, between devices and between workers.
_DEFAULTS = ("tf_reduce_to_one", "reduce_to_one", "ring")


def run(values: flags.FlagValues, positional: Sequence[str]) -> int:
    """Runs the measurement and prints it; returns 1 if an element was wrong."""
    collective, task_path, *_ = [*positional, None]
    started = _start(values)
    if task_path is None:
        parts, counts = None, counts_of(values, ITEM_BYTES[values.dtype])
    else:
        parts = _gradient_counts(load_task(task_path))
        counts = [sum(parts)]
    world, contenders = _participants(collective, values, started, parts)
    is_chief = world.ranks[0] == 0
    say = print if is_chief else lambda *_, **__: None
    results: Iterable[Row] = measure(
        world,
        contenders,
        counts,
        collective=collective,
        dtype=values.dtype,
        iters=values.iters,
        warmup_iters=values.warmup_iters,
        unalign=values.unalign,
    )
    if parts is not None:
        results = list(results)
        say(_advice(results, len(parts)))  # The advice comes before the data.
    say("\n".join(table.header(_settings(collective, world, values, parts))), flush=True)
    rows: list[Row] = []
    for row in results:
        rows.append(row)
        say(table.line(row), flush=True)
    say("\n".join(table.footer(rows)), flush=True)
    if is_chief:
        _conclude(values, world, rows)
    return 1 if any(row.num_wrong for row in rows) else 0


def _start(values: flags.FlagValues) -> ProcessGroup | list[str]:
    """Joins the job's workers, or creates this process's devices, before building anything."""
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
            "An all-reduce needs at least two ranks. Received: one device. Add --num_devices=4, or "
            "--nproc_per_node=2 for processes."
        )
    return devices


def _participants(
    collective: str, values: flags.FlagValues, started: ProcessGroup | list[str], parts
) -> tuple[World, list[Contender]]:
    """Returns the ranks and contenders: the job's workers, or this process's devices."""
    if isinstance(started, ProcessGroup):
        candidates, refused = worker_contenders(started)
        contenders = [c for c in candidates if collective in c.collectives]
        lacking = {c.name: f"it has no {collective}" for c in candidates if c not in contenders}
        names = _chosen(values, [c.name for c in contenders], refused | lacking)
        return Workers(started), [c for c in contenders if c.name in names]
    if collective != "all_reduce":
        raise UsageError(
            "Within one process only all_reduce can be measured; other collectives need several "
            f"processes. Received: {collective}. Add --nproc_per_node=2."
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


def _settings(collective, world, values, parts) -> dict[str, object]:
    package_versions = versions()
    sizes = f"{values.min_bytes} to {values.max_bytes}, factor {values.step_factor}"
    if values.unalign:
        sizes += f", and each with {values.unalign} more elements"
    if parts is not None:
        sizes = f"all {len(parts)} gradients of the model in one call"
    return {
        "collective": f"{collective}, type {values.dtype}",
        "ranks": world.place,
        "sizes": sizes,
        "iterations": f"{values.iters}, warm-up {values.warmup_iters}, algorithms interleaved",
        "time": "median of the slowest rank, including the null step (no exchange)",
        "validation": "integers exact, random values within the rounding of 2n terms"
        if collective in REDUCING
        else "every element exact",
        "machine": f"{os.cpu_count()} logical cores, {platform.machine()}",
        "versions": ", ".join(f"{name} {version}" for name, version in package_versions.items()),
    }


def _conclude(values: flags.FlagValues, world: World, rows: Sequence[Row]) -> None:
    """Prints the cost model and the winners of a sweep, and writes the requested files."""
    shared = isinstance(world, OneProcess)
    is_sweep = len({row.size_bytes for row in rows}) > 1
    num_cores = os.cpu_count() if len(set(world.names)) == 1 else None
    models = cost_fit.fitted(rows, shared, num_cores) if is_sweep else {}
    winners = ", ".join(f"{name} from {size} B" for size, name in cost_fit.fastest(rows))
    print(f"# Fastest, as measured : {winners}")
    for transport, model in models.items():
        print(f"# Cost model, {transport:<8} : {cost_fit.describe(model)}")
    bandwidth = None
    if values.plot is not None or values.report is not None:
        bandwidth = cost_fit.memory_bandwidth()
    if values.report is not None:
        content = {
            "configuration": resolved(values),
            "environment": {
                "place": world.place,
                "num_cores": os.cpu_count(),
                "machine": platform.machine(),
                "system": f"{platform.system()} {platform.release()}",
                "memory_bandwidth": bandwidth,
                "versions": versions(),
            },
            "models": {name: cost_fit.as_json(model) for name, model in models.items()},
            "rows": [row.as_json() for row in rows],
            **table.as_nccl_tests(rows),
        }
        write_report(values.report, content)
        print(f"wrote {values.report}")
    if values.csv is not None:
        records = [row.as_json() for row in rows]
        with open(values.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(records[0]))
            writer.writeheader()
            writer.writerows(records)
        print(f"wrote {values.csv}")
    if values.plot is not None:
        title = f"{rows[0].collective}, {rows[0].dtype}, {world.place}"
        # Matplotlib is an optional dependency: import it only if needed.
        plot = importlib.import_module("tfparallel.bench.plot")
        plot.draw_sweep(
            values.plot, rows, title=title, models=models, bandwidth=bandwidth, shared=shared
        )
        print(f"wrote {values.plot}")
    if values.save_profile:
        times: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            times.setdefault(row.algorithm, []).append((row.size_bytes, row.quantile_seconds(0.25)))
        print(f"wrote {profile.save(world.names, times)}")


def _gradient_counts(task: Task) -> list[int]:
    """Returns the number of elements of each gradient of a task's model."""
    model = task.build_model()
    if not model.built:
        data, _ = task.load_data()
        if not isinstance(data, tuple):
            raise TaskError(
                f"The model of {task.name} is only built by its first batch, but the sizes of its "
                "gradients are needed earlier. A built model is required. Received: a model "
                "without variables. Start it with a `keras.Input`."
            )
        model(keras.tree.map_structure(lambda leaf: leaf[:1], data[0]))
    counts = [int(variable.value.shape.num_elements()) for variable in model.trainable_variables]
    if not counts:
        raise TaskError(
            f"The model of {task.name} has no gradients to reduce; at least one trainable variable "
            "is required. Received: none."
        )
    return counts


def _advice(rows: Sequence[Row], num_tensors: int) -> str:
    """Recommends an algorithm for a model, with the time it saves, in one line."""
    default = next((row for name in _DEFAULTS for row in rows if row.algorithm == name), None)
    best = min(rows, key=lambda row: row.median_seconds)
    size = f"{rows[0].size_bytes / 1e6:.3g} MB in {num_tensors} tensors"
    if default is None:
        return (
            f"for this model, {size}: {best.algorithm} is the fastest measured "
            f"({_milliseconds(best.median_seconds)} a step)"
        )
    saved = default.median_seconds - best.median_seconds
    if saved < MIN_GAIN * default.median_seconds:
        return (
            f"for this model, {size}: keep TensorFlow's default "
            f"({_milliseconds(default.median_seconds)} a step); no algorithm saves {MIN_GAIN:.0%} "
            "of it"
        )
    return (
        f"for this model, {size}: use --all_reduce={best.algorithm}; it saves "
        f"{_milliseconds(saved)} a step ({_milliseconds(best.median_seconds)} instead of "
        f"{_milliseconds(default.median_seconds)})"
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms"
