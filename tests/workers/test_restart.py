"""Jobs whose workers are killed, started again, and end as if nothing had happened.

At two steps here; `benchmarks/restarts.py` kills from outside, at ten random moments.
"""

import re
import shutil
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.commands.command_line import ROOT, TASKS

# Dropout and noise draw in every step; 80 examples in batches of 32 leave the last one short.
TASK = TASKS / "dropout.py"
FLAGS = ["--parallel=data", "--epochs=8", "--seed=7", "--global_batch_size=32"]

SLOWLY = """

def callbacks():
    import time
    return [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.8))]
"""

READY = "tfparallel launch: 2 of 2 workers on this host start in a standby process"

pytestmark = pytest.mark.slow


def job(*flags, task=TASK, max_restarts=0, launch=()):
    """Trains on two workers; returns the exit code and all that was shown."""
    worker = [sys.executable, "-m", "tfparallel", "train", str(task), *FLAGS, *map(str, flags)]
    done = subprocess.run(
        [sys.executable, "-m", "tfparallel", "launch", "--nproc_per_node=2"]
        + [f"--max_restarts={max_restarts}", *launch, "--", *worker],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "whole.keras"
    code, shown = job(f"--save={path}")
    assert code == 0, shown
    return keras.models.load_model(path).get_weights(), metrics(shown)


def metrics(shown):
    """The lines of the epochs, without their times: loss and metrics."""
    return re.findall(r"^\[0\] 3/3 - \S+ - \S+ - (accuracy.*)$", shown, re.MULTILINE)


def killed_and_resumed(tmp_path, undisturbed, worker, step, *flags, message="", **options):
    shutil.rmtree(tmp_path / "ckpt", ignore_errors=True)
    code, shown = job(
        f"--checkpoint_dir={tmp_path}/ckpt", f"--inject=kill:worker={worker},step={step}",
        f"--save={tmp_path}/k.keras", *flags, max_restarts=2, **options,
    )  # fmt: skip
    assert message in shown, shown
    report = f"worker {worker}, step {step}, flags {flags}:\n{shown}"
    assert code == 0, report
    assert f"[{worker}] inject: worker {worker} kills itself after {step} steps" in shown, report
    assert f"worker {worker} was killed by SIGKILL" in shown, report
    assert "restarting all workers (1 of 2)" in shown and "(2 of 2)" not in shown, report
    weights, logs = undisturbed
    ended_at = keras.models.load_model(tmp_path / "k.keras").get_weights()
    for expected, weight in zip(weights, ended_at, strict=True):
        # CPU kernels may share their sums out to threads in another way.
        np.testing.assert_allclose(weight, expected, rtol=0, atol=1e-5, err_msg=report)
    # Whatever epoch the run resumed in, what is logged of it is of all its steps.
    resumed = shown[shown.index("resuming at epoch") :]
    assert metrics(resumed) == logs[-len(metrics(resumed)) :], report
    return int(re.search(r"\((\d+) steps are done\)", resumed)[1])


def test_a_killed_chief_loses_at_most_the_write_in_flight(tmp_path, undisturbed):
    every = "--checkpoint_every_steps=1"
    assert killed_and_resumed(tmp_path, undisturbed, 0, 10, every) in (9, 10)


@pytest.mark.slow
def test_processes_that_wait_take_over(tmp_path, undisturbed):
    """They are there ten seconds after the start, and have loaded TensorFlow soon after."""
    slow = tmp_path / "slow.py"
    slow.write_text(f"import sys\nsys.path.append({str(TASKS)!r})\n{TASK.read_text()}{SLOWLY}")
    flags = [tmp_path, undisturbed, 1, 20, "--checkpoint_every_steps=1"]
    assert killed_and_resumed(*flags, task=slow, launch=["--standby"], message=READY) >= 19


def test_a_killed_worker_costs_the_steps_since_the_epoch_began(tmp_path, undisturbed):
    assert killed_and_resumed(tmp_path, undisturbed, 1, 11) == 9


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(tmp_path, undisturbed):
    code, shown = job(
        f"--checkpoint_dir={tmp_path}/ckpt", "--inject=corrupt_checkpoint:worker=0,step=8",
        f"--save={tmp_path}/k.keras", "--checkpoint_every_steps=2", max_restarts=1,
    )  # fmt: skip
    assert code == 0 and ", which is damaged: " in shown, shown
    assert "(6 steps are done)" in shown, shown
    weights = keras.models.load_model(tmp_path / "k.keras").get_weights()
    for one, other in zip(undisturbed[0], weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_the_survivor_says_in_a_sentence_whom_it_lost():
    code, shown = job("--inject=exit:worker=1,step=3,code=5")
    assert code == 5 and "worker 1 exited with code 5" in shown, shown
    assert "[0] tfparallel train: The connection to worker 1 was lost" in shown, shown
    assert "Traceback" not in shown, shown


def test_a_worker_that_hangs_is_ended_and_named(tmp_path, undisturbed):
    code, shown = job(
        *("--inject=hang:worker=1,step=10", "--stall_timeout=20", "--checkpoint_every_steps=1"),
        *(f"--checkpoint_dir={tmp_path}/ckpt", f"--save={tmp_path}/h.keras"),
        max_restarts=1,
    )
    assert code == 0, shown
    assert "[1] Worker 1 makes no progress" in shown, shown
    assert "Received: no step has started for longer" in shown and "in _strike" in shown, shown
    assert "worker 1 exited with code 75" in shown and "(10 steps are done)" in shown, shown
    same_weights(tmp_path / "h.keras", undisturbed)


def same_weights(path, undisturbed):
    for expected, weight in zip(
        undisturbed[0], keras.models.load_model(path).get_weights(), strict=True
    ):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=1e-5)


def test_a_job_that_is_told_to_end_saves_and_says_to_start_it_again(tmp_path, undisturbed):
    """SIGTERM, as Slurm and Kubernetes send it: to the launcher, which hands it on."""
    flags = [f"--checkpoint_dir={tmp_path}/ckpt", f"--save={tmp_path}/t.keras"]
    slow = "--inject=slow:worker=0,ms=100"  # Else it may have ended before.
    launcher = subprocess.Popen(
        [sys.executable, "-m", "tfparallel", "launch", "--nproc_per_node=2", "--grace_seconds=60"]
        + ["--", sys.executable, "-m", "tfparallel", "train", str(TASK), *FLAGS, *flags, slow],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        seen = ""
        for line in launcher.stdout:
            seen += line
            if "Epoch 2/8" in line:
                break
        launcher.send_signal(signal.SIGTERM)
        seen += launcher.communicate(timeout=90)[0]
    finally:
        launcher.kill()
    assert launcher.returncode == 75, seen
    assert "stopped by SIGTERM; the workers saved their state" in seen, seen
    done = int(re.search(r"stopped by SIGTERM: (\d+) steps are in the checkpoint", seen)[1])
    code, shown = job(*flags)
    assert code == 0 and f"({done} steps are done)" in shown, shown
    same_weights(tmp_path / "t.keras", undisturbed)


@pytest.mark.slow
def test_if_one_worker_is_told_to_end_all_do_before_the_same_step(tmp_path, undisturbed):
    code, shown = job(
        *("--inject=preempt:worker=1,step=10", f"--checkpoint_dir={tmp_path}/ckpt"),
        f"--save={tmp_path}/p.keras",
        max_restarts=1,
    )
    assert code == 0, shown
    assert re.search(r"stopped by another worker: 1[012] steps are in the checkpoint", shown), shown
    assert "exited with code 75" in shown and "restarting all workers (1 of 1)" in shown, shown
    same_weights(tmp_path / "p.keras", undisturbed)


def test_all_workers_refuse_what_the_chief_cannot_use(tmp_path):
    """A folder that cannot be written to, and the checkpoints of another model."""
    (tmp_path / "file").touch()
    code, shown = job(f"--checkpoint_dir={tmp_path}/file/ckpt")
    assert code == 2 and "is not writable" in shown and "Epoch 1" not in shown, shown
    code, shown = job(f"--checkpoint_dir={tmp_path}/ckpt", "--epochs=1")
    assert code == 0, shown
    code, shown = job(f"--checkpoint_dir={tmp_path}/ckpt", task=TASKS.parents[1] / "models/mlp.py")
    assert code == 2 and "belongs to another run" in shown and "Epoch 1" not in shown, shown
    assert "only the checkpoint has" in shown and "Traceback" not in shown, shown
