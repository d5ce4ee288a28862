"""A server of a job on one host is not reached from another, from its first moment on."""

import contextlib
import errno
import os
import socket
import subprocess
import sys

import pytest

from tests.hosts.network import hosts
from tfparallel.cluster import loopback
from tfparallel.cluster.loopback import (
    are_loopback,
    loopback_only,
    moved_to_loopback,
    network_name,
)
from tfparallel.cluster.ports import free_ports
from tfparallel.join_job import serving

PORT = 29_557
# As TensorFlow listens: on all addresses, and at a port that is shared if its variable says so.
SERVER = f"""
import os, socket, sys, time
from tfparallel.cluster.loopback import loopback_only
def answered(host):
    with socket.create_connection((host, {PORT}), 5) as caller:
        return server.accept() is not None
with loopback_only({PORT}) as problems:
    server = socket.socket(socket.AF_INET6)
    assert os.environ["TF_GRPC_REUSE_PORT"] == "1"
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    server.bind(("::", {PORT}))
    server.listen()
    print("started", flush=True)
    sys.stdin.readline()
assert "TF_GRPC_REUSE_PORT" not in os.environ and problems == []
assert answered("127.0.0.1") and answered("::1")
print("is bound", flush=True)
sys.stdin.readline()
server.settimeout(0.2)
try:
    print("came:", server.accept()[1])
except TimeoutError:
    print("nobody came")
"""
CALLS = f"""
import socket, sys
for _ in range(20):
    try:
        socket.create_connection(("10.78.0.1", {PORT}), float(sys.argv[1])).close()
        print("connected")
    except OSError as error:
        print(error)
"""


@pytest.mark.slow
def test_another_host_is_refused_at_the_start_and_later():
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(hosts(2))
        except RuntimeError as error:
            pytest.skip(str(error))

        def call(seconds):
            command = network.command(1, sys.executable, "-c", CALLS, str(seconds))
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            return done.stdout.splitlines()

        server = stack.enter_context(
            subprocess.Popen(
                network.command(0, sys.executable, "-c", SERVER),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(server.kill)
        assert server.stdout.readline() == "started\n"
        assert call(0.1) == ["timed out"] * 20
        print(file=server.stdin, flush=True)
        assert server.stdout.readline() == "is bound\n"
        assert call(5) == ["[Errno 111] Connection refused"] * 20
        assert server.communicate("\n", timeout=20)[0] == "nobody came\n"


def test_a_socket_that_cannot_be_bound_is_told():
    (port,) = free_ports(1)
    with loopback_only(port) as problems:
        pass
    assert problems == [
        "is open to other hosts and has no authentication; its socket was not found"
    ]
    assert "TF_GRPC_REUSE_PORT" not in os.environ


@contextlib.contextmanager
def listening_inside(port):
    """As TensorFlow's server does."""
    with contextlib.ExitStack() as stack, loopback_only(port) as problems:
        server = stack.enter_context(socket.socket())
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("0.0.0.0", port))
        server.listen()
        yield problems, stack.pop_all()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's /proc")
def test_no_descriptor_of_a_file_or_a_pipe_stays_open(tmp_path):
    (port,) = free_ports(1)
    pipe = os.pipe()
    with open(tmp_path / "file", "w"):
        before = len(os.listdir("/proc/self/fd"))
        with loopback_only(port):
            pass
        assert len(os.listdir("/proc/self/fd")) == before
    for end in pipe:
        os.close(end)


def test_a_port_that_was_open_for_a_moment_is_told(monkeypatch):
    def refuse(port, stack):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    (port,) = free_ports(1)
    monkeypatch.setattr(loopback, "_guards", refuse)
    with listening_inside(port) as (problems, server):
        pass
    with server:
        if "cannot be bound" in str(problems):
            pytest.skip("this system does not let a socket be bound to a device")
        (problem,) = problems
    assert problem.startswith("was open to other hosts for a moment")
    assert problem.endswith("(the port could not be guarded: Operation not permitted)")


@pytest.mark.parametrize(
    ("other", "user_value", "expected"),
    [("127.0.0.1", None, "lo"), ("127.0.0.1", "eth1", "eth1"), ("10.0.0.1", None, None)],
    ids=["one host", "the user's own", "two hosts"],
)
def test_nccl_listens_where_tensorflow_does(other, user_value, expected, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", user_value or "")
    if user_value is None:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    our_port, their_port = free_ports(2)
    with serving([f"127.0.0.1:{our_port}", f"{other}:{their_port}"], 0):
        assert os.environ.get("NCCL_SOCKET_IFNAME") == expected


def test_which_addresses_are_the_loopbacks():
    assert are_loopback(["127.0.0.1:1", "localhost:2", "[::1]:3", "127.0.1.1:4"])
    assert not are_loopback(["127.0.0.1:1", "10.0.0.1:2"])
    assert moved_to_loopback(["[::1]:1", "node-a:2"]) == ["[::1]:1", "127.0.0.1:2"]


@pytest.mark.skipif(not os.path.exists("/proc/self/ns/net"), reason="needs Linux's /proc")
def test_a_network_has_a_name_where_an_address_of_this_host_is_all_that_is_named():
    host = socket.gethostname()
    try:
        socket.getaddrinfo(host, 0)
    except OSError:
        host = "127.0.0.1"
    name = network_name([f"{host}:1", f"{host}:2"])
    assert name is not None and name == network_name([f"{host}:3"])
    assert network_name([f"{host}:1", "192.0.2.1:2"]) is None
    assert network_name(["192.0.2.1:1", "192.0.2.1:2"]) is None
    assert network_name(["no-such-host.invalid:1"]) is None
