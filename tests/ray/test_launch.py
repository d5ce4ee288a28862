"""`launch --on=ray`: a program of its own as the workers of a job on Ray."""

import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'tfparallel[ray]'")

import keras
import ray

from tests.commands.command_line import ROOT, TASKS
from tests.ray.clusters import cluster, wait_for

pytestmark = pytest.mark.slow
ROUNDING = 1e-9  # The sums of a batch are added in another order on several workers.
TRAIN = [sys.executable, "-m", "tfparallel", "train", str(TASKS / "blobs.py"), "--seed=7"]
TRAIN += ["--precision=float64", "--global_batch_size=32", "--epochs=4"]


@pytest.fixture(scope="module", autouse=True)
def node():
    with cluster(1, num_cpus=2) as started:
        yield started


def launch(*arguments, flags=()):
    """Starts the command on two workers."""
    command = [sys.executable, "-m", "tfparallel", "launch", "--on=ray", "--num_workers=2", *flags]
    return subprocess.Popen(
        [*command, "--", *arguments],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(job):
    """Waits for a job; returns its exit code, and what it has shown."""
    shown, _ = job.communicate(timeout=150)
    return job.returncode, shown


def workers(folder):
    """The processes that train with checkpoints in a folder, but not the launcher."""
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if f"--checkpoint_dir={folder}" in words and "launch" not in words:
            processes.append(process)
    return processes


def test_a_run_that_is_told_to_stop_saves_and_goes_on(tmp_path):
    train = [*TRAIN, "--parallel=data", f"--checkpoint_dir={tmp_path}/checkpoints"]
    job = launch(*train, "--inject=slow:worker=0,ms=1000")
    wait_for(lambda: len(list(tmp_path.glob("checkpoints/step_????????"))) > 1, "an epoch")
    job.send_signal(signal.SIGTERM)
    code, shown = finished(job)
    assert code == 75 and "stopped by SIGTERM; the workers saved their state" in shown, shown
    assert "[0] " in shown and workers(f"{tmp_path}/checkpoints") == []
    code, shown = finished(launch(*train, f"--save={tmp_path}/ray.keras"))
    assert code == 0 and "resuming at epoch" in shown, shown
    alone = [*TRAIN, "--parallel=none", f"--save={tmp_path}/alone.keras"]
    subprocess.run(alone, check=True, cwd=ROOT, timeout=100)
    one, other = (keras.models.load_model(tmp_path / f"{name}.keras") for name in ("ray", "alone"))
    for weight, expected in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=ROUNDING)


def test_the_exit_code_is_that_of_the_worker_at_fault(tmp_path):
    program = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(7); time.sleep(600)"
    flags = ["--max_restarts=1", f"--log_dir={tmp_path}"]
    code, shown = finished(launch(sys.executable, "-c", program, flags=flags))
    assert code == 7, shown
    assert "Worker 1 on " in shown and " exited with code 7 after " in shown
    assert "restarting all workers (1 of 1)" in shown
    names = {path.name for path in tmp_path.iterdir()}
    assert {"worker_0.log", "worker_1.log", "worker_1.restart_1.log"} <= names


def test_nothing_outlives_a_killed_launcher(tmp_path):
    train = [*TRAIN, "--parallel=data", f"--checkpoint_dir={tmp_path}"]
    job = launch(*train, "--inject=slow:worker=0,ms=1000")
    wait_for(lambda: list(tmp_path.glob("step_00000000")), "the workers to train")
    assert len(workers(tmp_path)) >= 2
    job.kill()
    finished(job)
    wait_for(lambda: not workers(tmp_path), "the workers to end")
