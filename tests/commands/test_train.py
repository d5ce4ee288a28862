"""`tfparallel train`, run as users run it."""

import json
import platform
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from tests.cluster.processes import wait_for
from tests.commands.command_line import ROOT, TASKS, tfparallel
from tests.forked import Forked
from tfparallel.commands.main import main
from tfparallel.commands.parallelism import Parallelism

BLOBS = TASKS / "blobs.py"


def weights(path):
    return keras.models.load_model(path).get_weights()


def assert_same_weights(first, second, atol):
    for one, other in zip(weights(first), weights(second), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


@pytest.mark.slow
def test_the_number_of_devices_changes_nothing(tmp_path):
    """The second epoch and 80 examples in batches of 32 make every kind of uneven batch."""
    for name, *form in (
        ("none", "--parallel=none"),
        ("two", "--parallel=data", "--num_devices=2"),
        ("four", "--parallel=data", "--num_devices=4", "--device_type=cpu"),
    ):
        code, shown, errors = tfparallel(
            "train", BLOBS, *form, "--epochs=2", "--seed=7", "--global_batch_size=32",
            f"--save={tmp_path / name}.keras", f"--report={tmp_path / name}.json",
        )  # fmt: skip
        assert code == 0, errors
    assert "data parallel on 4 devices (CPU:0, CPU:1, CPU:2, CPU:3)" in shown
    assert "TensorFlow 2." in shown and "Keras 3." in shown and "Epoch 2/2" in shown
    # Reordered sums in float32.
    assert_same_weights(tmp_path / "none.keras", tmp_path / "two.keras", 1e-5)
    assert_same_weights(tmp_path / "none.keras", tmp_path / "four.keras", 1e-5)

    report = json.loads((tmp_path / "four.json").read_text())
    single = json.loads((tmp_path / "none.json").read_text())
    assert report["devices"] == ["CPU:0", "CPU:1", "CPU:2", "CPU:3"]
    assert single["devices"] == ["CPU:0"]
    assert report["configuration"]["seed"] == 7 and report["configuration"]["task"] == str(BLOBS)
    assert set(report["history"]) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    for name, values in report["history"].items():
        assert values == pytest.approx(single["history"][name], abs=1e-5), name
    times = report["step_time_seconds"]
    assert 0 < times["p10"] <= times["p50"] <= times["p90"] < times["first"]
    assert report["peak_memory_bytes"] > 100e6 and report["wall_time_seconds"] > 0
    assert report["versions"]["keras"] == keras.__version__


@pytest.mark.slow
def test_the_report_has_the_gain_of_adascale(tmp_path):
    task, report = tmp_path / "task.py", tmp_path / "report.json"
    task.write_text(BLOBS.read_text().replace("optimizers.Adam(0.01)", "optimizers.SGD(0.1)"))
    code, _, errors = tfparallel(
        *("train", task, "--parallel=data", "--num_devices=2", "--device_type=cpu"),
        *("--sync=adascale:4", "--epochs=2", "--global_batch_size=8", f"--report={report}"),
    )
    assert code == 0, errors
    written = json.loads(report.read_text())
    assert written["sync"] == "adascale:4" and written["steps_of_an_update"] == 4
    assert 1 < written["learning_rate_gain"] < 4


def start(task, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "tfparallel", "train", str(task), *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def newest_step(directory):
    steps = [int(path.name[5:]) for path in directory.glob("step_*")] if directory.exists() else []
    return max(steps, default=0)


@pytest.mark.slow
def test_a_type_is_chosen(tmp_path):
    path = tmp_path / "model.keras"
    code, _, errors = tfparallel(
        "train", BLOBS, "--parallel=none", "--precision=float64", f"--save={path}"
    )
    assert code == 0, errors
    assert {value.dtype.name for value in weights(path)} == {"float64"}


@pytest.mark.slow
def test_callbacks_and_tensorboard_on_two_workers(tmp_path):
    """The task's callbacks run on each worker, its files and TensorBoard's are the chief's."""
    task = tmp_path / "task.py"
    hook = "\n\ndef callbacks():\n    return [keras.callbacks.CSVLogger(LOG)]\n"
    task.write_text(f"{BLOBS.read_text()}\nLOG = {str(tmp_path / 'log.csv')!r}{hook}")
    code, shown, errors = tfparallel(
        "train", task, "--num_workers=2", "--epochs=2", f"--tensorboard={tmp_path / 'tb'}"
    )
    assert code == 0, shown + errors
    lines = [line for line in shown.splitlines() if "Epoch " in line]
    assert len(lines) == 2 and all(line.startswith("[0] ") for line in lines)
    assert " examples/s - " in lines[1]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    assert {path.name for path in (tmp_path / "tb").iterdir()} == {"train", "validation"}
    assert [len(list(folder.iterdir())) for folder in (tmp_path / "tb").iterdir()] == [1, 1]
    code, shown, errors = tfparallel("train", BLOBS, "--callbacks")
    assert code == 2 and "requires the task file to define callbacks()" in errors


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights(tmp_path):
    """SIGKILL in the middle of an epoch, under dropout, whose draws must go on as well.

    The epochs are of 5 steps over 80 examples in 3 batches, so a resumed run
    has to start in the middle of a pass.
    """
    task = TASKS / "dropout.py"
    form = ["--num_devices=2", "--device_type=cpu", "--checkpoint_every_steps=2"]
    flags = [*form, "--epochs=40", "--steps_per_epoch=5", "--global_batch_size=32"]
    undisturbed = [flag for flag in flags if not flag.startswith("--checkpoint")]
    code, _, errors = tfparallel("train", task, *undisturbed, f"--save={tmp_path}/whole.keras")
    assert code == 0, errors

    directory = tmp_path / "state"
    killed = start(task, *flags, f"--checkpoint_dir={directory}", f"--save={tmp_path}/no.keras")
    deadline = time.monotonic() + 100
    while newest_step(directory) < 5 and killed.poll() is None:
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.005)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "no.keras").exists()
    done = newest_step(directory)
    assert 5 <= done < 200

    code, shown, errors = tfparallel(
        "train", task, *flags, f"--checkpoint_dir={directory}",
        f"--save={tmp_path}/resumed.keras", f"--report={tmp_path}/resumed.json",
    )  # fmt: skip
    assert code == 0, errors
    assert f"resuming at epoch {done // 5 + 1}" in shown and f"({done} steps are done)" in shown
    # CPU kernels are not bitwise repeatable: sums depend on how threads share them.
    assert_same_weights(tmp_path / "whole.keras", tmp_path / "resumed.keras", 1e-5)
    report = json.loads((tmp_path / "resumed.json").read_text())
    assert report["resumed_at_epoch"] == done // 5 + 1 and report["resumed_at_step"] == done
    assert len(report["history"]["loss"]) == 40

    code, _, errors = tfparallel("train", task, *flags, "--seed=1", f"--checkpoint_dir={directory}")
    assert code == 2 and "Received: --seed=1 (the checkpoint has 0)" in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_second_run_on_the_same_checkpoints_ends_with_code_2_and_names_the_first(tmp_path):
    state = tmp_path / "state"
    arguments = ["train", str(BLOBS), "--parallel=none", f"--checkpoint_dir={state}"]
    with Forked(main, [[*arguments, "--epochs=100000"]], tmp_path, cwd=ROOT) as first:
        wait_for(lambda: newest_step(state), "a checkpoint")
        code, shown, errors = tfparallel(*arguments)
    assert code == 2 and "Epoch" not in shown, shown + errors
    assert f"process {first.pid} on {platform.node()}, since 20" in errors, errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_nan_is_named_and_may_stop_the_training(tmp_path):
    flags = ["--parallel=none", "--global_batch_size=16", f"--save={tmp_path}/a.keras"]
    code, _, errors = tfparallel("train", TASKS / "nan.py", *flags, "--stop_on_nan")
    assert code == 1 and "at step 3 of epoch 1" in errors and "Traceback" not in errors
    assert not (tmp_path / "a.keras").exists()
    code, _, errors = tfparallel("train", TASKS / "nan.py", *flags)
    assert code == 0 and "at step 3 of epoch 1" in errors


