"""`make test-gpu`: the trials themselves, on logical CPUs."""

import json
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.gpu import row, run, speed, training, trials
from tests.gpu.networks import NETWORKS
from tfparallel.layers.tensor_parallel import tensor_parallel
from tfparallel.replication.data_parallel import data_parallel


def test_without_a_gpu_nothing_is_tried(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "has_nvidia_gpu", lambda: False)
    assert run.main([f"--report={tmp_path / 'r.json'}"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("skipped: an NVIDIA GPU") and not list(tmp_path.iterdir())


def test_a_trial_that_there_is_not(capsys):
    with pytest.raises(SystemExit, match="2"):
        run.main(["--trials=sums,nothing"])
    assert "Received: nothing." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains_in_parts_as_on_one_device(name):
    network = NETWORKS[name]
    expected = training.trained(network, lambda model: model)
    for make in (data_parallel, tensor_parallel):
        actual = training.trained(network, lambda model, make=make: make(model, devices=PAIR))
        assert training.compared(expected, actual)
    for change in (0.1, np.nan):
        other = expected._replace(weights=[weights + change for weights in expected.weights])
        with pytest.raises(AssertionError, match="weights differ by"):
            training.compared(expected, other)
    with pytest.raises(AssertionError, match="8 updates in 9 steps; on one device 9"):
        training.compared(expected, expected._replace(num_updates=8))


@pytest.mark.slow
def test_half_precision_is_what_trains():
    """`clear_session` between two trainings once set it back to float32."""
    keras.config.set_dtype_policy("mixed_float16")
    network = NETWORKS["MLP with dropout"]
    for make in (lambda model: model, lambda model: data_parallel(model, devices=PAIR)):
        models = []

        def listed(model, make=make, models=models):
            models.append(make(model))
            return models[-1]

        training.trained(network, listed)
        assert models[0].layers[-1].compute_dtype == "float16"
    in_float32 = training.Network(lambda: _in("float32"), network.batches)
    with pytest.raises(RuntimeError, match="must compute in float16. Received: float32"):
        training.trained(in_float32, lambda model: model)


def _in(dtype):
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, dtype=dtype)])


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "skipped"), [(1.0, 0), (2.0**100, 9)])
def test_a_loss_scale_must_skip_some_updates_and_not_all(monkeypatch, scale, skipped):
    monkeypatch.setattr(trials, "_SCALE", scale)
    with pytest.raises(AssertionError, match=f"some of its 9 updates, not {skipped}"):
        trials._in_half("mixed_float16", lambda model: model)


PAIR = ["CPU:0", "CPU:1"]


@pytest.mark.slow
@pytest.mark.parametrize("trial", [trials.compiled, trials.precision])
def test_each_form_is_compiled_and_computes_in_half_precision(trial, monkeypatch):
    """One form of them; `make test-gpu` takes all."""
    one = {"data_parallel": training.kinds(PAIR)["data_parallel"]}
    monkeypatch.setattr(trials, "_devices", lambda device_type: PAIR)
    monkeypatch.setattr(trials, "kinds", lambda devices: one)
    rows = [row for row in trial("cpu") if len(row) == 3]
    assert {verdict for _, verdict, _ in rows} == {"ok"}, rows
    said = {name: text for name, _, text in rows}
    if trial is trials.precision:
        text = said["mixed_float16, data_parallel"]
        assert "of 9 updates skipped" in text and "; 0 of 9" not in text
    else:
        assert said["jit_compile=True, data_parallel"].startswith("as on one device")


@pytest.mark.slow
def test_a_report_and_a_page_are_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = "hardware,sums,workers,lost_workers,profile"
    code = run.main(["--device_type=cpu", f"--trials={names}", "--report=r.json"])
    said = capsys.readouterr().out
    assert code == 0, said
    report = json.loads((tmp_path / "r.json").read_text())
    by_check = {finding["check"]: finding for finding in report["findings"]}
    assert report["verdict"] == "ok"
    assert by_check["sums: nccl"]["meaning"].startswith("skipped: nccl needs GPUs")
    assert "1 to 2^20" in by_check["sums: auto"]["meaning"]
    assert by_check["workers: two workers"]["meaning"].startswith("the weights of one device")
    assert "all have ended" in by_check["lost_workers: hang"]["meaning"]
    assert "| sums: tree | ok |" in (tmp_path / "r.md").read_text()
    assert list((tmp_path / "gpu_profile").rglob("*.xplane.pb"))


