"""`tfparallel doctor`, run as users run it."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests.commands.command_line import ROOT
from tfparallel.commands.main import main
from tfparallel.diagnostics.doctor import KNOWN_FAULTS, TWO_WORKERS
from tfparallel.diagnostics.suggestion import Machine, suggested

DEADLINE_SECONDS = 500


def run_doctor(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "tfparallel", "doctor", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


def test_troubles_are_told_one_a_line_and_the_exit_code_is_1(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        config = {
            "cluster": {"worker": [address, "no-such-host.invalid:2222"]},
            "task": {"type": "worker", "index": 0},
        }
        code, shown, errors = run_doctor(
            "--quick",
            "--peer_timeout=2",
            "--min_free_mib=1000000000000",
            f"--report={tmp_path}/doctor.json",
            TF_CONFIG=json.dumps(config),
            KERAS_BACKEND="jax",
        )
    assert code == 1 and "Traceback" not in errors
    assert shown.startswith("verdict: broken: own port, worker 1, disk, TensorFlow (")
    broken = [line for line in shown.splitlines() if line.startswith("broken  ")]
    assert [line.split(":")[0].removeprefix("broken  ") for line in broken] == [
        "own port", "worker 1", "disk", "TensorFlow",
    ]  # fmt: skip
    assert all(" -> " in line for line in broken)
    assert f"used by process {os.getpid()} (" in shown
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert report["verdict"] == "broken" and report["command"] == "doctor"
    verdicts = {finding["check"]: finding["verdict"] for finding in report["findings"]}
    assert verdicts["worker 1"] == "broken" and verdicts["cluster"] == "ok"


def test_a_bad_tf_config_is_one_finding():
    code, shown, _ = run_doctor("--quick", TF_CONFIG="{", KERAS_BACKEND="jax")
    assert code == 1 and "broken  cluster: " in shown and "TF_CONFIG" in shown


@pytest.mark.slow
def test_known_faults_are_tried_in_this_installation():
    code, shown, errors = run_doctor("--upstream")
    assert code == 0, shown + errors
    first, *rest = shown.splitlines()
    assert first.startswith("verdict: ready") and "0 broken" in first
    assert any(line.startswith("ok      TensorFlow: ") for line in rest)
    # Last, and a canary: a fault that is gone is no line, and its row in docs/upstream.md can go.
    faults = rest[-1 - len(KNOWN_FAULTS) :]
    assert [line.partition(":")[0].strip() for line in faults] == [
        TWO_WORKERS, *KNOWN_FAULTS.values(),
    ]  # fmt: skip
    assert all("fails with" in line or "silently trains to different" in line for line in faults)


@pytest.mark.slow
def test_it_is_ready_when_two_workers_have_met():
    """As most people run it."""
    code, shown, errors = run_doctor()
    assert code == 0, shown + errors
    connected = "they connect, and train to the same weights as one device"
    assert f"ok      {TWO_WORKERS}: {connected}" in shown
    assert shown.index(TWO_WORKERS) < shown.index(KNOWN_FAULTS["uneven_batches"])


def test_it_suggests_a_command(capsys):
    assert main(["doctor", "--suggest"]) == 0
    command, why, *_ = capsys.readouterr().out.splitlines()
    assert command.startswith("tfparallel ") and "tfparallel train TASK.py --parallel=" in command
    assert why.startswith("  why: ")


MACHINES = {
    "a laptop": (Machine(0, 8, 16_000, True), "launch --nproc_per_node=8 --transport=mpi -- "),
    "without MPI": (Machine(0, 4, None, False), "--transport=tensorflow -- tfparallel train"),
    "little memory": (Machine(0, 64, 3_500, True), "--nproc_per_node=3 "),
    "one core": (Machine(0, 1, 16_000, True), "train TASK.py --parallel=none"),
    "one GPU": (Machine(1, 16, 64_000, True), "--parallel=none --device_type=gpu"),
    "GPUs": (Machine(8, 64, 64_000, True), "--parallel=data --num_devices=8 --device_type=gpu"),
    "a job": (Machine(0, 4, 64_000, True, 4, "Slurm"), "--parallel=data --strategy=multi_worker"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_suggested_suits_the_machine(name):
    machine, part = MACHINES[name]
    advice = suggested(machine)
    assert part in advice.command and advice.why and advice.then.startswith("tfparallel ")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["models/mlp.py"], "doctor takes only flags. Received: ['models/mlp.py']"),
        (["--peer_timeout=0"], "must be above 0. Received: --peer_timeout=0"),
        (["--min_free_mib=-1"], "Received: --min_free_mib=-1"),
        (["--report=a.txt"], "must end in .json"),
        (["--fast"], "fast"),
    ],
)
def test_mistakes(capsys, arguments, message):
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_help(capsys):
    assert main(["doctor", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "tfparallel doctor --checkpoint_dir=ckpt" in shown and "--min_free_mib" in shown
