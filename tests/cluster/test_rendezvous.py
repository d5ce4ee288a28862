"""Launchers of several hosts meet; who is missing or in the way is named."""

import concurrent.futures
import contextlib
import errno
import itertools
import json
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import time

import pytest

from tests.cluster.test_worker_rendezvous import name_of_the_loopback
from tfparallel.cluster import rendezvous, wire
from tfparallel.cluster.address import join_address, split_address
from tfparallel.cluster.connection import Connection, run
from tfparallel.cluster.control_channel import ControlChannel
from tfparallel.cluster.launcher.supervisor import Job, Program, StopRequest
from tfparallel.cluster.listener import is_loopback_here_only
from tfparallel.cluster.ports import free_ports
from tfparallel.cluster.rendezvous import meet
from tfparallel.cluster.wire import Secret, Session, encoded, unproved
from tfparallel.cluster.worker_exit import Departure


def start(pool, endpoint, node, **changes):
    arguments = {
        "nnodes": 2,
        "node_rank": node,
        "ports": [1000 * (node + 1), 1000 * (node + 1) + 1],
        "master_port": 99,
        "attempt": 0,
        "token": "right",
        "job": "blobs",
        "timeout_seconds": 20,
    }
    return pool.submit(meet_and_leave, endpoint, **(arguments | changes))


def meet_and_leave(*arguments, **keywords):
    meeting = meet(*arguments, **keywords)
    meeting.news.close()
    return meeting


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def endpoint():
    (port,) = free_ports(1)
    return f"127.0.0.1:{port}"


def test_another_version_is_named_by_both(endpoint, pool, monkeypatch):
    host = start(pool, endpoint, 0, timeout_seconds=3)
    with until_it_listens(endpoint) as older:
        older.sendall(b'{"job": "blobs", "nonce": "a"}\n')
        assert json.loads(older.makefile("rb").readline()) == {"refused": "blobs"}
    with pytest.raises(RuntimeError, match="different version of tfparallel"):
        host.result(30)
    near, there = connected()
    with there, Connection(near) as caller:
        there.sendall(b'{"job": "blobs", "nonce": "b"}\n')
        with pytest.raises(wire.RefusedError, match="there has a different version of tfparallel"):
            run(caller.introduce(Secret("right"), "blobs"))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_learn_the_same(pool, endpoint, order):
    calls = []
    for node in order:
        calls.append(start(pool, endpoint, node, nnodes=3, ports=[node + 1] * (node + 1)))
        time.sleep(0.1)
    first, *others = [call.result(30) for call in calls]
    assert all(other == first for other in others)
    assert first.addresses == (
        ("127.0.0.1:1",),
        ("127.0.0.1:2",) * 2,
        ("127.0.0.1:3",) * 3,
    )
    assert first.master == "127.0.0.1:99" and len(first.token) == 32


def test_a_node_says_how_it_is_reached(pool, endpoint):
    port = split_address(endpoint)[1]
    # As behind a gateway, or with an address for each of several networks.
    calls = [
        start(pool, f"gateway.invalid:{port}", 0, local_address="127.0.0.1"),
        start(pool, endpoint, 1, local_address="node-b.cluster"),
    ]
    assert calls[0].result(30) == calls[1].result(30)
    assert calls[0].result().addresses == (
        ("127.0.0.1:1000", "127.0.0.1:1001"),
        ("node-b.cluster:2000", "node-b.cluster:2001"),
    )
    assert calls[0].result().master == "127.0.0.1:99"


def test_node_0_behind_a_gateway_listens_on_its_own_addresses(pool, endpoint):
    port = split_address(endpoint)[1]
    # An address for documentation (RFC 5737): no host has it.
    first = start(pool, f"192.0.2.1:{port}", 0, local_address="192.0.2.1")
    assert start(pool, endpoint, 1).result(30) == first.result(30)
    assert first.result().addresses[0] == ("192.0.2.1:1000", "192.0.2.1:1001")


def test_node_0_that_knows_its_own_name_as_a_loopback_is_reached_from_other_hosts(pool, endpoint):
    """Debian writes `127.0.1.1 name` into /etc/hosts; the others connect to another address."""
    name, port = name_of_the_loopback(), split_address(endpoint)[1]
    first = start(pool, f"{name}:{port}", 0, timeout_seconds=5)
    second = start(pool, f"127.0.0.2:{port}", 1, timeout_seconds=5)
    assert second.result(30) == first.result(30)
    assert first.result().addresses[0] == (f"{name}:1000", f"{name}:1001")


