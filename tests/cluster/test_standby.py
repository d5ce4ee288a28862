"""Processes that wait to become a worker: they go on as one, or end with their launcher."""

import os
import sys
import time

import psutil
import pytest

from tests.cluster.processes import wait_for
from tests.commands.command_line import tfparallel
from tfparallel.cluster.guarded import Program
from tfparallel.cluster.standby import Standbys
from tfparallel.cluster.supervisor import run

PROGRAM = """
import os, sys
import tfparallel
print(os.environ["RANK"], os.getpid(), "tensorflow" in sys.modules, "{word}")
"""


def program(rank, word="word"):
    environment = {**os.environ, "RANK": str(rank)}
    return Program(0, [sys.executable, "-c", PROGRAM.format(word=word)], environment)


def started(standbys):
    """The process that waits, once it is there."""
    wait_for(lambda: standbys._waiting, "a process that waits")
    ((_, worker),) = standbys._waiting.values()
    wait_for(lambda: worker.listen() and worker.pid is not None, "its start")
    return worker


def ran(program, standbys):
    shown = []
    outcome = run(
        [program], on_output=lambda worker, stream, text: shown.append(text), standbys=standbys
    )
    assert outcome.culprit is None, b"".join(shown)
    rank, pid, has_tensorflow, word = b"".join(shown).split()
    return int(rank), int(pid), has_tensorflow == b"True", word.decode()


@pytest.fixture(name="standbys")
def at_once():
    with Standbys(delay_seconds=0) as standbys:
        yield standbys


@pytest.mark.slow
def test_the_next_worker_is_the_process_that_waits(standbys):
    rank, first, had_tensorflow, _ = ran(program(1), standbys)
    assert (rank, had_tensorflow) == (1, False)
    waits = started(standbys)
    assert ran(program(2), standbys) == (2, waits.pid, True, "word")
    assert waits.pid != first


def test_one_that_has_ended_or_runs_something_else_is_not_taken(standbys):
    ran(program(1), standbys)
    killed = started(standbys)
    psutil.Process(killed.pid).kill()
    wait_for(lambda: not killed.listen() or killed.returncode is not None, "its end")
    assert ran(program(2), standbys)[2] is False
    other = started(standbys)
    rank, pid, has_tensorflow, word = ran(program(3, "another"), standbys)
    assert (rank, has_tensorflow, word) == (3, False, "another") and pid != other.pid
    assert not psutil.pid_exists(other.pid)


@pytest.mark.slow
def test_a_host_that_joins_has_loaded_before(standbys):
    standbys.prepare_now([program(1)])
    waits = started(standbys)
    assert psutil.Process(waits.pid).memory_info().rss > 250 << 20  # With TensorFlow.
    assert ran(program(2), standbys)[1:3] == (waits.pid, True)


def test_none_outlives_its_launcher():
    with Standbys(delay_seconds=0) as standbys:
        ran(program(1), standbys)
        pid = started(standbys).pid
    assert not psutil.pid_exists(pid)
    standbys.prepare([program(1)])  # Too late, as from a timer that had fired already.
    time.sleep(0.2)
    assert not standbys._waiting


def test_a_job_that_cannot_start_again_needs_none():
    code, _, errors = tfparallel("launch", "--standby", "--", sys.executable, "-c", "0")
    assert code == 2 and "--standby is for a job that may start again" in errors
