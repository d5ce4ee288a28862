"""`tfparallel bench` and `tfparallel plan all_reduce`."""

import csv
import json
import os

import pytest

from tests.commands.command_line import TASKS, tfparallel
from tfparallel.commands.main import main

BLOBS = str(TASKS / "blobs.py")


def test_mistakes_are_told_before_tensorflow_is_loaded(capsys):
    cases = [
        ([], "The name of a collective is required: all_reduce, reduce_scatter, "),
        ([], "; or `train TASK.py`, or `pipeline TASK.py`. Received: []"),
        (["all_reduse"], "Received: ['all_reduse']"),
        (["all_reduce", "a.py", "b.py"], "at most one task file"),
        (["broadcast", "a.py"], "Received: broadcast a.py. Drop the file"),
        (["all_reduce", "--min_bytes=4Q"], "Received: '4Q'"),
        (["all_reduce", "--max_bytes=1K"], "the largest size is below the smallest"),
        (["all_reduce", "--step_factor=1"], "the factor must be at least 2"),
        (["all_reduce", "--warmup_iters=1"], "at least 4. Received: --warmup_iters=1"),
        (["all_reduce", "--num_devices=1"], "at least 2"),
        (["all_reduce", "--num_devices=2", "--nproc_per_node=2"], "not both"),
        (["broadcast", "--nproc_per_node=2", "--save_profile"], "it needs all_reduce"),
        (["all_reduce", "--plot=a.pdf"], "must end in .png"),
        (["all_reduce", "--report=a.txt"], "must end in .json"),
        (["all_reduce", "--json=a.txt"], "must end in .json"),
        (["all_reduce", BLOBS, "--min_bytes=4K"], "the model's gradients determine the sizes"),
        (["all_reduce", BLOBS, "--unalign=1"], "Received: "),
        (["all_reduce", "--unalign=-1"], "at least 0"),
        (["all_reduce", "--dtype=int8"], "dtype"),
        (["all_reduce", "no.py"], "does not exist. Received: 'no.py'"),
    ]
    for arguments, message in cases:
        assert main(["bench", *arguments]) == 2, arguments
        assert message in capsys.readouterr().err, arguments


def test_mistakes_of_a_plan(capsys):
    cases = [
        ([], "--ranks=None"),
        (["--ranks=1"], "Received: --ranks=1"),
        (["--ranks=9", "--local_ranks=2"], "local_ranks=2, num_ranks=9"),
        (["--ranks=8", "--bandwidth=0"], "--bandwidth=0.0"),
        (["--ranks=8", "--local_bandwidth=9"], "add --local_ranks"),
        (["--ranks=8", "--sweep=no.json"], "--sweep=no.json"),
        (["--ranks=8", "more.py"], "plan all_reduce takes only flags. Received: ['more.py']"),
    ]
    for arguments, message in cases:
        assert main(["plan", "all_reduce", *arguments]) == 2, arguments
        assert message in capsys.readouterr().err, arguments