@pytest.mark.parametrize(
    ("name", "addresses", "expected"),
    [
        ("node-a", ["127.0.1.1"], True),
        ("node-a", ["127.0.1.1", "::1"], True),
        ("node-a", ["127.0.1.1", "10.0.0.1"], False),
        ("node-a", ["10.0.0.1"], False),
        ("localhost", ["127.0.0.1"], False),
        ("127.0.1.1", ["127.0.1.1"], False),
    ],
)
def test_only_a_name_that_others_resolve_differently_is_listened_for_everywhere(
    name, addresses, expected
):
    places = [(socket.AF_INET, (address, 80)) for address in addresses]
    assert is_loopback_here_only(name, places) == expected


def test_ipv6(pool):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    (port,) = free_ports(1)
    calls = [start(pool, f"[::1]:{port}", node) for node in (0, 1)]
    assert calls[0].result(30) == calls[1].result(30)
    assert calls[0].result().addresses[1] == ("[::1]:2000", "[::1]:2001")
    assert calls[0].result().master == "[::1]:99"


@pytest.mark.slow
def test_missing_nodes_are_named_to_all_who_came(pool, endpoint):
    # Node 2 is there in time, and has time left when node 0 gives up.
    calls = [
        start(pool, endpoint, 0, nnodes=4, timeout_seconds=1),
        start(pool, endpoint, 2, nnodes=4),
    ]
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call.result(30)
        assert "nodes 1, 3 did not connect" in str(caught.value)
        assert "within 1 s; all 4 nodes are required. Received: nodes 0, 2." in str(caught.value)


def test_node_0_is_missing(pool, endpoint):
    with pytest.raises(RuntimeError) as caught:
        start(pool, endpoint, 1, timeout_seconds=0.5).result(30)
    assert "Node 1 waited 0.5 s for node 0's launcher" in str(caught.value)
    assert "Received: connection refused" in str(caught.value)


def test_who_listens_but_never_answers_does_not_hold_us(pool):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(RuntimeError, match="Received: no answer"):
            address = join_address(*silent.getsockname())
            start(pool, address, 1, timeout_seconds=0.5).result(30)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"nnodes": 3}, "agree on --nnodes. Received: 2 on node 0, 3 on node 1"),
        ({"attempt": 1}, "agree on the number of restarts. Received: 0 on node 0, 1 on node 1"),
        ({"node_rank": 5}, "from 0 to 1. Received: --node_rank=5"),
    ],
)
def test_a_contradicting_launcher_fails_and_the_others_wait_on(pool, endpoint, changes, message):
    host = start(pool, endpoint, 0)
    with pytest.raises(RuntimeError, match=message):
        start(pool, endpoint, 1, **changes).result(30)
    assert start(pool, endpoint, 1).result(30) == host.result(30)


@pytest.mark.slow
def test_who_was_turned_away_is_told_at_the_end(pool, endpoint):
    host = start(pool, endpoint, 0, timeout_seconds=3)
    with pytest.raises(RuntimeError, match="agree on --nnodes"):
        start(pool, endpoint, 1, nnodes=3).result(30)
    with pytest.raises(RuntimeError) as caught:
        host.result(30)
    assert "Rejected 127.0.0.1: All nodes must agree on --nnodes." in str(caught.value)


def test_two_nodes_of_one_rank(pool, endpoint):
    """The second is told, and has no effect."""
    host = start(pool, endpoint, 0, nnodes=3)
    ones = [start(pool, endpoint, 1, nnodes=3) for _ in range(2)]
    done, (one,) = concurrent.futures.wait(ones, 30, concurrent.futures.FIRST_COMPLETED)
    with pytest.raises(RuntimeError, match="--node_rank=1, which another launcher already has"):
        done.pop().result()
    assert start(pool, endpoint, 2, nnodes=3).result(30) == host.result(30) == one.result(30)


@pytest.mark.slow
def test_who_ends_while_it_waits_may_be_started_again(pool, endpoint):
    host = start(pool, endpoint, 0, nnodes=3)
    with pytest.raises(RuntimeError, match="Node 1 waited"):
        start(pool, endpoint, 1, nnodes=3, timeout_seconds=1).result(30)
    calls = [start(pool, endpoint, node, nnodes=3) for node in (2, 1)]
    assert all(call.result(30) == host.result(30) for call in calls)


