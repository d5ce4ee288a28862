"""`tfparallel doctor`, run as users run it."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests.commands.command_line import ROOT
from tfparallel.commands.main import main
from tfparallel.diagnostics.doctor import KNOWN_FAULTS

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
    assert (code, errors) == (1, "")
    broken = [line for line in shown.splitlines() if line.startswith("broken  ")]
    assert [line.split(":")[0].removeprefix("broken  ") for line in broken] == [
        "own port", "worker 1", "disk", "TensorFlow",
    ]  # fmt: skip
    assert all(" -> " in line for line in broken)
    assert f"held by process {os.getpid()} (" in shown
    report = json.loads((tmp_path / "doctor.json").read_text())
    assert report["verdict"] == "broken" and report["command"] == "doctor"
    verdicts = {finding["check"]: finding["verdict"] for finding in report["findings"]}
    assert verdicts["worker 1"] == "broken" and verdicts["cluster"] == "ok"


def test_a_bad_tf_config_is_one_finding():
    code, shown, _ = run_doctor("--quick", TF_CONFIG="{", KERAS_BACKEND="jax")
    assert code == 1 and "broken  cluster: " in shown and "TF_CONFIG" in shown


@pytest.mark.nightly
def test_known_faults_are_tried_in_this_installation():
    code, shown, errors = run_doctor()
    assert code == 0, shown + errors
    assert "ok      TensorFlow: " in shown
    for what in KNOWN_FAULTS.values():
        # A canary: a fault that is gone reads "ok", and its row in docs/upstream.md can go.
        assert f"warn    {what}: TensorFlow's own strategy " in shown
    assert "0 broken" in shown


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["models/mlp.py"], "doctor takes flags alone. Received: ['models/mlp.py']"),
        (["--peer_timeout=0"], "must be positive. Received: --peer_timeout=0"),
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
