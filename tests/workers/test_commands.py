"""`train` and `check` as workers: started by `launch`, by a flag, or by hand."""

import json
import os
import signal
import subprocess
import sys

import keras
import numpy as np
import psutil
import pytest

from tfparallel.cluster.ports import free_ports

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TASK = os.path.join(ROOT, "models", "digits_cnn.py")
TFPARALLEL = [sys.executable, "-m", "tfparallel"]

pytestmark = pytest.mark.slow


def run(*arguments, cwd, timeout_seconds=150, **environment):
    """Runs a command to its end; the group is killed at the deadline."""
    process = subprocess.Popen(
        [*TFPARALLEL, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


@pytest.fixture(name="weights_of_one", scope="module")
def train_on_one_device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    code, output = run(
        *("train", TASK, "--parallel=none", "--epochs=2", "--seed=7", "--save=one.keras"),
        cwd=folder,
    )
    assert code == 0, output
    return keras.models.load_model(folder / "one.keras").get_weights()


@pytest.mark.parametrize(("num_workers", "num_devices"), [(2, 2)])
def test_workers_train_to_the_weights_of_one_device(
    num_workers, num_devices, weights_of_one, tmp_path
):
    code, output = run(
        *("launch", f"--nproc_per_node={num_workers}", "--", *TFPARALLEL),
        *("train", TASK, "--parallel=data", f"--num_devices={num_devices}"),
        *("--epochs=2", "--seed=7", "--save=w.keras", "--report=w.json"),
        cwd=tmp_path,
    )
    assert code == 0, output
    # The chief alone speaks, and writes.
    assert f"data parallel on {num_workers} workers, {num_devices} device" in output
    assert not [line for line in output.splitlines() if not line.startswith("[0]")]
    assert sorted(os.listdir(tmp_path)) == ["w.json", "w.keras"]
    report = json.loads((tmp_path / "w.json").read_text())
    assert report["num_workers"] == num_workers and len(report["devices"]) == num_devices
    for ours, expected in zip(
        keras.models.load_model(tmp_path / "w.keras").get_weights(), weights_of_one, strict=True
    ):
        # Sums in another order, in float32, over 46 steps of Adam.
        np.testing.assert_allclose(ours, expected, atol=1e-4)


LEAVES = """
import atexit, pathlib, time
import tfparallel

def tell(event):
    pathlib.Path(f"{event} {tfparallel.worker_index()}").write_text(str(time.time()))

atexit.register(tell, "left")  # The first to be registered is the last to be called.
strategy = tfparallel.MultiWorkerMirroredStrategy()
time.sleep(1.5 * tfparallel.worker_index())
tell("ended")
"""


def test_worker_0_leaves_last(tmp_path):
    """Who outlives it by a heartbeat writes of an error."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    code, output = run(
        "launch", "--nproc_per_node=2", "--", sys.executable, "leaves.py", cwd=tmp_path
    )
    assert code == 0, output

    def seconds(name):
        return float((tmp_path / name).read_text())

    assert seconds("ended 0") < seconds("ended 1") < seconds("left 0")


def test_a_proxy_of_the_environment_captures_nothing(tmp_path):
    """Left to itself, gRPC asks it for loopback addresses, too; here nobody listens."""
    code, output = run(
        *("launch", "--nproc_per_node=2", "--transport=tensorflow", "--", *TFPARALLEL),
        *("train", TASK, "--parallel=data", "--steps_per_epoch=2", "--epochs=1"),
        cwd=tmp_path,
        http_proxy=f"http://127.0.0.1:{free_ports(1)[0]}",
        no_proxy="example.com",
    )
    assert code == 0 and "all-reduce by ring_tuned" in output, output


def test_check_starts_its_own_workers(tmp_path):
    code, output = run(
        *("check", TASK, "--num_workers=2", "--num_devices=2", "--steps=6", "--precision=float64"),
        *("--report=c.json",),
        cwd=tmp_path,
    )
    assert code == 0, output
    assert "data parallel on 2 workers, 2 devices each" in output and "OK: match" in output
    assert json.loads((tmp_path / "c.json").read_text())["verdict"] == "match"


def test_a_missing_worker_is_named_at_the_deadline(tmp_path):
    ports = free_ports(2)
    cluster = {
        "cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]},
        "task": {"type": "worker", "index": 0},
    }
    code, output = run(
        *("train", TASK, "--parallel=data", "--start_timeout=3"),
        cwd=tmp_path,
        TF_CONFIG=json.dumps(cluster),
    )
    assert code == 1
    assert f"worker 1 (127.0.0.1:{ports[1]}) had not joined" in output
    assert "Traceback" not in output
    assert not [p for p in psutil.process_iter(["cmdline"]) if "--start_timeout=3" in (
        p.info["cmdline"] or []
    )]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--parallel=none", "would train 2 separate models"),
        ("--strategy=mirrored", "would train 2 separate models"),
        ("--num_workers=3", "This process is already one of 2 workers"),
    ],
)
def test_what_a_worker_may_not_be_asked(flag, message, tmp_path):
    cluster = {
        "cluster": {"worker": ["127.0.0.1:38123", "127.0.0.1:38124"]},
        "task": {"type": "worker", "index": 0},
    }
    code, output = run("train", TASK, flag, cwd=tmp_path, TF_CONFIG=json.dumps(cluster))
    assert code == 2
    assert message in output


def test_workers_with_another_seed_are_told(tmp_path):
    script = (
        "import os, subprocess, sys; "
        "sys.exit(subprocess.call([sys.executable, '-m', 'tfparallel', 'train', sys.argv[1], "
        "f\"--seed={os.environ['RANK']}\"]))"
    )
    code, output = run(
        *("launch", "--nproc_per_node=2", "--", sys.executable, "-c", script, TASK), cwd=tmp_path
    )
    assert code == 1
    assert "--seed: 0 on worker 0; 1 on worker 1" in output
