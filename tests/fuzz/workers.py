"""The programs on several workers: real processes, one job for many programs.

The process that drew the programs hands them on with what one device saw; all workers train each,
and worker 0 judges.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tfparallel.cluster.environment import Place, worker_environment
from tfparallel.cluster.ports import free_ports
from tfparallel.cluster.supervisor import Program as Process
from tfparallel.cluster.supervisor import run

from .judge import CRASH, OneDevice, Outcome, judge

ROOT = Path(__file__).resolve().parents[2]
SEARCHED = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "quick_start")])
NAME = "workers"


def judge_all(
    batch: Sequence[OneDevice], num_workers: int = 2, num_devices: int = 1
) -> list[Outcome]:
    """An outcome for each; if one breaks the job, a new one goes on."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(batch):
        with tempfile.TemporaryDirectory() as folder:
            left = batch[len(outcomes) :]
            Path(folder, "batch").write_bytes(pickle.dumps(left))
            ended = _start(folder, num_workers, num_devices, 60 + 60 * len(left))
            outcomes += _read(folder)
        if len(outcomes) < len(batch):
            text = ended.culprit.explain() if ended.culprit else "The job ended early."
            outcomes.append(Outcome(NAME, CRASH, text))
    return outcomes


def _start(folder: str, num_workers: int, num_devices: int, seconds: float):
    ports = free_ports(num_workers + 1)
    addresses = [f"127.0.0.1:{port}" for port in ports[1:]]
    processes = []
    for worker in range(num_workers):
        place = Place(addresses, worker, worker, num_workers, 0, f"127.0.0.1:{ports[0]}", "fuzz", 0)
        environment = {**worker_environment(dict(os.environ), place), "PYTHONPATH": SEARCHED}
        command = [sys.executable, "-m", "tests.fuzz.workers", folder, str(num_devices)]
        processes.append(Process(worker, command, environment))
    return run(processes, timeout_seconds=seconds)


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


def main(folder: str, num_devices: int) -> None:
    import warnings

    import tfparallel

    warnings.simplefilter("ignore")
    tfparallel.devices.split_cpu(num_devices)
    strategy = tfparallel.MultiWorkerMirroredStrategy()
    from tests.parity.case import Plain

    class Workers(Plain):
        """`tfparallel.data_parallel` over the workers of this job."""

        name = NAME

        def make(self, build, compile=None):
            model = tfparallel.data_parallel(build, strategy)
            if compile is not None:
                compile(model)
            return model

    batch: list[OneDevice] = pickle.loads(Path(folder, "batch").read_bytes())
    for one_device in batch:
        outcome = judge(Workers(), one_device)
        # A worker that fails alone is a finding, wherever it fails.
        outcomes = strategy.workers.exchange(dataclasses.astuple(outcome))
        worst = max((Outcome(*each) for each in outcomes), key=lambda each: each.is_finding)
        if strategy.workers.worker_index == 0:
            with open(os.path.join(folder, "outcomes"), "ab") as file:
                pickle.dump(worst, file)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
