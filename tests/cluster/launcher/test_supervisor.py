"""Workers start, fail, are named, and leave nothing behind."""

import collections
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from tests.cluster.processes import STUBBORN_FAMILY, family, survivors, wait_for
from tfparallel.cluster.launcher.supervisor import Job, Program, StopRequest
from tfparallel.cluster.launcher.warm_spares import WarmSpares
from tfparallel.cluster.worker_exit import WorkerExit


def run(programs, *, timeout_seconds=None, **options):
    return Job(programs, **options).wait(timeout_seconds)


def python(worker, code, *arguments, cores=()):
    return Program(worker, [sys.executable, "-c", code, *map(str, arguments)], os.environ, cores)


class Output:
    def __init__(self):
        self.pieces = collections.defaultdict(list)

    def __call__(self, worker, stream, text):
        self.pieces[worker, stream].append(text)

    def __getitem__(self, source):
        return b"".join(self.pieces[source])


def summary(outcome):
    return [exit_.returncode for exit_ in outcome.exits]


def test_all_succeed_though_not_together():
    outcome = run([python(0, "import time; time.sleep(0.5)"), python(1, "")])
    assert outcome.culprit is None and summary(outcome) == [0, 0]
    assert outcome.exits[1].time_seconds < outcome.exits[0].time_seconds
    assert [exit_.stopped for exit_ in outcome.exits] == [False, False]


def test_output_is_whole_and_binary():
    code = (
        "import os, sys\n"
        "os.write(1, bytes(range(256)) * 2000)\n"
        "os.write(2, b'to stderr')"
    )
    output = Output()
    run([python(4, code), python(7, "print(1)")], on_output=output)
    assert output[4, "stdout"] == bytes(range(256)) * 2000
    assert output[4, "stderr"] == b"to stderr"
    assert output[7, "stdout"] == b"1\n"


def test_a_line_without_end_is_seen_while_the_worker_waits():
    output = Output()
    code = "import time; print('name? ', end='', flush=True); time.sleep(600)"
    with Job([python(0, code)], on_output=output) as job:
        wait_for(lambda: output[0, "stdout"] == b"name? ", "the partial line")
        job.stop()


def test_a_piece_ends_with_a_line_whatever_the_writes_were():
    code = (
        "import os, time\n"
        "for part in (b'a', b'b\\nc', b'd\\r', b'e\\n'):\n"
        "    os.write(1, part); time.sleep(0.05)"
    )
    output = Output()
    run([python(0, code)], on_output=output)
    assert output.pieces[0, "stdout"] == [b"ab\n", b"cd\r", b"e\n"]


# Runs what the second argument says once the process that wrote its id into the file of the
# first argument has ended.
AFTER = """
import os, pathlib, signal, sys, time
file = pathlib.Path(sys.argv[1])
while not (file.exists() and file.read_text()): time.sleep(0.01)
try:
    while True: os.kill(int(file.read_text()), 0); time.sleep(0.001)
except ProcessLookupError:
    exec(sys.argv[2])
"""
FAIL = """
import os, pathlib, sys
print("cause"); sys.stderr.write("last words")
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
sys.exit(3)
"""


def test_the_first_failure_is_the_culprit(tmp_path):
    file = tmp_path / "pid"
    outcome = run(
        [
            python(0, AFTER, file, "sys.exit(1)"),
            python(1, FAIL, file),
            python(2, "import time; time.sleep(600)"),
        ]
    )
    culprit = outcome.culprit
    assert (culprit.worker, culprit.returncode, culprit.exit_code) == (1, 3, 3)
    assert set(culprit.tail) == {"cause", "last words"}
    assert culprit.describe().startswith("worker 1 exited with code 3 after ")
    assert [exit_.stopped for exit_ in outcome.exits] == [False, False, True]
    assert outcome.exits[0].returncode == 1
    assert outcome.exits[2].returncode == -signal.SIGTERM


