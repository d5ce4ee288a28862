"""`doctor --gpu`: the trials themselves, on logical CPUs."""

import json

import keras
import pytest

from tfparallel.commands.main import main
from tfparallel.diagnostics import gpu, gpu_trials
from tfparallel.diagnostics.gpu_networks import NETWORKS
from tfparallel.layers.tensor_parallel import tensor_parallel
from tfparallel.replication.data_parallel import data_parallel


def test_without_a_gpu_nothing_is_tried(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "has_nvidia_gpu", lambda: False)
    assert main(["doctor", "--gpu", f"--report={tmp_path / 'r.json'}"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("skipped: an NVIDIA GPU") and not list(tmp_path.iterdir())


def test_flags_that_do_not_fit(capsys):
    assert main(["doctor", "--device_type=cpu", "--trials=sums,nothing"]) == 2
    said = capsys.readouterr().err
    for text in ("Received: --trials=nothing", "--trials is for --gpu", "--device_type is for"):
        assert text in said


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains_in_parts_as_on_one_device(name):
    network = NETWORKS[name]
    expected = gpu_trials._trained(network, lambda model: model)
    for make in (data_parallel, tensor_parallel):
        found = gpu_trials._trained(network, lambda model, make=make: make(model, devices=PAIR))
        assert gpu_trials._compared(expected, found)
    other = [weights + 0.1 for weights in expected]
    with pytest.raises(AssertionError, match="weights differ by"):
        gpu_trials._compared(expected, other)
    keras.config.set_dtype_policy("float32")


PAIR = ["CPU:0", "CPU:1"]


@pytest.mark.slow
def test_a_report_and_a_page_are_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trials = "hardware,sums,precision,workers,lost_workers,profile"
    command = ["doctor", "--gpu", "--device_type=cpu", f"--trials={trials}", "--report=r.json"]
    code = main(command)
    said = capsys.readouterr().out
    assert code == 0, said
    report = json.loads((tmp_path / "r.json").read_text())
    by_check = {finding["check"]: finding for finding in report["findings"]}
    assert report["verdict"] == "ok"
    assert by_check["sums: nccl"]["meaning"].startswith("skipped: NCCL joins GPUs")
    assert "1 to 2^20" in by_check["sums: auto"]["meaning"]
    assert by_check["workers: two workers"]["meaning"].startswith("the weights of one device")
    assert "all have ended" in by_check["lost_workers: hang"]["meaning"]
    assert "| sums: tree | ok |" in (tmp_path / "r.md").read_text()
    assert list((tmp_path / "gpu_profile").rglob("*.xplane.pb"))


def test_a_trial_that_crashes_is_a_finding(monkeypatch):
    monkeypatch.setattr(gpu.sys, "executable", "false")
    (finding,) = gpu.examine_gpus("cpu", 10.0, ["sums"])
    assert finding.verdict == "broken" and "exit code 1" in finding.meaning


def test_of_a_trial_that_hangs_the_rows_before_are_kept(monkeypatch, tmp_path):
    program = tmp_path / "trial"
    program.write_text(
        """#!/bin/sh
echo '["first"]'; echo '["first", "ok", "well"]'; echo '["second"]'; sleep 60
"""
    )
    program.chmod(0o755)
    monkeypatch.setattr(gpu.sys, "executable", str(program))
    first, second = gpu.examine_gpus("cpu", 1.0, ["sums"])
    assert (first.check, first.verdict, first.meaning) == ("sums: first", "ok", "well")
    assert (second.check, second.verdict) == ("sums: second", "broken")
    assert "no answer in 1 s" in second.meaning


def test_what_does_not_train_is_no_lost_worker():
    with pytest.raises(AssertionError, match="exit code 2"):
        gpu_trials._lost("kill:worker=1,step=3", "gpu")
