"""Whom a worker that ended first had waited for, by records made by hand."""

import signal

import pytest

from tfparallel.cluster.worker_exit import Outcome, WorkerExit
from tfparallel.flight.culprit import has_lost_another, lost_by, waited_for
from tfparallel.flight.record import FlightRecord, path_of

ALIVE = 1000.0


def keep(folder, worker, *, step=9, alive=ALIVE, started=100.0, ended="", lost=None, **about):
    about = {"worker": worker, "num_workers": 2, "num_local": 2, "host": "a"} | about
    record = FlightRecord(path_of(folder, worker, 0), about | {"started": started})
    record.now("in a step", step, 900.0)
    record.alive(alive)
    if ended:
        record.end(ended, lost)
    record.close()


def outcome(returncode, node=None):
    culprit = WorkerExit(0, returncode, 5.0, stopped=False, node=node)
    return Outcome((culprit, WorkerExit(1, -9, 6.0, stopped=True)), culprit)


@pytest.mark.parametrize("returncode, ended", [(75, ""), (-signal.SIGABRT, ""), (1, "WorkerLostE")])
def test_who_waited_is_not_to_blame(tmp_path, returncode, ended):
    keep(tmp_path, 0, ended=ended and "WorkerLostError: worker 1")
    keep(tmp_path, 1, step=8)
    assert waited_for(outcome(returncode), tmp_path, 0, 50.0) == "The others waited for worker 1."


@pytest.mark.parametrize("case", ["its own fault", "elsewhere", "older records", "none", "first"])
def test_nobody_else_is_blamed(tmp_path, case):
    if case != "none":
        keep(tmp_path, 0, ended="KeyError: 'x'" if case == "its own fault" else "")
        keep(tmp_path, 1, step=10 if case == "first" else 8)
    returncode, node = 1 if case == "its own fault" else 75, 1 if case == "elsewhere" else None
    began = 200.0 if case == "older records" else 50.0
    assert waited_for(outcome(returncode, node), tmp_path, 0, began) == ""


def test_what_the_records_of_one_host_tell(tmp_path):
    """The worker of the other host may be behind both; but one of these says nothing any more."""
    there = {"num_workers": 3}
    keep(tmp_path, 0, **there)
    keep(tmp_path, 1, step=8, **there)
    assert waited_for(outcome(75), tmp_path, 0, 50.0) == ""
    keep(tmp_path, 1, alive=ALIVE - 10.0, **there)
    assert "Worker 1 went silent" in waited_for(outcome(75), tmp_path, 0, 50.0)


def test_the_record_names_the_worker_that_was_lost(tmp_path):
    keep(tmp_path, 0, ended="WorkerLostError: worker 1", lost=1)
    keep(tmp_path, 1, ended="KeyError: 'x'")
    assert [lost_by(worker, tmp_path, 0, 50.0) for worker in (0, 1, 2)] == [1, None, None]
    assert lost_by(0, tmp_path, 0, 200.0) is None  # An older job's record.


@pytest.mark.parametrize("began, lost", [(50.0, True), (200.0, False)])
def test_an_older_job_excuses_nobody(tmp_path, began, lost):
    """Story: a job in the folder of an earlier one took that one's record for its own."""
    keep(tmp_path, 0, ended="WorkerLostError: worker 1")
    assert has_lost_another(WorkerExit(0, 1, 5.0, stopped=False), tmp_path, 0, began) is lost