@pytest.mark.parametrize("name, culprit", [("SIGKILL", 0), ("SIGSEGV", 0), ("SIGABRT", 1)])
def test_among_near_failures_a_signal_is_the_cause(tmp_path, name, culprit):
    """Worker 0 dies after worker 1 has failed, but so soon that the order says nothing.

    SIGABRT is how TensorFlow itself ends a worker that has lost a peer.
    """
    file = tmp_path / "pid"
    death = f"os.kill(os.getpid(), signal.{name})"
    outcome = run([python(0, AFTER, file, death), python(1, FAIL, file)])
    assert summary(outcome) == [-signal.Signals[name], 3]
    assert outcome.culprit.worker == culprit


def test_death_by_signal_is_named():
    outcome = run([python(0, "import os; os.kill(os.getpid(), 9)")])
    assert outcome.culprit.exit_code == 137
    assert "worker 0 was killed by SIGKILL" in outcome.culprit.describe()
    unnamed = WorkerExit(0, -40, 1.0, False)
    assert unnamed.describe() == "worker 0 was killed by signal 40 after 1.0 s"


@pytest.mark.slow
def test_survivors_of_sigterm_are_killed_after_the_grace_period(tmp_path):
    fails = "import os, sys, time\nwhile len(os.listdir(sys.argv[1])) < 3: time.sleep(0.01)\n1/0"
    outcome = run(
        [python(0, STUBBORN_FAMILY, tmp_path), python(1, fails, tmp_path)], grace_seconds=0.5
    )
    assert outcome.culprit.worker == 1 and outcome.culprit.tail[-1].startswith("ZeroDivisionError")
    assert outcome.exits[0].returncode == -signal.SIGKILL and outcome.exits[0].stopped
    assert not any(psutil.pid_exists(int(path.name)) for path in tmp_path.iterdir())


def test_workers_may_use_the_grace_period():
    code = (
        "import signal, time\n"
        "def stop(*_): time.sleep(0.3); print('saved'); raise SystemExit(0)\n"
        "signal.signal(signal.SIGTERM, stop); print('ready', flush=True); time.sleep(600)"
    )
    output = Output()
    with Job([python(0, code)], on_output=output, grace_seconds=10) as job:
        wait_for(lambda: output[0, "stdout"] == b"ready\n", "the worker")
        job.stop()
    assert output[0, "stdout"] == b"ready\nsaved\n"


@pytest.mark.slow
def test_what_a_worker_leaves_behind_ends_with_it(tmp_path):
    code = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "pathlib.Path(sys.argv[1], str(child.pid)).touch()"
    )
    outcome = run([python(0, code, tmp_path)])
    assert summary(outcome) == [0]
    (path,) = tmp_path.iterdir()
    assert not psutil.pid_exists(int(path.name))


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopRequest(signal.SIGHUP), ValueError])
def test_an_exception_in_the_caller_stops_all(tmp_path, error):
    with pytest.raises(error if isinstance(error, type) else StopRequest):
        with Job([python(0, STUBBORN_FAMILY, tmp_path)], grace_seconds=0.1):
            processes = family(tmp_path)
            raise error
    assert survivors(processes) == []


def test_a_second_interrupt_cuts_the_grace_short(tmp_path):
    with Job([python(0, STUBBORN_FAMILY, tmp_path)], grace_seconds=600) as job:
        processes = family(tmp_path)
        main = threading.main_thread().ident
        timer = threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            job.stop()
    assert survivors(processes) == []


SAVES = """
import signal, sys, time
def save(*_): time.sleep(0.5); raise SystemExit(75)
for number in signal.SIGTERM, signal.SIGUSR1: signal.signal(number, save)
print("ready", flush=True); time.sleep(600)
"""


def test_another_thread_ends_a_job_whose_workers_may_save():
    output = Output()
    with Job([python(0, SAVES), python(1, SAVES)], on_output=output) as job:
        wait_for(lambda: output[0, "stdout"] and output[1, "stdout"], "the workers to start")
        threading.Timer(0.1, job.end, [20.0]).start()
        outcome = job.wait(timeout_seconds=60)
    assert outcome.culprit is None and summary(outcome) == [75, 75]
    assert [exit_.stopped for exit_ in outcome.exits] == [True, True]


