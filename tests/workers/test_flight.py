"""Flight records of real jobs, and what `tfparallel trace` says of them."""

import json
import sys

import pytest

from tests.commands.command_line import ROOT, TASKS, tfparallel
from tfparallel.flight.job import is_collective, read_job, splits

pytestmark = pytest.mark.slow

TRAIN = [sys.executable, "-m", "tfparallel", "train", TASKS / "blobs.py", "--parallel=data"]
TRAIN += ["--num_devices=1", "--device_type=cpu"]


def job(folder, *flags, transport="tensorflow", epochs=4):
    return tfparallel(
        *("launch", "--nproc_per_node=2", f"--log_dir={folder}", f"--transport={transport}"),
        *("--", *TRAIN, f"--epochs={epochs}", "--global_batch_size=16", *flags),
    )


@pytest.mark.parametrize("transport", ["tensorflow", "mpi"])
def test_a_step_and_what_is_in_it_are_recorded(tmp_path, transport):
    if transport == "mpi":
        pytest.importorskip("mpi4py")
    code, _, errors = job(tmp_path, transport=transport)
    assert code == 0, errors
    records = read_job(tmp_path)
    for worker, record in enumerate(records):
        assert record.worker == worker and record.about["ended"] == "well"
        step = max(event.step for event in record.events)
        last = [event for event in record.events if event.step == step]
        of_step = {event.what: event for event in last}
        assert {"between steps", "input", "forward", "backward", "update", "step"} < set(of_step)
        (collective,) = filter(is_collective, of_step)
        assert collective.startswith("sum float32[")
        whole = of_step["step"]
        for name in set(of_step) - {"between steps"}:
            assert whole.begin <= of_step[name].begin <= of_step[name].end <= whole.end
    assert len(splits(records)) == 2
    code, shown, errors = tfparallel("trace", tmp_path, f"--output={tmp_path}/trace.json")
    assert code == 0, errors
    assert shown.startswith("All workers finished.\n") and "reduction" in shown
    traced = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in traced} == {0, 1}


def test_the_worker_that_hangs_is_named_with_where_it_stands(tmp_path):
    flags = ("--inject=hang:worker=1,step=10", "--stall_timeout=5")
    code, _, errors = job(tmp_path, *flags, epochs=20)
    assert code == 75 and f"what each worker did last: tfparallel trace {tmp_path}" in errors
    code, shown, errors = tfparallel("trace", tmp_path)
    assert code == 0, errors
    lines = shown.splitlines()
    assert lines[0] == "The others waited for worker 1."
    assert any(line.startswith("  worker 0 on ") and "in `sum float32[" in line for line in lines)
    (of_1,) = [line for line in lines if line.startswith("* worker 1 on ")]
    assert "between " in of_1 and "inject.py" in shown


def test_without_a_folder_the_records_of_a_failed_job_are_kept(tmp_path):
    launch = ("launch", "--nproc_per_node=2", "--", *TRAIN, "--epochs=20")
    code, _, errors = tfparallel(*launch, "--inject=kill:worker=1,step=5", TMPDIR=str(tmp_path))
    assert code == 137
    (folder,) = tmp_path.glob("tfparallel_flight_*")
    assert f"tfparallel trace {folder}" in errors
    code, shown, _ = tfparallel("trace", folder)
    assert code == 0 and "* worker 1" in shown, shown
    code, _, errors = tfparallel(*launch, TMPDIR=str(tmp_path))
    assert code == 0, errors
    assert list(tmp_path.glob("tfparallel_flight_*")) == [folder]


@pytest.mark.parametrize("arguments", [[], ["nowhere"], [str(ROOT / "docs")], ["a", "b"]])
def test_what_is_no_folder_of_records_is_refused(arguments):
    code, _, errors = tfparallel("trace", *arguments)
    assert code == 2 and "is required" in errors
