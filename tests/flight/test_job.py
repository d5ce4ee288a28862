"""What the records of a job say, made by hand."""

import pytest

from tfparallel.flight.job import (
    behind,
    chrome_trace,
    clock_shifts,
    doing,
    elsewhere,
    read_job,
    splits,
)
from tfparallel.flight.record import Event, FlightRecord, WorkerRecord, path_of

SUM = "sum float32[1000]"


def record(worker, *, now=("between steps", 9, 100.0, 101.0), marks=(), events=(), **about):
    about = {"worker": worker, "num_workers": 2, "num_local": 2, "host": "a"} | about
    return WorkerRecord(about, dict(marks), Event(*now), "", tuple(events))


IN_SUM = {"input": 100.1, "backward": 100.2, f"{SUM} …": 100.3}


def test_who_has_not_come_is_named():
    waits = record(0, now=("in a step", 10, 100.0, 130.0), marks=IN_SUM)
    hangs = record(1, now=("between steps", 9, 99.0, 130.0), marks=IN_SUM)
    assert behind([waits, hangs]) == ((1,), "The others waited for worker 1.")
    assert doing(waits) == f"in step 10, in `{SUM}`, for 29.7 s"
    assert doing(hangs) == "between steps, for 31.0 s"


def test_a_worker_of_the_same_step_that_has_not_reached_the_sum_is_behind():
    waits = record(0, now=("in a step", 10, 100.0, 130.0), marks=IN_SUM)
    reads = record(1, now=("in a step", 10, 100.0, 130.0), marks={"input": 90.0})
    assert behind([waits, reads])[0] == (1,)
    assert doing(reads) == "in step 10, waiting for its data, for 30.0 s"


def test_who_is_silent_is_named():
    lives = record(0, now=("in a step", 10, 100.0, 130.0))
    killed = record(1, now=("in a step", 10, 100.0, 110.0))
    assert behind([lives, killed])[0] == (1,)
    assert "went silent while others continued" in behind([lives, killed])[1]


def test_who_failed_is_named_and_not_who_lost_it():
    lost = record(0, ended="WorkerLostError: worker 1 was lost", ended_at=10.0)
    failed = record(1, ended="KeyError: 'x'\nmore", ended_at=11.0)
    assert behind([lost, failed]) == ((1,), "Worker 1 failed: KeyError: 'x'")


def test_who_left_no_record_is_named():
    assert behind([record(0)])[0] == (1,) and elsewhere([record(0)]) == []


def test_who_is_on_another_host_has_the_record_there():
    alone = record(0, num_local=1, now=("in a step", 3, 1.0, 2.0))
    assert elsewhere([alone]) == [1]
    assert behind([alone])[0] == ()


def test_the_report_says_that_all_workers_were_told_to_end():
    records = [record(worker, ended="Preempted: 75", ended_at=1.0) for worker in (0, 1)]
    assert behind(records) == ((), "All workers were preempted, and saved their state.")


def test_clocks_that_differ_make_nobody_silent():
    events = [steps_of(0), steps_of(1, ahead=50.0)]
    records = [
        record(worker, host="ab"[worker], num_local=1, events=events[worker],
               now=("in a step", 8, 50.0 * worker, 1.0 + 50.0 * worker))
        for worker in (0, 1)
    ]  # fmt: skip
    assert "went silent" not in behind(records)[1]


def test_the_report_says_that_all_workers_ended_well():
    well = [record(worker, ended="well", ended_at=1.0) for worker in (0, 1)]
    assert behind(well) == ((), "All workers finished.")


def test_the_report_names_nobody_where_all_stand_in_one_place():
    same = [record(worker, now=("in a step", 10, 100.0, 130.0), marks=IN_SUM) for worker in (0, 1)]
    assert behind(same)[0] == () and "All workers are at the same point" in behind(same)[1]


def steps_of(worker, *, ahead=0.0, num_steps=8):
    """Steps of 10 ms; worker 1 comes 3 ms later to a sum that takes 1."""
    events = []
    for step in range(num_steps):
        begin = step * 0.012 + ahead
        come = begin + (0.004 if worker == 0 else 0.007)
        end = begin + 0.008
        events += [
            Event("between steps", step, begin - 0.002, begin),
            Event("input", step, begin, begin + 0.001),
            Event(SUM, step, come, end),
            Event("update", step, end, begin + 0.010),
            Event("step", step, begin, begin + 0.010),
        ]
    return events


@pytest.mark.parametrize(("host", "ahead"), [("a", 0.0), ("b", 50.0)])
def test_a_steps_time_is_split(host, ahead):
    """On another host, whose clock goes before, too."""
    records = [record(0, events=steps_of(0)), record(1, events=steps_of(1, ahead=ahead), host=host)]
    assert clock_shifts(records) == pytest.approx({0: 0.0, 1: ahead}, abs=1e-9)
    first, second = splits(records)
    assert first.total == pytest.approx(0.012) and first.num_steps == 5
    assert first.waiting == pytest.approx(0.003) and second.waiting == pytest.approx(0)
    for split in (first, second):
        assert split.reduction == pytest.approx(0.001) and split.input == pytest.approx(0.001)
        assert split.between == pytest.approx(0.002)
        parts = (split.input, split.compute, split.reduction, split.waiting, split.between)
        assert sum(parts) == pytest.approx(split.total)
    assert str(first).startswith("12.0 ms per step (of 5): input 1.0, compute 5.0, reduction 1.0")


def test_a_timeline_has_all_workers_on_one_clock():
    records = [record(0, events=steps_of(0)), record(1, events=steps_of(1, ahead=9.0), host="b")]
    traced = chrome_trace(records)["traceEvents"]
    sums = {e["pid"]: e for e in traced if e["name"] == SUM and e["args"]["step"] == 2}
    assert [sums[worker]["ts"] + sums[worker]["dur"] for worker in (0, 1)] == pytest.approx(
        [0.032e6, 0.032e6]
    )
    names = {e["args"]["name"] for e in traced if e["ph"] == "M"}
    assert {"worker 0 (a)", "worker 1 (b)", "steps", "in a step", "collectives"} == names


def test_the_last_attempt_is_read(tmp_path):
    for attempt in (0, 1):
        for worker in (1, 0):
            about = {"worker": worker, "num_workers": 2, "attempt": attempt, "started": attempt}
            FlightRecord(path_of(tmp_path, worker, attempt), about).close()
    records = read_job(tmp_path)
    assert [(r.worker, r.about["attempt"]) for r in records] == [(0, 1), (1, 1)]
    # A later job in the same folder, in its first attempt.
    later = {"worker": 0, "num_workers": 1, "attempt": 0, "started": 9.0, "job": "later"}
    FlightRecord(path_of(tmp_path, 0, 0), later).close()
    assert [r.about["job"] for r in read_job(tmp_path)] == ["later"]


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(ValueError, match="A folder with the flight records of a job is required"):
        read_job(tmp_path)
