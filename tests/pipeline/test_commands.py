"""`plan`, `train` and `bench pipeline` on task files, in real processes."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.commands.command_line import ROOT
from tests.commands.command_line import tfparallel as run
from tests.comparison import weights_of
from tfparallel.commands import bench_pipeline

pytestmark = pytest.mark.slow

MLP, TRANSFORMER = ROOT / "models" / "mlp.py", ROOT / "models" / "transformer.py"


def test_plan_draws_and_traces_the_schedule(tmp_path):
    code, shown, said = run(
        "plan", MLP, "--parallel=pipeline", "--num_devices=3", "--num_micro_batches=4",
        f"--draw={tmp_path}/plan.png", f"--trace={tmp_path}/trace.json",
        f"--report={tmp_path}/plan.json",
    )  # fmt: skip
    assert code == 0, said
    assert "--parallel=pipeline --num_devices=3 --num_micro_batches=4" in shown
    assert re.search(r"^0 │.*│$", shown, re.MULTILINE)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 3 * 4 * 2
    plan = json.loads((tmp_path / "plan.json").read_text())
    layers = [stage["layers"] for stage in plan["stages"]]  # Cut by time, which is measured.
    assert len(layers) == 3 and sum(layers, []) == ["hidden1", "hidden2", "hidden3", "logit"]
    assert plan["most_in_flight"] == [3, 2, 1]
    assert plan["step_seconds"] <= plan["one_after_the_other_seconds"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", MLP, "--schedule=gpipe"], "--schedule=gpipe with --parallel=data"),
        (
            ["train", MLP, "--parallel=pipeline", "--num_micro_batches=65"],
            "--num_micro_batches=65 with --global_batch_size=64",
        ),
        (
            ["check", MLP, "--parallel=pipeline", "--chunks_per_device=2"],
            "--chunks_per_device=2 alone",
        ),
        (["plan", MLP, "--draw=plan.png"], "--draw=plan.png with --parallel=auto"),
        (["bench", "pipeline", MLP, "--schedule=zigzag"], "Received: zigzag"),
    ],
)
def test_mistakes_are_answered_before_tensorflow_loads(arguments, said):
    code, _, shown = run(*arguments)
    assert code == 2
    assert said in shown


def test_stages_in_processes_train_to_the_weights_of_one(tmp_path):
    train = [
        "-m", "tfparallel", "train", TRANSFORMER, "--seed=7", "--steps_per_epoch=4",
        "--global_batch_size=10",
    ]  # fmt: skip
    launch = [sys.executable, "-m", "tfparallel", "launch", "--nproc_per_node=2", "--"]
    command = [
        *launch, sys.executable, *train, "--parallel=pipeline", "--num_micro_batches=3",
        f"--save={tmp_path}/p.keras", f"--report={tmp_path}/p.json",
    ]  # fmt: skip
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plain = [sys.executable, *train, "--parallel=none", f"--save={tmp_path}/n.keras"]
    subprocess.run(list(map(str, plain)), cwd=ROOT, check=True, timeout=200)
    expected, actual = (weights_of(tmp_path / name) for name in ("n.keras", "p.keras"))
    for one, other in zip(expected, actual, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-4)
    placement = json.loads((tmp_path / "p.json").read_text())["placement"]
    assert [process["device"] for process in placement] == [
        f"/job:worker/task:{index}/device:CPU:0" for index in range(2)
    ]
    assert not set(placement[0]["layers"]) & set(placement[1]["layers"])
    assert all(process["parameter_bytes"] > 0 for process in placement)


def test_bench_measures_stages_in_processes(tmp_path):
    code, _, said = run(
        "bench", "pipeline", MLP, "--num_micro_batches=2", "--schedule=1f1b", "--steps=2",
        f"--report={tmp_path}/bench.json", f"--plot={tmp_path}/bench.png",
    )  # fmt: skip
    assert code == 0, said
    report = json.loads((tmp_path / "bench.json").read_text())
    (row,) = report["pipelines"]
    assert report["plain"]["num_examples"] == row["num_examples"] == 64
    assert row["most_in_flight"] == [2, 1] and len(row["peak_memory_bytes"]) == 2
    for tensors, whole in zip(row["peak_tensor_bytes"], row["peak_memory_bytes"], strict=True):
        assert tensors is None or 0 <= tensors < whole  # Only large ones are counted.
    # No process has a GPU; where one has, its tensors there are what the table shows.
    assert row["peak_gpu_bytes"] == [{}, {}] and report["plain"]["peak_gpu_bytes"] == [{}]
    on_gpu = row | {"peak_gpu_bytes": [{"GPU:0": 3 << 20, "GPU:1": 4 << 20}, {}]}
    assert bench_pipeline._tensor_bytes(on_gpu) == [7 << 20, row["peak_tensor_bytes"][1]]
    assert 0 < row["bubble"] < 1 and row["bubble_of_equal_stages"] == pytest.approx(1 / 3)
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
