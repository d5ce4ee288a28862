"""Launchers of several hosts meet; who is missing or in the way is named."""

import concurrent.futures
import errno
import json
import socket
import time

import pytest

from tfparallel.cluster.address import join_address, split_address
from tfparallel.cluster.node_news import NodeNews
from tfparallel.cluster.nodes import meet
from tfparallel.cluster.ports import free_ports


def start(pool, endpoint, node, **changes):
    arguments = {
        "nnodes": 2,
        "node_rank": node,
        "ports": [1000 * (node + 1), 1000 * (node + 1) + 1],
        "master_port": 99,
        "attempt": 0,
        "token": "",
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


def test_missing_nodes_are_named_to_all_who_came(pool, endpoint):
    # Node 2 is there in time, and has time left when node 0 gives up.
    calls = [
        start(pool, endpoint, 0, nnodes=4, timeout_seconds=1),
        start(pool, endpoint, 2, nnodes=4),
    ]
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call.result(30)
        assert "nodes 1, 3 did not come" in str(caught.value)
        assert "within 1 s; all 4 nodes are required. Received: nodes 0, 2." in str(caught.value)


def test_node_0_is_missing(pool, endpoint):
    with pytest.raises(RuntimeError) as caught:
        start(pool, endpoint, 1, timeout_seconds=0.5).result(30)
    assert "Node 1 waited 0.5 s for node 0's launcher" in str(caught.value)
    assert "Received: Connection refused" in str(caught.value)


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
def test_contradictions_are_told_to_both(pool, endpoint, changes, message):
    calls = [start(pool, endpoint, 0), start(pool, endpoint, 1, **changes)]
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call.result(30)
        assert message in str(caught.value)


def test_two_nodes_of_one_rank(pool, endpoint):
    calls = [start(pool, endpoint, node, nnodes=3) for node in (0, 1, 1)]
    for call in calls:
        with pytest.raises(RuntimeError, match="--node_rank=1, which another launcher has"):
            call.result(30)


def test_another_token_does_not_come_in(pool, endpoint):
    host = start(pool, endpoint, 0, token="right", timeout_seconds=2)
    with pytest.raises(RuntimeError, match="it hung up"):
        start(pool, endpoint, 1, token="wrong", timeout_seconds=1).result(30)
    assert start(pool, endpoint, 1, token="right").result(30).token == "right"
    assert host.result(30).token == "right"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\n",
        b"[1, 2]\n",
        b"x" * (1 << 17),
        json.dumps({"node_rank": 1, "nnodes": 2, "ports": [70000]}).encode() + b"\n",
        json.dumps({"node_rank": "1", "nnodes": 2, "attempt": 0, "token": ""}).encode() + b"\n",
        b"[" * 60000 + b"\n",
        b"",
    ],
    ids=["http", "empty", "list", "long", "port", "types", "deep", "silent"],
)
def test_strangers_are_ignored(pool, endpoint, sent):
    host = start(pool, endpoint, 0)
    deadline = time.monotonic() + 20
    while True:
        try:
            stranger = socket.create_connection(split_address(endpoint), timeout=5)
            break
        except OSError:
            assert time.monotonic() < deadline
    with stranger:
        try:
            stranger.sendall(sent)
        except OSError:
            pass  # It hung up already.
        assert start(pool, endpoint, 1).result(30) == host.result(30)


def test_an_endpoint_that_cannot_be_listened_at(pool):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = join_address(*other.getsockname())
        with pytest.raises(RuntimeError, match=f"{address} .*in use.*Choose another port"):
            start(pool, address, 0).result(30)
    # An address for documentation (RFC 5737): no host has it.
    told = r"Received: 192\.0\.2\.1:8000.*--local_addr=192\.0\.2\.1\.$"
    with pytest.raises(RuntimeError, match=told):
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


def lines(number):
    """Node 0's news, and the other end of each of its lines."""
    pairs = [connected() for _ in range(number)]
    news = NodeNews(0, number + 1, {index + 1: pair[0] for index, pair in enumerate(pairs)})
    return news, [pair[1] for pair in pairs]


def test_who_has_fallen_silent_is_told_to_the_others():
    news, (first, second) = lines(2)
    third, there = connected()
    other = NodeNews(2, 3, {0: third})
    with first, second, there:
        news.lines[0].is_silent = True  # As of a connection that has timed out.
        news._lost(news.lines[0])
        there.sendall(second.recv(4096))
        while not other.gone:
            other.lines[0].listen()
        assert news.silent == other.silent == {1} and news.gone == other.gone == {1}
        news.close()
        other.close()


def test_what_a_send_finds_out_is_kept():
    """The system tells an error once."""
    news, (there,) = lines(1)
    (line,) = news.lines

    class TimedOut:
        def __getattr__(self, name):
            return getattr(line_socket, name)

        def sendall(self, data):
            raise TimeoutError(errno.ETIMEDOUT, "timed out")

    line_socket = line._socket
    with there:
        line._socket = TimedOut()
        news.tell_newcomer()
        assert line.is_silent
        news.close()


def test_node_0_is_missed_though_its_own_workers_have_succeeded():
    """It would have handed on what the others say."""
    connection, there = connected()
    news = NodeNews(1, 3, {0: connection})
    with there:
        there.sendall(b'{"succeeded": 0}\n')
    while news.lines[0].listen():
        pass
    assert news.departure is not None and not news.all_succeeded
    news.close()


@pytest.mark.parametrize("token", ["\\ud800", "wrong"])
def test_a_token_that_is_no_text_is_another(pool, endpoint, token):
    host = start(pool, endpoint, 0, token="right", timeout_seconds=10)
    hello = '{"nnodes": 2, "node_rank": 1, "attempt": 0, "ports": [1], "master_port": 2, '
    hello += f'"local_address": null, "token": "{token}"}}\n'
    deadline = time.monotonic() + 10
    while True:
        try:
            with socket.create_connection(split_address(endpoint), timeout=5) as stranger:
                stranger.sendall(hello.encode())
                assert stranger.recv(1) == b""
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
    assert start(pool, endpoint, 1, token="right").result(30).token == "right"
    assert host.result(30).token == "right"