def test_nobody_joins_while_the_answers_go_out(pool, endpoint, monkeypatch):
    """It would take the place of a launcher that has been answered."""
    tell, tries = rendezvous._tell, []

    async def try_to_join(connection, message):
        with socket.socket() as late:
            tries.append(late.connect_ex(split_address(endpoint)))
        await tell(connection, message)

    monkeypatch.setattr(rendezvous, "_tell", try_to_join)
    calls = [start(pool, endpoint, node) for node in (0, 1)]
    assert calls[0].result(30) == calls[1].result(30)
    assert tries == [errno.ECONNREFUSED]


@pytest.mark.slow
def test_another_token_does_not_come_in(pool, endpoint):
    host = start(pool, endpoint, 0)
    with pytest.raises(RuntimeError, match="there has a different TFPARALLEL_JOB_TOKEN"):
        start(pool, endpoint, 1, token="wrong", timeout_seconds=1).result(30)
    assert start(pool, endpoint, 1).result(30) == host.result(30)


@pytest.mark.parametrize("token", ["right", pytest.param("other", marks=pytest.mark.slow)])
def test_two_jobs_at_one_endpoint_refuse_each_other_by_name(pool, endpoint, token):
    """Also where one user has one token for all."""
    host = start(pool, endpoint, 0, timeout_seconds=3)
    message = "the launcher there belongs to job 'blobs', and this one to job 'digits'"
    with pytest.raises(RuntimeError, match=message):
        start(pool, endpoint, 1, job="digits", token=token, timeout_seconds=2).result(30)
    with pytest.raises(RuntimeError, match="in use.* by a launcher of job 'blobs'"):
        start(pool, endpoint, 0, job="digits", token=token).result(30)
    with pytest.raises(RuntimeError, match=r"Rejected 127.0.0.1: belongs to job 'digits'\. Start"):
        host.result(30)


def test_workers_have_a_secret_of_each_attempt_which_is_not_the_jobs(pool, endpoint):
    tokens = []
    for attempt in range(2):
        calls = [start(pool, endpoint, node, attempt=attempt) for node in range(2)]
        first, second = (call.result(30).token for call in calls)
        assert first == second and len(first) == 32
        tokens.append(first)
    assert len({*tokens, "right"}) == 3


def until_it_listens(endpoint):
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(split_address(endpoint), timeout=5)
        except OSError:
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\n",
        b"[1, 2]\n",
        b"x" * (1 << 17),
        b'{"job": "blobs", "nonce": 7}\n',
        b'{"job": "blo bs", "nonce": "7"}\n',
        b'{"job": "\\ud800", "nonce": "7"}\n',
        b'{"job": "blobs", "nonce": "\\ud800"}\n',
        b"[" * 60000 + b"\n",
        b"",
    ],
    ids=["http", "empty", "list", "long", "nonce", "job", "no text", "surrogate", "deep", "silent"],
)
def test_strangers_are_ignored(pool, endpoint, sent):
    host = start(pool, endpoint, 0)
    with until_it_listens(endpoint) as stranger:
        try:
            stranger.sendall(sent)
        except OSError:
            pass  # It hung up already.
        assert start(pool, endpoint, 1).result(30) == host.result(30)


HELLO = {"node_rank": 1, "nnodes": 2, "attempt": 0, "ports": [1], "master_port": 2}
HELLO |= {"local_address": None}


def second_lines():
    """What a stranger that knows the job's name may say behind the acceptor's nonce."""
    hello = json.dumps(HELLO).encode()
    yield b"0" * 64 + b" " + hello + b"\n"
    yield b"\xff" * 64 + b" " + hello + b"\n"
    yield hello + b"\n"
    yield b"\n"
    yield b"x" * (1 << 17)
    # What another one has said, to another nonce.
    for token in ("right", "wrong"):
        yield Session(Secret(token), "blobs", ("a", "b"), is_caller=True).sealed(hello)


