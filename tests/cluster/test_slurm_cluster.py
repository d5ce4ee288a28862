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
    pytest.mark.nightly,
    pytest.mark.skipif(
        slurm_cluster.why_not() is not None, reason=slurm_cluster.why_not() or "there is one"
    ),
]
TRAIN = ["train", str(TASKS / "dropout.py"), "--epochs=8", "--seed=7", "--global_batch_size=32"]


@pytest.fixture(name="slurm", scope="module")
def run_cluster():
    with slurm_cluster.cluster() as environment:
        yield {
            **environment,
            "PATH": os.pathsep.join([os.path.dirname(sys.executable), environment["PATH"]]),
        }


def until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.3)


def test_a_job_that_slurm_signals_goes_back_into_the_queue_and_goes_on(slurm, tmp_path):
    flags = ["--parallel=data", f"--checkpoint_dir={tmp_path}/ckpt", f"--save={tmp_path}/s.keras"]
    emit = ["launch", "--emit=slurm", "--nnodes=2", f"--sbatch_args=--output={tmp_path}/log"]
    # Slow, or it would have ended before the signal.
    command = ["tfparallel", *TRAIN, *flags, "--inject=slow:worker=0,ms=200"]
    script = subprocess.run(
        [sys.executable, "-m", "tfparallel", *emit, "--", *command],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    (tmp_path / "job.sh").write_text(script)

    def log():
        path = tmp_path / "log"
        return path.read_text() if path.exists() else ""

    def called(*arguments):
        return subprocess.run(
            arguments, cwd=ROOT, env=slurm, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    job = re.search(r"job (\d+)", called("sbatch", str(tmp_path / "job.sh")))[1]
    try:
        until(lambda: "Epoch 2/8" in log(), 120, log)
        called("scancel", "--signal=USR1", job)  # As before the time limit, to the launchers.
        # Slurm lets it rest for two minutes.
        until(lambda: (tmp_path / "s.keras").exists(), 400, log)
        until(lambda: not called("squeue", "--noheader"), 60, log)
    finally:
        called("scancel", job)
    shown = log()
    done = re.search(r"stopped by SIGUSR1: (\d+) steps are in the checkpoint", shown)[1]
    assert "the workers have saved their state" in shown, shown
    assert f"({done} steps are done)" in shown, shown
    tool = [sys.executable, "-m", "tfparallel"]
    undisturbed = [*tool, *TRAIN, "--parallel=data", f"--save={tmp_path}/n.keras"]
    subprocess.run(
        [*tool, "launch", "--nproc_per_node=2", "--", *undisturbed],
        cwd=ROOT, check=True, timeout=120, capture_output=True,
    )  # fmt: skip
    expected, found = (
        keras.models.load_model(tmp_path / name).get_weights() for name in ("n.keras", "s.keras")
    )
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-5)