def test_a_trial_that_crashes_is_a_finding(monkeypatch):
    monkeypatch.setattr(run.sys, "executable", "false")
    (finding,) = run.examine_gpus("cpu", 10.0, ["sums"])
    assert finding.verdict == "broken" and "exit code 1" in finding.meaning


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Puts a shell script in the place of a trial."""

    def put(lines):
        path = tmp_path / "trial"
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
        monkeypatch.setattr(run.sys, "executable", str(path))

    return put


WELL = """echo '["first"]'; echo '["first", "ok", "well"]'; """


@pytest.mark.slow
def test_of_a_trial_that_hangs_the_rows_before_are_kept(program):
    program(WELL + """echo '["second"]'; sleep 60""")
    first, second = run.examine_gpus("cpu", 1.0, ["sums"])
    assert (first.check, first.verdict, first.meaning) == ("sums: first", "ok", "well")
    assert (second.check, second.verdict) == ("sums: second", "broken")
    assert "no answer in 1 s" in second.meaning


def test_a_crash_between_two_rows_is_not_the_last_rows(program):
    program(WELL + "exit 3")
    first, crash = run.examine_gpus("cpu", 10.0, ["sums"])
    assert first.verdict == "ok" and (crash.check, crash.verdict) == ("sums", "broken")
    assert "it did not end after 'first': exit code 3" in crash.meaning


@pytest.mark.slow
def test_all_trials_have_a_deadline_together(program):
    program(WELL + """echo '["second"]'; sleep 60""")
    first, second, third = run.examine_gpus("cpu", 60.0, ["sums", "parity"], 1.0)
    assert first.verdict == "ok"
    assert (second.check, second.verdict) == ("sums: second", "warn")
    assert "cut off: all trials may take 1 s" in second.meaning
    assert (third.check, third.verdict) == ("parity", "warn") and "left out" in third.meaning
    assert "--trials=parity" in third.advice


def test_an_error_is_a_refusal_only_in_its_own_words():
    def raising(text):
        def function():
            raise ValueError(text)

        return function

    refused = "statistics of the whole batch"
    (said,) = row.tried("a row", raising("Batch normalization: the " + refused), refused)
    assert said == ("a row", "skipped", refused)
    for refusal in (refused, None):
        (said,) = row.tried("a row", raising("CUDA_ERROR_ILLEGAL_ADDRESS"), refusal)
        assert said[1:] == ("broken", "ValueError: CUDA_ERROR_ILLEGAL_ADDRESS")


def test_gpus_that_tensorflow_does_not_see_are_a_failure(monkeypatch):
    monkeypatch.setattr(trials.device_lib, "list_devices", lambda device_type: [])
    (seen,) = [each for each in trials.hardware("gpu") if each[0] == "GPUs"]
    assert seen[1] == "broken" and "TensorFlow sees none" in seen[2]
    assert "GPUs" not in [each[0] for each in trials.hardware("cpu")]


def test_nccl_of_a_wheel(tmp_path, monkeypatch):
    library = tmp_path / "nvidia/nccl/lib/libnccl.so.2"
    library.parent.mkdir(parents=True)
    source = "int ncclGetVersion(int *version) { *version = 22304; return 0; }"
    (tmp_path / "nccl.c").write_text(source)
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("a C compiler is required")
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "nccl.c")]
    subprocess.run(command, check=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert trials._nccl_version() == f"2.23.4, {library}"


def test_figures_to_reach():
    def step(seconds, **peaks):
        return speed.Measured(seconds, 8, peaks)

    measured = {
        ("plain Keras", True): step(1.0),
        ("tfparallel.MirroredStrategy on one device", True): step(1.01),
        ("tfparallel.MirroredStrategy", False): step(2.1, GPU0=30, GPU1=20, GPU2=25),
        ("tf.distribute.MirroredStrategy", False): step(2.0, GPU0=30),
    }
    rows = {what: text for what, _, text in speed.ratios(measured)}
    assert rows == {
        "step time, tfparallel.MirroredStrategy / tf.distribute.MirroredStrategy": (
            "1.050; at most 1.05 is to be reached"
        ),
        "step time, tfparallel.MirroredStrategy on one device, XLA / plain Keras": (
            "1.010; at most 1.02 is to be reached"
        ),
        "peak memory, first GPU / the others' largest": "1.200; at most 1.1 is to be reached",
    }


@pytest.mark.slow
def test_a_task_that_fails_is_not_reported_as_a_lost_worker():
    with pytest.raises(AssertionError, match="exit code 2"):
        trials._lost("kill:worker=1,step=3", "gpu")