@pytest.fixture(name="usr1_raises")
def usr1_raises_a_stop_request():
    def stop(signum, frame):
        raise StopRequest(signum)

    before = signal.signal(signal.SIGUSR1, stop)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_while_the_job_stops_for_another_reason_waits(usr1_raises):
    """As where two hosts are told to end, and one learns of the other's first."""
    ready = threading.Event()
    job = Job([python(0, SAVES)], on_output=lambda *_: ready.set(), grace_seconds=60)
    with pytest.raises(StopRequest) as raised, job:
        assert ready.wait(20)
        main = threading.main_thread().ident
        timer = threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGUSR1])
        timer.start()
    assert raised.value.has_saved and [each.returncode for each in raised.value.exits] == [75]


def test_a_signal_while_the_workers_start_lets_them_save(usr1_raises):
    """Story: a worker had printed its first line before the launcher watched it, and was killed."""

    class Signalled(WarmSpares):
        def take(self, worker, program):
            return None

        def prepare(self, programs):
            assert ready.wait(20)
            signal.raise_signal(signal.SIGUSR1)

    ready = threading.Event()
    job = Job(
        [python(0, SAVES)],
        on_output=lambda *_: ready.set(),
        grace_seconds=60,
        standbys=Signalled(),
    )
    with pytest.raises(StopRequest) as raised:
        job.wait()
    assert raised.value.has_saved and [each.returncode for each in raised.value.exits] == [75]


def test_what_the_callback_raises_stops_the_job(tmp_path):
    def full_disk(worker, stream, text):
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        run([python(0, STUBBORN_FAMILY, tmp_path)], on_output=full_disk, grace_seconds=0.1)
    assert not any(psutil.pid_exists(int(path.name)) for path in tmp_path.iterdir())


@pytest.mark.slow
def test_a_screen_that_stands_still_hides_no_failure():
    """The reader waits for ever in the callback, as for a terminal after Ctrl-S."""
    stands_still = threading.Event()
    try:
        outcome = run(
            [python(0, "print('x' * 300_000); import time; time.sleep(600)"), python(1, "1/0")],
            on_output=lambda *_: stands_still.wait(60),
            grace_seconds=0.1,
        )
    finally:
        stands_still.set()
    assert outcome.culprit.worker == 1


def guardian_of(job):
    (worker,) = job._workers
    wait_for(lambda: worker.listen() and worker.pid, "the reaper to say whom it has started")
    return psutil.Process(worker.pid).parent()


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no reapers")
def test_a_killed_reaper_takes_its_worker_and_its_family_along(tmp_path):
    """Story: a child in a session of its own outlived it."""
    with Job([python(0, STUBBORN_FAMILY, tmp_path)], grace_seconds=600) as job:
        processes = family(tmp_path)
        guardian_of(job).kill()
        outcome = job.wait()
        assert survivors(processes) == []
    assert outcome.culprit.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no reapers")
def test_a_reaper_whose_second_is_killed_goes_on(tmp_path):
    with Job([python(0, STUBBORN_FAMILY, tmp_path)], grace_seconds=0.1) as job:
        processes = family(tmp_path)
        job._workers[0].reaper.kill()
        job._workers[0].reaper.wait()
        assert len(survivors(processes)) == 3 and not job._all_ended()
        job.stop()
    assert survivors(processes) == []


def test_a_reaper_that_does_not_answer_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("tfparallel.cluster.launcher.supervisor._GUARDIAN_SECONDS", 0.2)
    with Job([python(0, STUBBORN_FAMILY, tmp_path)], grace_seconds=0.1) as job:
        processes = family(tmp_path)
        guardian_of(job).suspend()
    wait_for(lambda: survivors(processes) == [], "the worker and its family to end")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no cores")
