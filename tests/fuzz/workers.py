"""The programs on several workers: real processes, one job for many programs.

The process that drew the programs hands them on with what one device saw; all workers train each,
and worker 0 judges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.workers.jobs import run_job

from .judge import CRASH, OneDevice, Outcome, judge

NAME = "workers"
SHARED = ("", "optimizer", "parameters")  # Jobs take turns.


def name_of(shard: str) -> str:
    return f"{NAME} shard={shard}" if shard else NAME


def judge_all(
    batch: Sequence[OneDevice], num_workers: int = 2, num_devices: int = 1, shard: str = ""
) -> list[Outcome]:
    """An outcome for each; if one breaks the job, a new one goes on.

    Args:
        batch: What one device saw of each program.
        num_workers: How many workers.
        num_devices: How many devices each has.
        shard: What they share out; nothing if empty.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(batch):
        with tempfile.TemporaryDirectory() as folder:
            remaining = batch[len(outcomes) :]
            Path(folder, "batch").write_bytes(pickle.dumps(remaining))
            seconds = 60 + 60 * len(remaining)
            failure = run_job(main, [folder, num_devices, shard], num_workers, seconds)
            outcomes += _read(folder)
        if len(outcomes) < len(batch):
            outcomes.append(Outcome(name_of(shard), CRASH, failure or "The job ended early."))
    return outcomes


def _read(folder: str) -> list[Outcome]:
    path, outcomes = Path(folder, "outcomes"), []
    if path.exists():
        with path.open("rb") as file:
            while True:
                try:
                    outcomes.append(pickle.load(file))
                except EOFError:
                    break
    return outcomes


def main(folder: str, num_devices: int, shard: str) -> None:
    import warnings

    import tfparallel

    warnings.simplefilter("ignore")
    tfparallel.devices.split_cpu(num_devices)
    strategy = tfparallel.MultiWorkerMirroredStrategy()
    from tests.parity.case import Plain

    class Workers(Plain):
        """`tfparallel.data_parallel` over the workers of this job."""

        name = name_of(shard)

        def make(self, build, compile=None):
            model = tfparallel.data_parallel(build, strategy, shard=shard or None)
            if compile is not None:
                compile(model)
            return model

        @contextlib.contextmanager
        def directory(self):
            with super().directory() as local_folder:
                yield strategy.workers.exchange(local_folder, "a folder")[0]
                strategy.workers.exchange(None, "a folder")

    batch: list[OneDevice] = pickle.loads(Path(folder, "batch").read_bytes())
    for one_device in batch:
        outcome = judge(Workers(), one_device)
        # A worker that fails alone is a finding, wherever it fails.
        outcomes = strategy.workers.exchange(dataclasses.astuple(outcome), "an outcome")
        worst = max((Outcome(*each) for each in outcomes), key=lambda each: each.is_finding)
        if strategy.workers.worker_index == 0:
            with open(os.path.join(folder, "outcomes"), "ab") as file:
                pickle.dump(worst, file)
