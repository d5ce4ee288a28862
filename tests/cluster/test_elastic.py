"""Launchers of a job whose number of hosts changes, all on this host, with small programs."""

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading

import psutil
import pytest

from tests.cluster.processes import wait_for
from tests.commands.command_line import ROOT
from tfparallel.cluster.ports import free_ports, is_free
from tfparallel.cluster.wire import Secret, Session

DEADLINE_SECONDS = 60

# Works until the folder of its first argument has a file; saves nothing, as is asked of it.
WORK = """
import os, pathlib, signal, sys, time
names = ("RANK", "WORLD_SIZE", "TFPARALLEL_RESTART_COUNT")
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: sys.exit(75))
print("worker {} of {}, attempt {}".format(*(os.environ[name] for name in names)), flush=True)
while not any(pathlib.Path(sys.argv[1]).iterdir()):
    time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def shared_secret(monkeypatch):
    """What the launchers of several hosts know each other by."""
    monkeypatch.setenv("TFPARALLEL_JOB_TOKEN", "a-secret-of-the-tests")


class Launcher:
    """A launcher, and what it has said so far."""

    def __init__(self, endpoint, nnodes, code, *arguments, flags=()):
        launch = ["-m", "tfparallel", "launch", f"--nnodes={nnodes}", f"--rdzv_endpoint={endpoint}"]
        self.process = subprocess.Popen(
            [sys.executable, *launch, *flags, "--", sys.executable, "-c", code, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""
        self._lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def until(self, pattern):
        """Waits for a line, and returns what matches."""
        while (line := self._lines.get(timeout=DEADLINE_SECONDS)) is not None:
            self.said += line
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"it never said {pattern!r}: {self.said}")

    def end(self):
        """Its exit code."""
        while (line := self._lines.get(timeout=DEADLINE_SECONDS)) is not None:
            self.said += line
        return self.process.wait(DEADLINE_SECONDS)


@pytest.fixture(name="endpoint")
def free_endpoint():
    (port,) = free_ports(1)
    return f"127.0.0.1:{port}"


@pytest.fixture(name="start")
def start_launchers(endpoint):
    launchers = []

    def start(nnodes, code, *arguments, at=endpoint, flags=()):
        launchers.append(Launcher(at, nnodes, code, *map(str, arguments), flags=flags))
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.process.terminate()
    for launcher in launchers:
        launcher.process.wait(DEADLINE_SECONDS)
        launcher.process.stdout.close()


def places(launchers, of, attempt):
    """The ranks of their workers, in a round of so many."""
    matches = [launcher.until(rf"worker (\d) of {of}, attempt {attempt}") for launcher in launchers]
    return sorted(int(place[1]) for place in matches)


@pytest.mark.slow
def test_it_goes_on_with_fewer_and_with_more(start, tmp_path):
    """Of three the one is killed that listens, and had worker 0; then two more come."""
    first = start("2:3", WORK, tmp_path)
    others = [start("2:3", WORK, tmp_path) for _ in range(2)]
    assert places([first, *others], of=3, attempt=0) == [0, 1, 2]
    chief = next(each for each in (first, *others) if "worker 0 of 3" in each.said)
    remaining = [each for each in (first, *others) if each is not chief]
    chief.process.kill()
    assert places(remaining, of=2, attempt=1) == [0, 1]
    more = start("2:3", WORK, tmp_path)
    assert places([*remaining, more], of=3, attempt=2) == [0, 1, 2]
    assert "worker 2 of 3" in more.said  # Who was there keeps its place.
    (tmp_path / "end").touch()
    assert [each.end() for each in (*remaining, more)] == [0, 0, 0]
    for each in remaining:
        assert "the launcher of node 0 is lost" in each.said
        assert "a new host is joining; the workers were asked to save their state" in each.said


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_host_that_is_told_to_end_leaves(start, tmp_path, signum):
    """Its exit code says that it may come again."""
    launchers = [start("1:2", WORK, tmp_path) for _ in range(2)]
    places(launchers, of=2, attempt=0)
    launchers[1].process.send_signal(signum)
    assert places(launchers[:1], of=1, attempt=1) == [0]
    assert launchers[1].end() == 75
    (tmp_path / "end").touch()
    assert launchers[0].end() == 0


FAIL_ON_ONE = """
import os, sys, time
if os.environ["RANK"] == "1" and os.environ["WORLD_SIZE"] == "3": time.sleep(0.3); sys.exit(3)
time.sleep(600 * (os.environ["WORLD_SIZE"] == "3"))
"""


@pytest.mark.slow
def test_a_host_whose_workers_fail_leaves(start):
    """Nobody waits for it; the others are enough."""
    launchers = [start("2:3", FAIL_ON_ONE) for _ in range(3)]
    codes = [launcher.end() for launcher in launchers]
    assert sorted(codes) == [0, 0, 3]
    failed = launchers[codes.index(3)]
    assert (
        "worker 1 exited with code 3" in failed.said and "this host leaves the job" in failed.said
    )


FAIL_FIRST = """
import os, sys, time
attempt = os.environ["TFPARALLEL_RESTART_COUNT"]
print("worker of", os.environ["WORLD_SIZE"], "attempt", attempt)
if attempt == "0": time.sleep(0.3) if os.environ["RANK"] == "1" else time.sleep(600); sys.exit(3)
"""


@pytest.mark.slow
def test_a_host_may_fail_as_often_as_it_may(start):
    launchers = [start("1:2", FAIL_FIRST, flags=["--max_restarts=1"]) for _ in range(2)]
    for launcher in launchers:
        assert launcher.end() == 0
        assert "worker of 2 attempt 1" in launcher.said


FAIL = "import sys; sys.exit(3)"


@pytest.mark.slow
def test_after_a_newcomer_fails_the_next_one_waits(start, tmp_path):
    running = start("1:2", WORK, tmp_path)
    running.until("worker 0 of 1, attempt 0")
    assert start("1:2", FAIL).end() == 3
    running.until("node 1 had just joined; new hosts must wait 10 s")
    assert places([running], of=1, attempt=2) == [0]
    waiting = start("1:2", WORK, tmp_path)
    assert places([running, waiting], of=2, attempt=3) == [0, 1]
    (tmp_path / "end").touch()
    assert running.end() == waiting.end() == 0


@pytest.mark.parametrize(
    ("code", "expected"), [(3, [3, 3]), (2, [2, 2])], ids=["too few are left", "of usage"]
)
def test_a_failure_that_ends_the_job_ends_it_at_once(start, code, expected):
    fail = f"import os, sys, time; time.sleep(600 * (os.environ['RANK'] == '1')); sys.exit({code})"
    nnodes = "2:2" if code == 3 else "1:2"
    launchers = [start(nnodes, fail) for _ in range(2)]
    assert [launcher.end() for launcher in launchers] == expected
    if code == 3:
        said = "".join(launcher.said for launcher in launchers)
        assert "--nnodes=2:2, but only 1 host would be left" in said


@pytest.mark.slow
def test_too_few_hosts_are_waited_for_and_told(start, tmp_path):
    launchers = [start("2:2", WORK, tmp_path, flags=["--start_timeout=2"]) for _ in range(2)]
    places(launchers, of=2, attempt=0)
    launchers[0].process.kill()
    assert launchers[1].end() == 1
    assert "The job has 1 host after 2 s at 127.0.0.1:" in launchers[1].said
    assert "--nnodes=2:2 requires 2" in launchers[1].said


def until_it_waits(launcher, endpoint):
    """Until it has called at the endpoint, and a moment longer."""
    port = int(endpoint.rpartition(":")[2])

    def has_called():
        connections = psutil.Process(launcher.process.pid).net_connections("tcp")
        return any(each.raddr and each.raddr.port == port for each in connections)

    wait_for(has_called, "a call")
    with pytest.raises(queue.Empty):
        launcher._lines.get(timeout=0.5)


@pytest.mark.slow
def test_who_waits_is_told_that_the_job_has_ended(start, endpoint, tmp_path):
    running = start("1:1", WORK, tmp_path)
    running.until("worker 0 of 1")
    waiting = start("1:1", WORK, tmp_path)
    until_it_waits(waiting, endpoint)
    (tmp_path / "end").touch()
    assert running.end() == waiting.end() == 0
    assert "the job has ended" in waiting.said and "worker" not in waiting.said


@pytest.mark.slow
def test_who_waits_takes_the_place_of_one_that_is_lost(start, endpoint, tmp_path):
    launchers = [start("2:2", WORK, tmp_path) for _ in range(2)]
    places(launchers, of=2, attempt=0)
    spare = start("2:2", WORK, tmp_path)
    until_it_waits(spare, endpoint)
    launchers[1].process.kill()
    assert places([launchers[0], spare], of=2, attempt=1) == [0, 1]


@pytest.mark.parametrize("other", ["1:3", "2"])
def test_other_numbers_are_refused(start, tmp_path, other):
    running = start("1:1", WORK, tmp_path)
    running.until("worker 0 of 1")
    flags = ["--node_rank=1", "--start_timeout=10"] if other == "2" else []
    refused = start(other, WORK, tmp_path, flags=flags)
    assert refused.end() == 1
    assert f"Received: 1:1 on the listening host, {other} here" in refused.said


@pytest.mark.slow  # The first round waits 10 s for a third host.
def test_strangers_start_no_round(start, endpoint, tmp_path):
    """A thousand of them. A third say all that a launcher says, but do not know the secret."""
    running, other = (
        start("1:3", WORK, tmp_path, flags=["--job_name=blobs", "--start_timeout=20"])
        for _ in range(2)
    )
    places([running, other], of=2, attempt=0)
    host, port = endpoint.split(":")
    hello = {"nnodes": [1, 3], "node_rank": None, "attempt": -1, "ports": [1], "master_port": 2}
    hello = json.dumps(hello | {"local_address": None}).encode()
    with contextlib.ExitStack() as silent:
        for number in range(1000):
            stranger = socket.create_connection((host, int(port)), timeout=5)
            silent.enter_context(stranger)
            if number % 3 == 0:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            elif number % 3 == 1:
                stranger.sendall(b'{"job": "blobs", "nonce": "a", "version": 2}\n')
                nonces = ("a", json.loads(stranger.recv(1000))["nonce"])
                session = Session(Secret(""), "blobs", nonces, is_caller=True)
                stranger.sendall(session.sealed(hello))
                assert json.loads(stranger.recv(1000)) == {"refused": "blobs"}
        assert running.process.poll() is None and other.process.poll() is None
    (tmp_path / "end").touch()
    assert running.end() == other.end() == 0
    assert "round 1" not in running.said


def test_the_next_endpoint_takes_over(start, tmp_path):
    """The first is of no host (RFC 5737), as after the loss of one."""
    ports = free_ports(2)
    at = f"192.0.2.1:{ports[0]},127.0.0.1:{ports[1]}"
    launchers = [start("1:2", WORK, tmp_path, at=at) for _ in range(2)]
    assert places(launchers, of=2, attempt=0) == [0, 1]


@pytest.mark.slow
def test_who_listens_at_a_later_endpoint_goes_to_an_earlier_one(start, tmp_path):
    """As two do that began at the same moment, and each found nobody."""
    one, two = free_ports(2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", one))  # Nobody listens there, and nobody can.
        later = start("2:2", WORK, tmp_path, at=f"127.0.0.1:{one},127.0.0.1:{two}")
        wait_for(lambda: not is_free(two), "it to listen")
    earlier = start("2:2", WORK, tmp_path, at=f"127.0.0.1:{one}")
    assert places([later, earlier], of=2, attempt=0) == [0, 1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nnodes=3:2"], "must not be less than the minimum. Received: '3:2'"),
        (["--nnodes=0:2"], "--nnodes: at least 1 host"),
        (["--nnodes=two"], "--nnodes: a number, or MIN:MAX, is required. Received: 'two'"),
        (["--nnodes=1:2"], "Several hosts need --rdzv_endpoint=HOST:PORT"),
        (["--nnodes=1:2", "--rdzv_endpoint=a:1,b"], "must be host:port"),
        (["--nnodes=1:2", "--rdzv_endpoint=a:1", "--node_rank=2"], "must be from 0 to 1"),
        (["--nnodes=1:2", "--num_ps=1", "--rdzv_endpoint=a:1"], "Drop --nnodes"),
    ],
)
def test_flags_that_cannot_be(flags, message):
    done = subprocess.run(
        [sys.executable, "-m", "tfparallel", "launch", *flags, "--", "true"],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 2 and message in done.stderr, done.stderr


@pytest.mark.slow
def test_an_endpoint_of_no_host_is_told(start, tmp_path):
    """Nobody listens there, and nobody can (RFC 5737)."""
    lonely = start("1:2", WORK, tmp_path, at="192.0.2.1:2999", flags=["--start_timeout=1"])
    assert lonely.end() == 1
    assert "A launcher must listen at 192.0.2.1:2999" in lonely.said
    assert "Received: [Errno" in lonely.said