def test_a_thousand_wrong_hellos_have_no_effect(pool, endpoint):
    host = start(pool, endpoint, 0)
    until_it_listens(endpoint).close()
    silent = []
    for number, line in zip(range(1000), itertools.cycle([None, *second_lines()]), strict=False):
        stranger = socket.create_connection(split_address(endpoint), timeout=5)
        if line is None:
            silent.append(stranger)
            continue
        with stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(b'{"job": "blobs", "nonce": "a", "version": 2}\n')
            assert b"nonce" in stranger.recv(1 << 10)
            stranger.sendall(line)
            if number < 50:
                assert b"nodes" not in stranger.recv(1 << 10)
    assert not host.done()
    assert start(pool, endpoint, 1).result(30) == host.result(30)
    for stranger in silent:
        stranger.close()


@pytest.mark.slow
def test_replayed_messages_are_rejected(pool, endpoint):
    """All that node 1 says is heard on its way, and said again to the next acceptor."""
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as between:
        address = join_address(*between.getsockname())
        host, joining = start(pool, endpoint, 0), start(pool, address, 1)
        until_it_listens(endpoint).close()
        node, there = between.accept()[0], until_it_listens(endpoint)
        with node, there:
            for _ in range(2):
                heard += node.recv(1 << 16)
                there.sendall(heard.splitlines(keepends=True)[-1])
                node.sendall(there.recv(1 << 16))
            assert joining.result(30) == host.result(30)
    assert b"right" not in heard
    host = start(pool, endpoint, 0, timeout_seconds=3)
    with until_it_listens(endpoint) as stranger:
        stranger.sendall(heard)
        lines = stranger.makefile("rb").read().splitlines()
    assert [sorted(json.loads(line)) for line in lines] == [
        ["job", "nonce", "version"],
        ["refused"],
    ]
    with pytest.raises(RuntimeError, match="different TFPARALLEL_JOB_TOKEN"):
        host.result(30)


@pytest.mark.slow
def test_what_a_false_acceptor_says_is_not_believed(pool):
    """It knows the job's name, and not its token."""
    answer = {"nodes": [["127.0.0.1", [1]], ["127.0.0.1", [2]]], "master": "a:1", "nonce": "n"}
    with socket.create_server(("127.0.0.1", 0)) as acceptor:
        call = start(pool, join_address(*acceptor.getsockname()), 1, timeout_seconds=2)
        caller = acceptor.accept()[0]
        with caller:
            greeting = json.loads(caller.makefile("rb").readline())
            caller.sendall(b'{"job": "blobs", "nonce": "b", "version": 2}\n')
            nonces = (greeting["nonce"], "b")
            session = Session(Secret("wrong"), "blobs", nonces, is_caller=False)
            caller.sendall(session.sealed(encoded(answer)))
            with pytest.raises(RuntimeError, match="the listener there is not a launcher"):
                call.result(30)


def test_more_workers_than_a_variable_can_name_are_refused_on_all_hosts(pool, endpoint):
    """Before any worker starts."""
    calls = [start(pool, endpoint, node, ports=[12_345] * 4_000) for node in (0, 1)]
    for call in calls:
        with pytest.raises(RuntimeError, match="Received: 8000 workers, which need"):
            call.result(30)


@pytest.mark.parametrize("num_workers", [6, pytest.param(64, marks=pytest.mark.slow)])
def test_a_thousand_hosts_meet(pool, endpoint, monkeypatch, num_workers):
    """All hosts but node 0 are small. Of 6 workers each, TF_CONFIG can name almost no more."""
    if num_workers > 6:  # The refusal would come first.
        monkeypatch.setattr(rendezvous, "too_many_workers", lambda addresses: None)
    number, deadline = 1000, time.monotonic() + 30
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    host = pool.submit(
        meet, endpoint, nnodes=number, node_rank=0, ports=list(range(20_000, 20_000 + num_workers)),
        master_port=99, attempt=0, token="right", job="blobs", timeout_seconds=30,
    )  # fmt: skip
    hello = HELLO | {"nnodes": number, "ports": list(range(60_000, 60_000 + num_workers))}
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        stack.enter_context(until_it_listens(endpoint))
        callers = []
        for node in range(1, number):
            connected = socket.create_connection(split_address(endpoint), timeout=20)
            callers.append((connected, stack.enter_context(Connection(connected))))
            run(ask(callers[-1][1], hello | {"node_rank": node}))
        _, first = callers.pop()
        # To read a thousand times what each host reads once would take longest.
        lines = [read_to_the_end_of_a_line(connected) for connected, _ in callers]
        answers = {line.split(b" ", 2)[2] for line in lines}
        answer = run(first.receive(1 << 20))
        meeting = host.result(deadline - time.monotonic())
        meeting.news.close()
    assert [json.loads(each) for each in answers] == [answer]
    assert [len(ports) for _, ports in answer["nodes"]] == [num_workers] * number
    assert [len(addresses) for addresses in meeting.addresses] == [num_workers] * number


