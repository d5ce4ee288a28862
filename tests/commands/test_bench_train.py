"""`tfparallel bench train`, on real jobs, with and without what holds them up."""

import json

import pytest

from tests.commands.command_line import TASKS, tfparallel


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nproc_per_node=1,two"], "whole numbers of at least 1, such as 1,2,4. Received: "),
        (["--steps=3"], "--steps must be at least 10. Received: --steps=3"),
        (["--global_batch_size=0"], "must be at least 1"),
        (["--link_gbits=0"], "--link_gbits must be above 0"),
        (["--inject=kill"], "A fault must follow the grammar"),
        (["--plot=a.pdf"], "must end in .png"),
        (["--report=a.txt"], "must end in .json"),
        (["--json=a.txt"], "must end in .json"),
        (["--nproc_per_node=gpu"], "must be whole numbers"),
    ],
)
def test_flags_that_cannot_be(flags, message):
    code, _, errors = tfparallel("bench", "train", TASKS / "blobs.py", *flags)
    assert code == 2 and message in errors


def test_a_task_file_that_is_not_there():
    code, _, errors = tfparallel("bench", "train", "nowhere.py")
    assert code == 2 and "The task file does not exist. Received: 'nowhere.py'" in errors


@pytest.mark.slow
def test_a_slow_worker_is_found_and_drawn(tmp_path):
    code, shown, errors = tfparallel(
        *("bench", "train", TASKS / "blobs.py", "--nproc_per_node=1,2", "--steps=30"),
        *(f"--json={tmp_path}/a.json", f"--plot={tmp_path}/a.png", "--inject=slow:worker=1,ms=50"),
    )
    assert code == 0, errors
    report = json.loads((tmp_path / "a.json").read_text())
    assert report["verdicts"]["2"].startswith("worker 1 is slow")
    assert "2 workers: worker 1 is slow" in shown and "strong scaling" in shown
    first, second = report["strong"][1]["splits"]
    assert first["waiting"] > 0.04 > second["waiting"] and second["between"] > 0.04
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert [run["global_batch_size"] for run in report["weak"]] == [64, 128]
