"""`tfparallel bench train TASK.py`: measures scaling over workers, and names the bottleneck."""

import dataclasses
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from absl import flags

from tfparallel.cluster.environment import available_cores
from tfparallel.command_line.exits import StartError
from tfparallel.command_line.flag_parsing import value_of
from tfparallel.command_line.runner import TFPARALLEL, run_job
from tfparallel.diagnostics.report import write_report
from tfparallel.flight.diagnosis import verdict
from tfparallel.flight.job import Split
from tfparallel.texts import counted

_PARTS = ("input", "compute", "reduction", "waiting", "between")


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The measurements of one run.

    Attributes:
        num_workers: The number of workers.
        global_batch_size: Rows per step.
        splits: The breakdown of the step time, by worker.
        sent_bytes: Bytes that a worker sends per step.
    """

    num_workers: int
    global_batch_size: int
    splits: Sequence[Split]
    sent_bytes: int

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return max(split.total for split in self.splits)

    @property
    def examples_per_second(self) -> float:
        """The throughput of all workers."""
        return self.global_batch_size / self.seconds

    def mean(self, part: str) -> float:
        """Returns a part of the step time, averaged over the workers."""
        return sum(getattr(split, part) for split in self.splits) / len(self.splits)


def run(values: flags.FlagValues, positional: Sequence[str]) -> int:
    """Trains on each number of workers, and prints the scaling; returns the exit code."""
    (path,) = positional
    numbers = sorted({int(text) for text in values.nproc_per_node})
    rows = values.global_batch_size
    strong = {number: _run(path, values, number, rows, max(numbers)) for number in numbers}
    weak = {numbers[0]: strong[numbers[0]]}
    for number in numbers[1:]:
        weak[number] = _run(path, values, number, rows * number // numbers[0], max(numbers))
    scalings = {"strong": strong, "weak": weak}
    for name, runs in scalings.items():
        print(f"\n{name} scaling")
        print("\n".join(_table(runs)))
    print()
    link_bits = None if values.link_gbits is None else values.link_gbits * 1e9
    verdicts = {}
    for number, run in strong.items():
        alone = strong[numbers[0]].mean("compute") * numbers[0] / number
        verdicts[number] = verdict(
            run.splits,
            sent_bytes=run.sent_bytes,
            link_bits=link_bits,
            expected_compute=None if number == numbers[0] else alone,
        )
        print(f"{counted(number, 'worker')}: {verdicts[number]}")
    if values.report is not None:
        report: dict[str, Any] = {"task": path, "verdicts": verdicts}
        for name, runs in scalings.items():
            report[name] = [dataclasses.asdict(run) for run in runs.values()]
        write_report(values.report, report)
    if values.plot is not None:
        plot = importlib.import_module("tfparallel.bench.plot")
        title = f"{os.path.basename(path)}: {verdicts[numbers[-1]].partition(':')[0]}"
        plot.draw_scaling(values.plot, list(strong.values()), list(weak.values()), title)
    for name in ("report", "plot"):
        if getattr(values, name) is not None:
            print(f"wrote {getattr(values, name)}")
    return 0


def _run(path, values, num_workers, global_batch_size, max_workers) -> Scaling:
    progress = f"{counted(num_workers, 'worker')}, {global_batch_size} rows per step …"
    print(progress, file=sys.stderr, flush=True)
    threads = str(max(1, len(available_cores()) // max_workers))
    with tempfile.TemporaryDirectory(prefix="tfparallel_bench_") as folder:
        report = os.path.join(folder, "report.json")
        train = [*TFPARALLEL, "train", path, "--parallel=data", "--num_devices=1", "--epochs=1"]
        train += [f"--steps_per_epoch={values.steps}", f"--report={report}"]
        train += [f"--global_batch_size={global_batch_size}"]
        if values.all_reduce is not None and num_workers > 1:
            train.append(f"--all_reduce={values.all_reduce}")
        fault = value_of(values, "inject")
        if fault is not None and fault.worker < num_workers > 1:
            train.append(f"--inject={values.inject}")
        names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
        environment = dict.fromkeys(names, threads)
        launch = [*TFPARALLEL, "launch", f"--nproc_per_node={num_workers}", f"--log_dir={folder}"]
        run_job(
            f"A run of {num_workers} workers", [*launch, "--", *train], environment | os.environ
        )
        with open(report, encoding="utf-8") as file:
            results = json.load(file)
    parts = results.get("time_of_a_step_seconds")
    if not parts:
        raise StartError(
            f"A run of {values.steps} steps is too short to measure. Use more --steps."
        )
    sent = sum((results.get("sent_bytes_in_a_step") or {}).values())
    return Scaling(num_workers, global_batch_size, [Split(**part) for part in parts], sent)


def _table(runs) -> list[str]:
    first = next(iter(runs.values()))
    head = ["workers", "rows", "ms a step", "examples/s", "of ideal", *_PARTS]
    lines = ["  ".join(f"{name:>10}" for name in head)]
    for number, run in runs.items():
        ideal = first.examples_per_second * number / first.num_workers
        cells = [f"{number}", f"{run.global_batch_size}", f"{run.seconds * 1e3:.1f}"]
        cells += [f"{run.examples_per_second:,.0f}", f"{run.examples_per_second / ideal:.0%}"]
        cells += [f"{run.mean(part) * 1e3:.1f}" for part in _PARTS]
        lines.append("  ".join(f"{cell:>10}" for cell in cells))
    return lines