async def ask(connection, hello):
    await connection.introduce(Secret("right"), "blobs")
    await connection.send(hello)


def read_to_the_end_of_a_line(connected):
    connected.setblocking(True)
    with connected.makefile("rb") as file:
        return file.readline()


def test_an_endpoint_that_cannot_be_listened_at(pool):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = join_address(*other.getsockname())
        with pytest.raises(RuntimeError, match=f"{address} .*in use.*Choose another port"):
            start(pool, address, 0).result(30)
    # An address for documentation (RFC 5737): no host has it.
    message = r"Received: 192\.0\.2\.1:8000.*--local_addr=192\.0\.2\.1\.$"
    with pytest.raises(RuntimeError, match=message):
        start(pool, "192.0.2.1:8000", 0).result(30)


@pytest.mark.parametrize(
    "address, parts",
    [("a:1", ("a", 1)), ("[::1]:65535", ("::1", 65535)), ("10.0.0.1:80", ("10.0.0.1", 80))],
)
def test_addresses(address, parts):
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize(
    "address", ["", "a", ":1", "a:", "a:0", "a:65536", "a:x", "::1:80", "a:-1", "[]:1", "a b:1",
                "http://a:1", "a:1:2", "a:\N{SUPERSCRIPT TWO}"]
)  # fmt: skip
def test_bad_addresses(address):
    with pytest.raises(ValueError, match="must be host:port") as caught:
        split_address(address)
    assert repr(address) in str(caught.value)


def connected():
    """Two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        return server.accept()[0], caller


NONCES = ("a", "b")


def admitted(connected, *, is_caller=False):
    """A connection that has been let in."""
    one = Connection(connected)
    one.session = Session(Secret("right"), "blobs", NONCES, is_caller=is_caller)
    return one


def said(*messages):
    """The lines of node 0, which has let the others in."""
    session = Session(Secret("right"), "blobs", NONCES, is_caller=False)
    return [session.sealed(encoded(each)) for each in messages]


def lines(number):
    """Node 0's news, and the other end of each of its lines."""
    pairs = [connected() for _ in range(number)]
    connections = {index + 1: admitted(pair[0]) for index, pair in enumerate(pairs)}
    return ControlChannel(0, number + 1, connections), [pair[1] for pair in pairs]


def test_whom_a_worker_had_lost_is_told_to_the_others():
    """Story: behind a link cut one way, the other host blamed the worker that had lost its own."""
    news, (there,) = lines(1)
    connection, far = connected()
    other = ControlChannel(1, 2, {0: admitted(connection, is_caller=True)})
    with there, far:
        news.tell_failure(0, 75, 2.0, lost=1)
        far.sendall(there.recv(4096))
        bad = {"failed": 0, "worker": 0, "returncode": 1, "time_seconds": 2.5, "lost": "me"}
        far.sendall(said({}, bad)[1])
        while len(other.failures) < 2:
            assert other.lines[0].listen()
        (failure, _), (bad, _) = other.failures
        assert failure.lost == 1
        assert "code 75 after 2.0 s (it lost worker 1, or its network" in failure.explain()
        assert bad.lost is None and "lost" not in bad.explain()
        news.close()
        other.close()


def test_a_launcher_that_does_not_read_its_answer_is_missed_by_all():
    """Half an answer is no answer, and node 0 does not take it for one."""
    (slow, there), (second, second_there) = connected(), connected()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    there.settimeout(5)
    with there, second_there:
        visitor = admitted(slow)
        assert not visitor.send_now({"text": "1" * (1 << 24)}, 0.2)
        news = ControlChannel(0, 3, {1: visitor, 2: admitted(second)})
        assert not news.lines[0].listen() and news.departure.node == 1
        message = unproved(second_there.recv(4096))
        assert message == {"stopped": 1, "signum": None}
        news.tell_success()  # Goes to the other one alone.
        end = b""
        while chunk := there.recv(1 << 20):
            end = chunk[-20:]
        assert b"succeeded" not in end
        news.close()