def test_a_plan_of_a_cluster(capsys, tmp_path):
    report = tmp_path / "plan.json"
    arguments = ["--ranks=64", "--local_ranks=8", f"--report={report}"]
    assert main(["plan", "all_reduce", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "64 ranks, 8 per host" in shown and "between hosts: 10 us a message, 25 GB/s" in shown
    assert "agree: hierarchical, hierarchical_ring, ring" in shown
    assert "fastest by formula: recursive_doubling from 4 KiB, " in shown
    written = json.loads(report.read_text())
    assert written["seconds"]["hierarchical"] == pytest.approx(
        written["simulated_seconds"]["hierarchical"]
    )


@pytest.mark.slow
def test_a_sweep_is_checked_written_drawn_and_chosen_by(tmp_path, monkeypatch):
    monkeypatch.setenv("TFPARALLEL_PROFILES", str(tmp_path / "profiles"))
    paths = {name: tmp_path / f"rows.{name}" for name in ("json", "csv", "png")}
    code, shown, error = tfparallel(
        *("bench", "all_reduce", "--num_devices=3", "--min_bytes=16", "--max_bytes=64K"),
        *("--step_factor=64", "--iters=2", "--dtype=bfloat16", "--save_profile"),
        *(f"--json={paths['json']}", f"--csv={paths['csv']}", f"--plot={paths['png']}"),
    )
    assert code == 0, error
    assert "# Out of bounds values : 0 OK" in shown and "Cost model, memory" in shown
    content = json.loads(paths["json"].read_text())
    algorithms = {row["algorithm"] for row in content["rows"]}
    assert len(algorithms) >= 8 and "tf_ring" in algorithms
    # Three sizes of all; nothing wrong; TensorFlow's hierarchical copy cannot sum three.
    assert len(content["rows"]) == 3 * len(algorithms)
    assert {row["nwrong"] for row in content["rows"]} == {0}
    assert content["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert len(content["results"]) == len(content["rows"])
    assert "tf_hierarchical_copy" not in algorithms
    with open(paths["csv"], newline="") as file:
        assert len(list(csv.DictReader(file))) == len(content["rows"])
    assert paths["png"].read_bytes().startswith(b"\x89PNG")
    assert os.listdir(tmp_path / "profiles") == ["all_reduce_cpu_3.json"]
    assert main(["plan", "all_reduce", "--ranks=8", f"--sweep={paths['json']}"]) == 0
    report = tmp_path / "report.json"
    code, _, error = tfparallel(
        *("train", BLOBS, "--parallel=data", "--num_devices=3", "--all_reduce=auto"),
        f"--report={report}",
    )
    assert code == 0, error
    chosen = json.loads(report.read_text())["all_reduce"]
    assert chosen["source"] == "profile" and chosen["algorithm"] in algorithms


@pytest.mark.slow
def test_between_workers_at_the_sizes_of_a_model():
    code, shown, error = tfparallel(
        "bench", "all_reduce", BLOBS, "--nproc_per_node=2", "--iters=2", "--algorithms=ring"
    )
    assert code == 0, error
    first = next(line for line in shown.splitlines() if line.startswith("[0]"))
    assert "for this model, " in first and " tensors: " in first
    assert "# ranks      : 2 processes" in shown and "Out of bounds values : 0 OK" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "ran"),
    [
        (["reduce_scatter", "--dtype=bfloat16"], "MPI shared memory, pipelined, in float32"),
        (["all_gather"], "TensorFlow CollectiveGatherV2 (RING)"),
        (["scatter", "--unalign=1"], "MPI_Iscatter"),
        (["send_recv"], "TensorFlow CollectiveBcastSendV2 in groups of two"),
    ],
)
def test_other_collectives_between_workers(arguments, ran):
    sizes = ["--min_bytes=4K", "--max_bytes=4K", "--iters=2"]
    code, shown, error = tfparallel("bench", *arguments, "--nproc_per_node=2", *sizes)
    assert code == 0, error
    assert ran in shown
    assert "Out of bounds values : 0 OK" in shown


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("nccl", "Received: nccl. nccl needs GPUs; CPU:0 is not one.\n"),
        ("tf_hierarchical_copy", "Received: tf_hierarchical_copy. tf_hierarchical_copy cannot run "
         "here: TensorFlow's implementation omits one device if their number is odd (3).\n"),
        ("rign", "Received: rign. Did you mean ring?\n"),
    ],
)  # fmt: skip
def test_an_algorithm_that_cannot_run_is_told_those_that_do_and_why(capsys, name, answer):
    for command in (["bench", "all_reduce"], ["check", BLOBS]):
        flag = "algorithms" if command[0] == "bench" else "all_reduce"
        assert main([*command, "--num_devices=3", f"--{flag}={name}"]) == 2
        error = capsys.readouterr().err
        assert "It must be one of reduce_to_one, " in error and error.endswith(answer)
