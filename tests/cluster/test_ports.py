"""Ports that are free, and differ; and whose a port is, with real sockets of real processes."""

import os
import socket
import subprocess
import sys

import pytest

from tfparallel.cluster import ports
from tfparallel.cluster.ports import free_ports

HOLDER = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""
LAUNCHER = """
import sys
from tfparallel.cluster import ports
ports._RANGE = [int(port) for port in sys.argv[1:]]
print(*ports.free_ports(1))
"""
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the owner is read from /proc")


@pytest.fixture
def holder(request):
    """Another process that listens; gives its pid and port."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, getattr(request, "param", "127.0.0.1"), "a mark"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def test_ports_differ_and_can_be_bound():
    numbers = free_ports(50)
    assert len(set(numbers)) == 50
    for port in numbers:
        # Below the ports of outgoing connections.
        assert 20000 <= port < 32768
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_port_in_use_is_passed_over(monkeypatch):
    monkeypatch.setattr(ports, "_reserve", lambda port: None)
    taken, free = sorted(free_ports(2))
    monkeypatch.setattr(ports, "_RANGE", [taken, free])
    monkeypatch.setattr(ports, "_NUM_TRIES", 1)
    with socket.create_server(("127.0.0.1", taken)):
        assert free_ports(1) == [free]
        with socket.create_server(("127.0.0.1", free)):
            # None is left there: the system names one.
            (port,) = free_ports(1)
            assert port not in (0, taken, free)


@on_linux
def test_two_launchers_never_find_the_same_port(monkeypatch):
    """Story: a worker imports TensorFlow before it listens; another job had its port by then."""
    numbers = [*free_ports(2)]
    monkeypatch.setattr(ports, "_RANGE", numbers)
    command = [sys.executable, "-c", LAUNCHER, *map(str, numbers)]
    other = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert {*numbers}.isdisjoint([other, *free_ports(2)])
    monkeypatch.setattr(ports, "_RESERVED_SECONDS", 0.0)
    assert {*free_ports(2)} == {*numbers}


@on_linux
@pytest.mark.parametrize("holder", ["127.0.0.1", "127.0.0.2", "0.0.0.0"], indirect=True)
def test_names_the_process(holder):
    pid, port = holder
    assert not ports.is_free(port)
    description = ports.owner(port)
    assert description.startswith(f"process {pid} (")
    assert "\n" not in description and len(description) < 140


@on_linux
def test_names_the_process_of_an_ipv6_socket():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        description = ports.owner(server.getsockname()[1])
        assert description.startswith(f"process {os.getpid()} (")


def test_a_free_port_has_no_owner(holder):
    _, port = holder
    assert ports.owner(port) is not None
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        free = chosen.getsockname()[1]
    assert ports.is_free(free)
    assert ports.owner(free) is None


def test_a_closing_connection_leaves_the_port_free():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as near:
            far, _ = listener.accept()
            # Whoever hangs up first stays behind in TIME_WAIT, here on the server's port.
            far.close()
            assert near.recv(1) == b""
    assert ports.is_free(port)
    assert ports.owner(port) is None
    socket.create_server(("", port)).close()


def test_degrades_without_proc(holder, monkeypatch):
    _, port = holder
    monkeypatch.setattr(ports, "_TABLES", ("/nowhere/tcp",))
    assert ports.owner(port) == "another process"
