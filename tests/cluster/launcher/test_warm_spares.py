"""Processes that wait to become a worker: they go on as one, or end with their launcher."""

import os
import shlex
import sys
import time

import psutil
import pytest

from tests.cluster.processes import wait_for
from tests.commands.command_line import tfparallel
from tfparallel.cluster.launcher.supervisor import Job
from tfparallel.cluster.launcher.warm_spares import WarmSpares, imports_tfparallel
from tfparallel.cluster.launcher.worker_process import Program

PROGRAM = """
import os, sys
os.environ["OWN"] = "kept"
import tfparallel
words = [os.environ.get(name, "-") for name in ("RANK", "GONE", "OWN")]
print(*words, os.getpid(), "tensorflow" in sys.modules, "{word}")
"""


def program(rank, word="word", **environment):
    environment = {**os.environ, "RANK": str(rank), "OWN": "launcher's", **environment}
    return Program(0, [sys.executable, "-c", PROGRAM.format(word=word)], environment)


def started(standbys):
    """The process that waits, once it is there."""
    wait_for(lambda: standbys._waiting, "a process that waits")
    ((waiting),) = standbys._waiting.values()
    wait_for(lambda: waiting.worker.listen() and waiting.worker.pid is not None, "its start")
    return waiting.worker


def ran(program, standbys):
    shown = []
    job = Job(
        [program], on_output=lambda worker, stream, text: shown.append(text), standbys=standbys
    )
    outcome = job.wait()
    assert outcome.culprit is None, b"".join(shown)
    *words, pid, has_tensorflow, word = b"".join(shown).decode().split()
    return words, int(pid), has_tensorflow == "True", word


@pytest.fixture(name="standbys")
def at_once():
    with WarmSpares(delay_seconds=0) as standbys:
        yield standbys


@pytest.mark.slow
def test_the_next_worker_is_the_process_that_waits():
    messages = []
    with WarmSpares(delay_seconds=0, tell=messages.append) as standbys:
        words, first, had_tensorflow, _ = ran(program(1, GONE="there"), standbys)
        assert (words, had_tensorflow) == (["1", "there", "kept"], False) and not messages
        standbys.prepare_now([program(1, GONE="there")])
        waits = started(standbys)
        # A variable that is gone is taken away; one that the program has set itself stays.
        assert ran(program(2), standbys) == (["2", "-", "kept"], waits.pid, True, "word")
        assert waits.pid != first
        assert messages == ["1 of 1 workers on this host start in a standby process"]


@pytest.mark.slow
def test_one_that_waits_has_loaded_tensorflow(standbys):
    standbys.prepare_now([program(1)])
    waits = started(standbys)
    assert psutil.Process(waits.pid).memory_info().rss > 250 << 20  # With TensorFlow.
    assert ran(program(2), standbys)[1:3] == (waits.pid, True)


def test_one_that_loads_has_ended_or_runs_something_else_is_not_taken(standbys):
    ran(program(1), standbys)
    loads = started(standbys)
    assert ran(program(2), standbys)[2] is False and not psutil.pid_exists(loads.pid)
    psutil.Process(started(standbys).pid).kill()
    assert ran(program(3), standbys)[2] is False
    other = started(standbys)
    assert ran(program(4, "another"), standbys)[2:] == (False, "another")
    assert not psutil.pid_exists(other.pid)


@pytest.mark.slow
def test_one_that_cannot_be_told_is_not_taken(standbys):
    """Story: a full disk ended the launcher, where a process of its own would have started."""
    standbys.prepare_now([program(1)])
    waits = started(standbys)
    (waiting,) = standbys._waiting.values()
    os.mkdir(f"{waiting.path}.part")
    assert ran(program(2), standbys)[2] is False and not psutil.pid_exists(waits.pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        # It never comes to wait; and what waits is a process below it.
        [sys.executable, "-c", "import time; time.sleep(600)"],
        ["sh", "-c", f"{shlex.quote(sys.executable)} -c 'import tfparallel'; true"],
    ],
    ids=["another program", "a wrapper"],
)
def test_what_is_not_ready_in_time_is_ended_and_never_taken(command):
    before = psutil.Process().children(recursive=True)
    with WarmSpares(delay_seconds=0, loading_seconds=8) as standbys:
        waits = Program(0, command, dict(os.environ))
        standbys.prepare_now([waits])
        assert not standbys._waiting and standbys.take(0, waits) is None
    assert psutil.Process().children(recursive=True) == before


def test_none_outlives_its_launcher():
    with WarmSpares(delay_seconds=0) as standbys:
        ran(program(1), standbys)
        pid = started(standbys).pid
    assert not psutil.pid_exists(pid)
    standbys.prepare([program(1)])  # Too late, as from a timer that had fired already.
    standbys.prepare_now([program(1)])
    time.sleep(0.2)
    assert not standbys._waiting


def test_the_last_attempt_needs_none(standbys):
    standbys.stop_preparing()
    ran(program(1), standbys)
    time.sleep(0.2)
    assert not standbys._waiting


def test_a_command_that_may_wait(tmp_path):
    for name, source in {
        "with": "import os\nimport tfparallel\n",
        "from": "from tfparallel.data import by_sample\n",
        "without": "import tensorflow\n",
        "late": "def main():\n    import tfparallel\n",
        "broken": "import tfparallel (\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(source)
    python = "/usr/bin/python3.12"
    for command in (
        ["/a/bin/tfparallel", "train", "task.py"],
        [python, "-m", "tfparallel", "train", "task.py"],
        [python, tmp_path / "with.py", "--flag"],
        [python, "-P", tmp_path / "from.py"],
    ):
        assert imports_tfparallel([str(each) for each in command]), command
    for command in (
        [python, tmp_path / "without.py"],
        [python, tmp_path / "late.py"],
        [python, tmp_path / "broken.py"],
        [python, "nowhere.py"],
        [python, "-c", "import tfparallel"],
        ["bash", "-c", "tfparallel train task.py"],
    ):
        assert not imports_tfparallel([str(each) for each in command]), command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--standby is only for a job that may restart"),
        (["--max_restarts=1"], "--standby needs a command that imports tfparallel itself"),
    ],
)
def test_standby_is_a_usage_error_where_it_cannot_help(flags, said):
    code, _, errors = tfparallel("launch", "--standby", *flags, "--", sys.executable, "-c", "0")
    assert code == 2 and said in errors
