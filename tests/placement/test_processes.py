"""Layers in several processes: real ones, that are joined, audited, killed and restarted."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import keras
import numpy as np
import psutil
import pytest

from tests.commands.command_line import ROOT
from tests.comparison import weights_of
from tfparallel.cluster.ports import free_ports

PROGRAM = pathlib.Path(__file__).with_name("stages_program.py")
TRANSFORMER = ROOT / "models" / "transformer.py"

pytestmark = pytest.mark.slow


def launch(*command, num_processes=2, flags=(), **environment):
    done = subprocess.run(
        [sys.executable, "-m", "tfparallel", "launch", f"--nproc_per_node={num_processes}"]
        + [*flags, "--", sys.executable, *map(str, command)],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
    )
    command_line = [sys.executable, *map(str, command)]
    alive = [p.pid for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == command_line]
    assert not alive, f"processes are left: {alive}\n{done.stdout}"
    return done.returncode, done.stdout


@pytest.fixture(name="seen", scope="module")
def run_job(tmp_path_factory):
    """What process 0 of three saw; one job for all that look at it."""
    path = tmp_path_factory.mktemp("stages") / "seen.json"
    # A thread each, as `launch` gives them where they share the cores.
    code, shown = launch(PROGRAM, path, num_processes=3, TF_NUM_INTEROP_THREADS="1")
    assert code == 0, shown
    return json.loads(path.read_text()) | {"path": path}


def test_each_process_is_a_device(seen):
    expected = [f"/job:worker/task:{index}/device:CPU:0" for index in range(3)]
    assert seen["devices"] == expected
    assert len(set(seen["processes"])) == 3


def test_a_thread_is_left_to_send_what_another_made(seen):
    assert seen["num_interop_threads"] == "2"


def test_weights_and_history_are_those_of_one_process(seen):
    assert max(seen["differences"]) < 1e-12
    for name, values in seen["history"][0].items():
        np.testing.assert_allclose(seen["history"][1][name], values, rtol=1e-12)


def test_a_function_overtakes_what_was_written_eagerly_unless_it_waits():
    """A canary: the first half says that TensorFlow still needs it."""
    code, shown = launch(PROGRAM.with_name("writes_program.py"))
    assert code == 0, shown
    assert "plain: some lost" in shown and "after writes: none lost" in shown, shown


def test_everything_is_in_its_process(seen):
    assert seen["elsewhere"] == []
    assert set(seen["audited"]) == {"variables", "slots", "forward", "backward", "update"}
    layers = [layer for process in seen["held"] for layer in process["layers"]]
    assert layers == ["first", "normalize", "drop", "second", "skip", "logits"]
    for process in seen["held"]:
        assert process["peak_memory_bytes"] > 100 * 2**20  # TensorFlow itself.


def test_what_is_saved_is_plain_keras(seen):
    model = keras.models.load_model(f"{seen['path']}.keras")
    assert type(model).__module__.startswith("keras.")
    for expected, weight in zip(seen["weights"], model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, np.asarray(expected))
    assert model.optimizer.iterations > 0


def test_a_process_that_is_killed_is_named_with_its_layers(tmp_path):
    """Without a launcher, which would stop the others before they have spoken."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(3)]
    processes = []
    for index in range(3):
        task = {"type": "worker", "index": index}
        place = json.dumps({"cluster": {"worker": workers}, "task": task})
        processes.append(
            subprocess.Popen(
                [sys.executable, PROGRAM, tmp_path / "none.json", "kill"],
                cwd=ROOT,
                env={**os.environ, "TF_CONFIG": place, "TF_NUM_INTRAOP_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        shown = processes[0].communicate(timeout=120)[0]
        codes = [process.wait(timeout=15) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [1, 0, -signal.SIGKILL], shown
    assert f"A process of the job has ended: process 2 ({workers[2]})" in shown
    assert re.search(r"the layers that it held are lost: .*logits\.", shown), shown


def test_a_job_that_is_killed_resumes_to_the_weights_of_one_process(tmp_path):
    train = ["-m", "tfparallel", "train", TRANSFORMER, "--seed=7", "--steps_per_epoch=12"]
    code, shown = launch(
        *train, "--parallel=model", f"--checkpoint_dir={tmp_path}/ckpt",
        "--checkpoint_every_steps=4", "--inject=kill:worker=0,step=9",
        f"--save={tmp_path}/p.keras", f"--report={tmp_path}/p.json", flags=["--max_restarts=1"],
    )  # fmt: skip
    assert code == 0, shown
    assert "worker 0 was killed by SIGKILL" in shown and "(8 steps are done)" in shown, shown
    alone = [sys.executable, *map(str, train), "--parallel=none", f"--save={tmp_path}/n.keras"]
    subprocess.run(alone, cwd=ROOT, check=True, timeout=120)
    expected, actual = (weights_of(tmp_path / name) for name in ("n.keras", "p.keras"))
    for one, other in zip(expected, actual, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-4)
    placement = json.loads((tmp_path / "p.json").read_text())["placement"]
    assert [process["device"] for process in placement] == [
        f"/job:worker/task:{index}/device:CPU:0" for index in range(2)
    ]
    assert all(
        process["peak_memory_bytes"] > process["parameter_bytes"] > 0 for process in placement
    )


def test_devices_cannot_be_chosen_where_processes_are_the_stages():
    code, shown = launch(
        "-m", "tfparallel", "train", ROOT / "models/mlp.py", "--parallel=model", "--num_devices=2"
    )
    assert code != 0
    assert "The stages are the 2 processes of the job" in shown and "Drop it" in shown
