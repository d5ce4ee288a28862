"""What `launch --emit=slurm` prints, submitted to a real Slurm of two nodes."""

import os
import re
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from tests.cluster import slurm_cluster
from tests.commands.command_line import ROOT, TASKS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        slurm_cluster.why_not() is not None, reason=slurm_cluster.why_not() or "there is one"
    ),
]
BLOBS, DROPOUT = str(TASKS / "blobs.py"), str(TASKS / "dropout.py")
TRAIN = ["--epochs=8", "--seed=7", "--global_batch_size=32", "--parallel=data"]


@pytest.fixture(name="slurm", scope="module")
def run_cluster():
    with slurm_cluster.cluster() as environment:
        yield {
            **environment,
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), environment["PATH"]]),
        }


@pytest.fixture(name="submit")
def submitted(slurm, tmp_path):
    """Submits a job that trains slowly, or it would have ended before the fault."""
    jobs = []

    def submit(task, *sbatch_args):
        flags = [f"--checkpoint_dir={tmp_path}/c", f"--save={tmp_path}/s.keras"]
        emit = ["launch", "--emit=slurm", "--nnodes=2", *sbatch_args]
        emit += [f"--sbatch_args=--output={tmp_path}/log"]
        command = ["tfparallel", "train", task, *TRAIN, *flags, "--inject=slow:worker=0,ms=200"]
        script = subprocess.run(
            [sys.executable, "-m", "tfparallel", *emit, "--", *command],
            cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
        ).stdout  # fmt: skip
        (tmp_path / "job.sh").write_text(script)
        jobs.append(Job(slurm, tmp_path / "log", str(tmp_path / "job.sh")))
        return jobs[-1]

    yield submit
    for job in jobs:
        job.call("scancel", job.number)


class Job:
    """A job of Slurm's, from `sbatch` on."""

    def __init__(self, environment, log, script):
        self._environment, self._log = environment, log
        self.number = re.search(r"job (\d+)", self.call("sbatch", script))[1]

    def call(self, *command):
        """What one of Slurm's commands prints."""
        return subprocess.run(
            command, cwd=ROOT, env=self._environment, capture_output=True, text=True, check=True,
            timeout=60,
        ).stdout  # fmt: skip

    def log(self):
        return self._log.read_text() if self._log.exists() else ""

    def wait_until(self, condition, seconds):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.3)


def assert_ends_as_undisturbed(task, folder):
    """The weights are those of a run of two workers that nobody disturbs."""
    tool = [sys.executable, "-m", "tfparallel"]
    train = [*tool, "train", task, *TRAIN, f"--save={folder}/n.keras"]
    subprocess.run(
        [*tool, "launch", "--nproc_per_node=2", "--", *train],
        cwd=ROOT, check=True, timeout=120, capture_output=True,
    )  # fmt: skip
    expected, actual = (
        keras.models.load_model(folder / name).get_weights() for name in ("n.keras", "s.keras")
    )
    for one, other in zip(expected, actual, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-5)


def test_a_job_that_slurm_signals_goes_back_into_the_queue_and_goes_on(submit, tmp_path):
    job = submit(DROPOUT)
    job.wait_until(lambda: "Epoch 2/8" in job.log(), 120)
    job.call("scancel", "--signal=USR1", job.number)  # As before the time limit, to the launchers.
    # Slurm lets it rest for two minutes.
    job.wait_until((tmp_path / "s.keras").exists, 400)
    job.wait_until(lambda: not job.call("squeue", "--noheader"), 60)
    done = re.search(r"stopped by SIGUSR1: (\d+) steps are in the checkpoint", job.log())[1]
    assert "the workers saved their state" in job.log(), job.log()
    assert f"({done} steps are done)" in job.log(), job.log()
    assert_ends_as_undisturbed(DROPOUT, tmp_path)


def test_a_job_that_slurm_requeues_at_another_size_goes_on(submit, tmp_path):
    """One of its two nodes is away by then."""
    job = submit(BLOBS, "--sbatch_args=--nodes=1-2")
    job.wait_until(lambda: "Epoch 2/8" in job.log(), 120)
    job.call("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=test")
    job.call("scancel", "--signal=USR1", job.number)
    runs_alone = re.compile(r"JobState=RUNNING.*NumNodes=1 ", re.DOTALL)
    job.wait_until(lambda: runs_alone.search(job.call("scontrol", "show", "job", job.number)), 400)
    job.wait_until((tmp_path / "s.keras").exists, 120)
    job.wait_until(lambda: not job.call("squeue", "--noheader"), 60)
    job.call("scontrol", "update", "NodeName=node2", "State=RESUME")
    assert_ends_as_undisturbed(BLOBS, tmp_path)