@pytest.mark.slow
def test_errors_of_the_task_file_are_usage_errors(tmp_path):
    task = tmp_path / "task.py"
    task.write_text(
        "import tensorflow as tf\n"
        "def build_model(): return 3\n"
        "def compile_model(model): pass\n"
        "def load_data():\n"
        "    data = tf.data.Dataset.from_tensors(([1.0], [1.0]))\n"
        "    return data.repeat() if ENDLESS else data, None\n"
    )
    text = task.read_text()
    for head, message in (
        ("ENDLESS = True\n", "The dataset is infinite"),
        ("ENDLESS = False\n", "must return a keras.Model. Received: int"),
        ("import no_such_module_anywhere\n", "ModuleNotFoundError"),
    ):
        task.write_text(head + text)
        code, _, errors = tfparallel("train", task)
        assert code == 2 and message in errors
    code, _, errors = tfparallel("train", task, "--devices=GPU:77")
    assert code == 2 and "GPU:77" in errors and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--num_devices=2"], "Cannot split GPU:0: TensorFlow sees 0 GPUs"),
        (["--device_type=cpu"], "--split_gpu creates its own devices from a GPU. Received"),
    ],
)
def test_a_gpu_that_cannot_be_split(flags, said):
    code, _, errors = tfparallel("train", BLOBS, "--split_gpu", *flags)
    assert code == 2 and said in errors


@pytest.mark.gpu
@pytest.mark.slow
def test_one_gpu_is_split_for_a_form(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    code, shown, errors = tfparallel("train", BLOBS, "--split_gpu", "--parallel=pipeline")
    assert code == 0 and "GPU:0, GPU:1" in shown, errors


def test_of_many_devices_the_first_and_the_last_are_named():
    """Story: 64 names stood in the first line of a training."""
    form = Parallelism("data", [f"CPU:{index}" for index in range(64)])
    assert str(form) == "data parallel on 64 devices (CPU:0 … CPU:63)"
