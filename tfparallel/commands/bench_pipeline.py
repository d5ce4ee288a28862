"""`tfparallel bench pipeline TASK.py`: measures stages, micro-batches and schedules."""

import itertools
import json
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from absl import flags

from tfparallel.command_line.runner import TFPARALLEL, run_job
from tfparallel.diagnostics.report import write_report

_THREADS = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}


def run(values: flags.FlagValues, positional: Sequence[str]) -> int:
    """Measures the pipelines named by the flags, and plain Keras; returns the exit code."""
    (path,) = positional
    plain = _run(path, values, ["--parallel=none"], num_processes=1)
    print(f"plain Keras, one process on one core: {_ms(plain['step_seconds'])} a step", flush=True)
    print(_line(_HEAD), flush=True)
    rows = []
    for number, schedule, micro_batches, recompute in itertools.product(
        values.num_devices, values.schedule, values.num_micro_batches, values.recompute
    ):
        pipeline_flags = ["--parallel=pipeline", f"--num_micro_batches={micro_batches}"]
        pipeline_flags += [f"--schedule={schedule}", f"--recompute={recompute}"]
        if values.batch_normalization is not None:
            pipeline_flags.append(f"--batch_normalization={values.batch_normalization}")
        row = {
            "num_devices": int(number),
            "schedule": schedule,
            "num_micro_batches": int(micro_batches),
            "recompute": recompute,
            **_run(path, values, pipeline_flags, num_processes=int(number)),
        }
        row["over_one_process"] = plain["step_seconds"] / row["step_seconds"]
        rows.append(row)
        print(_line(_cells(row)), flush=True)
    if values.report is not None:
        content = {"command": "bench pipeline", "task": path, "plain": plain, "pipelines": rows}
        write_report(values.report, content)
        print(f"wrote {values.report}")
    if values.plot is not None:
        _plot(values.plot, path, plain, rows)
        print(f"wrote {values.plot}")
    return 0


def _run(path, values, pipeline_flags, num_processes) -> dict[str, Any]:
    """Measures one pipeline in separate processes; returns the job's report."""
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "row.json")
        job = [*TFPARALLEL, "bench", "pipeline_job", path, *pipeline_flags, f"--report={report}"]
        job += [f"--steps={values.steps}", f"--global_batch_size={values.global_batch_size}"]
        if num_processes > 1:
            job = [*TFPARALLEL, "launch", f"--nproc_per_node={num_processes}", "--", *job]
        run_job(f"{' '.join(pipeline_flags)} on {num_processes} processes", job, _THREADS)
        result = json.loads(pathlib.Path(report).read_text())
        for rank in range(1, num_processes):
            peaks = json.loads(pathlib.Path(f"{report}.{rank}").read_text())
            for name, peak in peaks.items():
                result[name].append(peak)
        return result


_HEAD = (
    "stages", "schedule", "M", "recompute", "step", "over plain", "over serial", "ideal",
    "bubble", "simulated", "simulated/measured", "tensors, MiB", "memory, MiB",
)  # fmt: skip
_WIDTHS = (6, 11, 3, 11, 9, 10, 11, 6, 7, 9, 18, 12, 11)


def _cells(row) -> tuple[str, ...]:
    return (
        str(row["num_devices"]), row["schedule"], str(row["num_micro_batches"]), row["recompute"],
        _ms(row["step_seconds"]), f"{row['over_one_process']:.2f}",
        f"{row['over_one_after_the_other']:.2f}", f"{row['ideal_over_one_after_the_other']:.2f}",
        f"{row['bubble']:.0%}/{row['simulated_bubble']:.0%}", _ms(row["simulated_step_seconds"]),
        f"{row['simulated_step_seconds'] / row['step_seconds']:.2f}",
        _mib(_tensor_bytes(row)), _mib(row["peak_memory_bytes"]),
    )  # fmt: skip


def _line(cells) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()


def _tensor_bytes(row) -> list[int | None]:
    """Returns the bytes of tensors by process: on its GPUs if it has any, else on the host."""
    on_host, on_gpus = row["peak_tensor_bytes"], row["peak_gpu_bytes"]
    return [
        sum(gpus.values()) if gpus else host for host, gpus in zip(on_host, on_gpus, strict=True)
    ]


def _mib(sizes: Sequence[int | None]) -> str:
    """Formats sizes by process in MiB."""
    return ", ".join("?" if size is None else f"{size / 2**20:.0f}" for size in sizes)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _plot(path, task, plain, rows) -> None:
    """Draws step time over micro-batches, a line per number of stages and schedule."""
    from matplotlib.figure import Figure  # Heavy and optional: only plots need it.

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    by_kind: dict[tuple, list] = {}
    for row in rows:
        kind = row["num_devices"], row["schedule"], row["recompute"]
        by_kind.setdefault(kind, []).append(row)
    for (number, schedule, recompute), group in by_kind.items():
        label = f"{number} stages, {schedule}" + f", recompute {recompute}" * (recompute != "never")
        x = [row["num_micro_batches"] for row in group]
        (line,) = axes.plot(x, [1e3 * row["step_seconds"] for row in group], "o-", label=label)
        simulated = [1e3 * row["simulated_step_seconds"] for row in group]
        axes.plot(x, simulated, "--", color=line.get_color(), linewidth=0.8)
    axes.axhline(1e3 * plain["step_seconds"], color="black", linewidth=0.8)
    axes.annotate("plain Keras, one core", (x[-1], 1e3 * plain["step_seconds"]), fontsize=8,
                  ha="right", va="bottom")  # fmt: skip
    axes.set(xlabel="micro-batches", ylabel="step, ms", ylim=(0, None))
    axes.set_title(f"{task} (dashed: simulated from stage times)", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
