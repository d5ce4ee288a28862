"""What another host can reach of a job."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.commands.command_line import ROOT

from .network import hosts

pytestmark = pytest.mark.slow
DEADLINE_SECONDS = 120
PORTS = (29_561, 29_562)
PROGRAM = """
import time
import tfparallel
tfparallel.init()
print("up", tfparallel.Cluster.from_env().worker_index, flush=True)
time.sleep(60)
"""
# Calls all ports over and over, from before the job starts until it is told to end, as gRPC does.
CALLS = """
import select, socket, sys
host, *ports = sys.argv[1:]
print("calling", flush=True)
greeting = b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
tries = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    for port in map(int, ports):
        tries += 1
        try:
            with socket.create_connection((host, port), 0.05) as caller:
                caller.sendall(greeting)
                caller.settimeout(0.5)
                if answer := caller.recv(100):
                    print(port, "answers", answer)
        except OSError:
            pass
print("tries:", tries)
"""
TWENTY = """
import socket, sys
host, *ports = sys.argv[1:]
for port in map(int, ports):
    for _ in range(20):
        try:
            socket.create_connection((host, port), 5).close()
            print("connected to", port)
        except ConnectionRefusedError:
            print("refused")
"""


@pytest.fixture(name="two")
def two_hosts():
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(hosts(2))
        except RuntimeError as error:
            pytest.skip(str(error))


class Processes:
    """Those of a test."""

    def __init__(self, stack, folder):
        self._stack, self._folder, self._number = stack, folder, 0

    def start(self, command, end=signal.SIGKILL, **options):
        """Starts a process, which ends by a signal; returns it, and the file of what it says."""
        self._number += 1
        path = self._folder / f"output_{self._number}"
        output = self._stack.enter_context(open(path, "wb"))
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=output, stderr=output, **options
        )
        self._stack.callback(process.wait, 20)
        self._stack.callback(process.send_signal, end)
        return process, path


@pytest.fixture(name="processes")
def started_processes(tmp_path):
    with contextlib.ExitStack() as stack:
        yield Processes(stack, tmp_path)


def until(path, *texts):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not all(text in path.read_text() for text in texts):
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.1)


def listening(network):
    """The ports at which something listens on host 0."""
    command = network.command(0, "cat", "/proc/net/tcp", "/proc/net/tcp6")
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in table.splitlines() if " 0A " in line]
    return sorted({int(fields[1].rpartition(":")[2], 16) for fields in lines})


def test_nothing_of_a_job_on_one_host_is_reached_from_another(two, processes):
    """By default workers sum through MPI, which listens, too."""
    launch = ["launch", "--nproc_per_node=2", "--"]
    command = [sys.executable, "-m", "tfparallel", *launch, sys.executable, "-c", PROGRAM]
    _, said = processes.start(two.command(0, *command), end=signal.SIGTERM)
    until(said, "up 0", "up 1")
    assert "open to other hosts" not in said.read_text()
    ports = listening(two)
    assert len(ports) >= 2
    tries = two.command(1, sys.executable, "-c", TWENTY, two.addresses[0], *ports)
    done = subprocess.run(tries, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["refused"] * 20 * len(ports), done.stdout


def test_workers_of_one_host_use_its_loopback_whatever_its_address(two, processes):
    """Started by TF_CONFIG; a stranger calls from before the first moment on."""
    calls, heard = processes.start(
        two.command(1, sys.executable, "-c", CALLS, two.addresses[0], *PORTS)
    )
    until(heard, "calling")
    workers = [f"{two.addresses[0]}:{port}" for port in PORTS]
    said = []
    for index in range(2):
        task = {"type": "worker", "index": index}
        config = json.dumps({"cluster": {"worker": workers}, "task": task})
        environment = os.environ | {"TF_CONFIG": config, "TFPARALLEL_ALL_REDUCE": "tensorflow"}
        command = two.command(0, sys.executable, "-c", PROGRAM)
        said.append(processes.start(command, env=environment)[1])
    for index, path in enumerate(said):
        until(path, f"up {index}")
        assert "open to other hosts" not in path.read_text()
    assert listening(two) == list(PORTS)
    time.sleep(2)
    calls.communicate(b"end\n", timeout=20)
    # Before TensorFlow starts the workers meet at these ports, and hang up on strangers.
    assert re.fullmatch(r"calling\ntries: \d{3,}\n", heard.read_text()), heard.read_text()