def test_a_line_that_nobody_reads_ends_with_the_first_message_that_does_not_go_out():
    news, (there,) = lines(1)
    near = news.lines[0].connection
    near._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with there:
        assert not near.send_now({"text": "x" * (1 << 24)}, 0.2)
        assert not news.lines[0].listen()
        assert news.departure.node == 1
        news.close()


def test_a_message_is_heard_once():
    """Whoever reads the wire can say again what was proved, and is not believed."""
    connection, there = connected()
    news = ControlChannel(1, 3, {0: admitted(connection, is_caller=True)})
    (line,) = said({"failed": 0, "worker": 5, "returncode": 1, "time_seconds": 1.0})
    with there:
        there.sendall(line)
        while not news.failures:
            assert news.lines[0].listen()
        there.sendall(line)
        assert not news.lines[0].listen()
    assert len(news.failures) == 1
    news.close()


def test_a_signal_within_a_message_is_told_with_the_next(monkeypatch):
    """Story: the other hosts took it for a loss, and their workers had no time to save."""
    connection, there = connected()
    news = ControlChannel(1, 2, {0: admitted(connection, is_caller=True)})
    others = ControlChannel(0, 2, {1: admitted(there)})
    framed = wire.framed

    def interrupted(*said):
        framed(*said)
        monkeypatch.undo()
        raise StopRequest(signal.SIGTERM)

    monkeypatch.setattr(wire, "framed", interrupted)
    with pytest.raises(StopRequest), news:
        news.tell_success()
    with others:
        while others.lines[0].listen():
            pass
        assert (others.departure.node, others.departure.signum) == (1, signal.SIGTERM)


@pytest.mark.parametrize("token", ["wrong", None])
def test_a_message_without_its_proof_ends_the_connection(token):
    """Whoever can write into it is not believed for what was proved before."""
    connection, there = connected()
    news = ControlChannel(1, 3, {0: admitted(connection, is_caller=True)})
    message = encoded({"failed": 2, "worker": 5, "returncode": 1, "time_seconds": 1.0})
    session = Session(Secret(str(token)), "blobs", NONCES, is_caller=False)
    with there:
        there.sendall(message + b"\n" if token is None else session.sealed(message))
        assert not news.lines[0].listen()
    assert not news.failures
    news.close()


def test_bytes_after_a_line_are_left_for_a_selector():
    """Or the next message of node 0 would be heard with the one after it."""
    connection, there = connected()
    first = admitted(connection, is_caller=True)
    with there, first, selectors.DefaultSelector() as selector:
        there.sendall(b"".join(said({"nodes": []}, {"succeeded": 0})))
        assert run(first.receive()) == {"nodes": []}
        selector.register(first, selectors.EVENT_READ)
        assert selector.select(5)
        assert first.opened(first.read()) == {"succeeded": 0}


def test_node_0_is_missed_though_its_own_workers_have_succeeded():
    """It would have handed on what the others say."""
    connection, there = connected()
    news = ControlChannel(1, 3, {0: admitted(connection, is_caller=True)})
    with there:
        there.sendall(said({"succeeded": 0})[0])
    while news.lines[0].listen():
        pass
    assert news.departure is not None and not news.all_succeeded
    news.close()


def test_a_stop_of_another_host_explains_why_a_worker_has_saved():
    """Its message may come after the end of the worker here, and of one on a third host."""
    connection, there = connected()
    news = ControlChannel(1, 3, {0: admitted(connection, is_caller=True)})
    saved = {"failed": 2, "worker": 2, "returncode": 75, "time_seconds": 1.0}
    sent = threading.Event()

    def tell(*_):
        if not sent.is_set():
            sent.set()
            there.sendall(b"".join(said(saved, {"stopped": 0, "signum": signal.SIGTERM})))

    codes = [
        "import time; time.sleep(1); raise SystemExit(75)",
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('!'), sys.exit(75)))\n"
        "signal.pause()",
    ]
    commands = [[sys.executable, "-c", code] for code in codes]
    programs = [Program(k, command, os.environ) for k, command in enumerate(commands)]
    with there, news:
        outcome = Job(programs, news=news, on_output=tell, grace_seconds=20).wait(30)
    assert [exit_.returncode for exit_ in outcome.exits] == [75, 75]
    assert outcome.culprit.returncode == 75
    assert outcome.departure == Departure(0, signal.SIGTERM)
