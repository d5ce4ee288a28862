"""The process manager's part of an MPI job, as its clients see it: sockets, no MPI."""

import concurrent.futures
import contextlib
import resource
import socket
import time

import pytest

from tests.cluster.processes import wait_for
from tfparallel.cluster import acceptor, pmi

TOKEN = "secret"


@pytest.fixture(name="server")
def start_server():
    server = pmi.Server("127.0.0.1", ["a", "a", "b"], TOKEN)
    server.start()
    yield server
    server.close()


def client(server, worker, role="pmi", token=TOKEN):
    connected = pmi.connect(("127.0.0.1", server.port), token, worker, role, 5)
    connected.settimeout(5)
    return connected


def ask(connected, line):
    connected.sendall(line.encode() + b"\n")
    return connected.makefile("rb").readline().decode().strip()


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aa", "(vector,(0,1,2))"),
        ("aab", "(vector,(0,1,2),(1,1,1))"),
        ("aba", "(vector,(0,1,1),(1,1,1),(0,1,1))"),
    ],
)
def test_which_worker_runs_where_in_mpis_notation(hosts, expected):
    assert pmi.process_mapping(list(hosts)) == expected


def test_what_one_puts_all_get_behind_the_barrier(server):
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(client(server, worker)) for worker in range(3)]
        assert "rc=0" in ask(clients[0], "cmd=init pmi_version=1 pmi_subversion=1")
        put = "cmd=put kvsname=x key=address-0 value=tcp://1#2=3"
        assert ask(clients[0], put) == "cmd=put_result rc=0 msg=success"
        for one in clients[:2]:
            one.sendall(b"cmd=barrier_in\n")
        clients[0].settimeout(0.05)
        with pytest.raises(TimeoutError):
            clients[0].recv(100)  # The third is not there yet.
        clients[0].settimeout(5)
        assert ask(clients[2], "cmd=barrier_in") == "cmd=barrier_out rc=0"
        assert clients[0].recv(100) == b"cmd=barrier_out rc=0\n"
        answer = ask(clients[2], "cmd=get kvsname=x key=address-0")
        assert answer == "cmd=get_result rc=0 msg=found value=tcp://1#2=3"
        assert "rc=-1" in ask(clients[2], "cmd=get kvsname=x key=other")
        assert "rc=-1" in ask(clients[2], "cmd=spawn")


@pytest.mark.parametrize("line", [b"SSH-2.0-x", b"\xff\xfe", b"[1]", b"{}", b"[" * 60000])
def test_a_listener_that_is_no_server_is_told(line):
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        joining = pool.submit(pmi.connect, other.getsockname(), TOKEN, 1, "pmi", 5)
        with other.accept()[0] as caller:
            caller.sendall(line + b"\n")
            with pytest.raises(OSError, match="not worker 0 of this job"):
                joining.result(10)


def test_two_jobs_never_share_a_name():
    names = set()
    for _ in range(2):
        server = pmi.Server("127.0.0.1", ["a"], TOKEN)
        server.start()
        with client(server, 0) as connected:
            names.add(ask(connected, "cmd=get_my_kvsname"))
        server.close()
    assert len(names) == 2


@pytest.mark.parametrize("line", ["no command", "x" * 2**17])
def test_an_unknown_command_closes_the_connection(server, line):
    with client(server, 0) as connected:
        with contextlib.suppress(ConnectionError):
            assert ask(connected, line) == ""
    with client(server, 0) as connected:
        assert "rc=0" in ask(connected, "cmd=get_my_kvsname")


@pytest.mark.parametrize(
    ("worker", "token"), [(0, "guessed"), (3, TOKEN), (-1, TOKEN), (True, TOKEN), ("0", TOKEN)]
)
def test_who_does_not_belong_does_not_come_in(server, worker, token):
    with pytest.raises(ConnectionError):
        pmi.connect(("127.0.0.1", server.port), token, worker, "pmi", 0.5)
    with client(server, 0) as connected:
        assert "rc=0" in ask(connected, "cmd=get_my_kvsname")


def test_a_secret_is_not_shown_and_a_proof_lets_nobody_in_twice(server):
    """A stranger stands between a worker and the server."""
    with socket.create_server(("127.0.0.1", 0)) as between:
        address = between.getsockname()
        with concurrent.futures.ThreadPoolExecutor() as pool:
            joining, heard = pool.submit(pmi.connect, address, TOKEN, 1, "pmi", 5), []
            with (
                between.accept()[0] as worker,
                socket.create_connection(("127.0.0.1", server.port), 5) as there,
            ):
                for _ in range(2):
                    heard.append(worker.recv(1000))
                    there.sendall(heard[-1])
                    worker.sendall(there.recv(1000))
                joining.result(5).close()
    assert TOKEN.encode() not in b"".join(heard)
    with socket.create_connection(("127.0.0.1", server.port), 5) as again:
        again.sendall(b"".join(heard))
        assert b"welcome" not in again.makefile("rb").read()


@pytest.mark.parametrize("num_strangers", [400, pytest.param(1200, marks=pytest.mark.slow)])
def test_strangers_are_few_and_none_stays_for_long(server, monkeypatch, num_strangers):
    """Up to more than a process may have files open."""
    monkeypatch.setattr(acceptor, "GREETING_SECONDS", 1.0)
    with contextlib.ExitStack() as stack:
        belongs = stack.enter_context(client(server, 1))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for number in range(num_strangers):
            stranger = socket.create_connection(("127.0.0.1", server.port), 5)
            stack.enter_context(stranger)
            if number % 3:
                stranger.sendall([b"{", b"[1, 2]\n"][number % 3 - 1])
        # It is served last, behind all that came before.
        late = stack.enter_context(client(server, 0))
        assert len(server.acceptor._strangers) <= 256 + 6
        assert "rc=0" in ask(late, "cmd=get_my_kvsname")
        deadline = time.monotonic() + 20
        while server.acceptor._strangers:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "rc=0" in ask(belongs, "cmd=get_my_kvsname")


def test_all_watches_learn_who_has_ended():
    server = pmi.Server("127.0.0.1", ["a", "a", "b", "b"], TOKEN)
    server.start()
    watches = [pmi.Watch(client(server, worker, "watch")) for worker in (0, 2)]
    for watch in watches:
        watch._socket.settimeout(None)
        watch.start()
    both = [client(server, worker, "watch") for worker in (1, 3)]
    time.sleep(0.1)
    assert [watch.lost for watch in watches] == [(), ()]
    for number, ending in enumerate(both, 1):
        ending.shutdown(socket.SHUT_RDWR)
        ending.close()
        wait_for(lambda n=number: [len(watch.lost) for watch in watches] == [n, n], "the news")
    late = pmi.Watch(client(server, 0, "watch"))
    late._socket.settimeout(None)
    late.start()
    wait_for(lambda: late.lost == (1, 3), "what happened before")
    server.close()
    for watch in (*watches, late):
        watch.join(5)
        assert watch.lost == (1, 3, 0)


def test_a_watch_whose_server_ends_has_lost_worker_0():
    server = pmi.Server("127.0.0.1", ["a", "a"], TOKEN)
    server.start()
    watch = pmi.Watch(client(server, 1, "watch"))
    watch.start()
    server.close()
    watch.join(5)
    assert watch.lost == (0,)