def test_cores():
    core = min(os.sched_getaffinity(0))
    output = Output()
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    run([python(0, code, cores=[core]), python(1, code)], on_output=output)
    assert output[0, "stdout"].decode() == f"[{core}]\n"
    assert output[1, "stdout"].decode() == f"{sorted(os.sched_getaffinity(0))}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_starts_as_from_a_shell():
    code = (
        "import os, signal, sys\n"
        "print(sys.stdin.read() == '', os.getpgrp() == os.getpid(),\n"
        "      signal.getsignal(signal.SIGINT) is signal.default_int_handler,\n"
        # The last is that of the listing itself: no descriptor of the launcher leaks.
        "      sorted(os.listdir('/proc/self/fd')))\n"
    )
    output = Output()
    run([python(0, code)], on_output=output)
    assert output[0, "stdout"] == b"True True True ['0', '1', '2', '3']\n"


def test_a_closed_pipe_ends_its_writer_quietly():
    """Python ignores SIGPIPE; handed down, that would have `yes` complain."""
    output = Output()
    run([Program(0, ["sh", "-c", "yes | head -n 1"], os.environ)], on_output=output)
    assert (output[0, "stdout"], output[0, "stderr"]) == (b"y\n", b"")


def test_a_command_that_is_not_there():
    outcome = run([Program(0, ["/no/such/program"], os.environ)])
    assert outcome.culprit.returncode == 127
    assert outcome.culprit.tail == (
        "Cannot run '/no/such/program': No such file or directory.",
    )


# Of a user who may have as many processes as the argument says.
LIMITED = """
import os, resource, sys, time
from tfparallel.cluster.launcher.worker_process import Program, WorkerProcess
resource.setrlimit(resource.RLIMIT_NPROC, (int(sys.argv[1]),) * 2)
try:
    worker = WorkerProcess(Program(0, ["true"], os.environ))
except OSError as error:
    raise SystemExit(str(error))
while worker.listen():
    time.sleep(0.01)
sys.stderr.buffer.write(worker.reaper.stderr.read())
worker.close()
sys.exit(worker.returncode)
"""


@pytest.mark.parametrize(("num_processes", "code"), [(1, 1), (2, 127), (3, 127), (4, 0)])
def test_a_full_process_table_is_named(num_processes, code):
    """Story: the launcher said that memory ran out."""
    new_user = ["setpriv", f"--ruid={1_000_000 + os.getpid()}", "--bounding-set"]
    new_user.append("-sys_admin,-sys_resource")  # They lift the limit.
    try:
        subprocess.run([*new_user, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root on Linux becomes a user without processes")
    done = subprocess.run(
        [*new_user, sys.executable, "-c", LIMITED, str(num_processes)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    if code:
        assert done.stderr.startswith(
            "Cannot start 'true': Resource temporarily unavailable. Each worker needs three "
            "processes, and the user or the container has too many."
        )


# In a process namespace of its own, a stranger gets the number of a worker that has ended, while
# its reaper waits for the child that it left.
NUMBER_TAKEN = """
import os, pathlib, subprocess, sys, time
from tfparallel.cluster.launcher.worker_process import Program, WorkerProcess

leaves = "import subprocess; subprocess.Popen(['sleep', '0.5'], start_new_session=True)"
worker = WorkerProcess(Program(0, [sys.executable, "-c", leaves], os.environ))
while worker.returncode is None:
    worker.listen()
    time.sleep(0.01)
while os.path.exists(f"/proc/{worker.pid}"):
    time.sleep(0.01)
pathlib.Path("/proc/sys/kernel/ns_last_pid").write_text(str(worker.pid - 1))
stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
assert stranger.pid == worker.pid, (stranger.pid, worker.pid)
while worker.listen():
    time.sleep(0.01)
worker.close()
assert stranger.poll() is None, stranger.returncode
stranger.kill()
"""


def test_who_gets_the_number_of_an_ended_worker_lives():
    alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user or system makes no process namespaces")
    done = subprocess.run(
        [*alone, sys.executable, "-c", NUMBER_TAKEN], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
