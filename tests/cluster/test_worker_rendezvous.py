"""The rendezvous, among threads and among real processes; every wait has a limit."""

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tfparallel.cluster import acceptor, listener, wire, worker_rendezvous
from tfparallel.cluster.ports import free_ports
from tfparallel.cluster.wire import Secret

JOB = "tfparallel-workers-4"
A_MOMENT = re.compile(r"Executing .* took 0\.\d+ seconds")
GREETING = json.dumps({"job": JOB, "nonce": "mine", "version": 2}).encode() + b"\n"
# Beyond the time limit: the verdict's way, and a busy machine.
SLACK_SECONDS = 8.0

PROCESS = """
import json, sys
from tfparallel.cluster import worker_rendezvous
arguments = json.loads(sys.argv[1])
print("ready", flush=True)
try:
    print(json.dumps(worker_rendezvous.meet(**arguments)), flush=True)
except RuntimeError as error:
    sys.exit(f"RuntimeError: {error}")
"""


def free_addresses(num_workers, host="127.0.0.1"):
    """Addresses whose ports were free a moment ago, all different."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))  # Raises where this host has no such address.
    ports = free_ports(num_workers)
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for port in ports]


def outcome(workers, index, facts, **options):
    """What one worker's meeting ends with: its result or its error's text."""
    try:
        return worker_rendezvous.meet(workers, index, facts, **options)
    except RuntimeError as error:
        return str(error)


def meet_in_threads(calls, timeout_seconds=20.0):
    """Runs each call's meeting in a thread; returns the outcomes and the seconds it took."""
    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
        futures = [
            threads.submit(outcome, **{"timeout_seconds": timeout_seconds, **call})
            for call in calls
        ]
        results = [future.result(timeout_seconds + 3 * SLACK_SECONDS) for future in futures]
    return results, time.monotonic() - started


def calls_of(workers, skip=(), **common):
    return [
        {"workers": workers, "index": index, "facts": {"seed": 7}, **common}
        for index in range(len(workers))
        if index not in skip
    ]


def port_of(address):
    return int(address.rpartition(":")[2])


@contextlib.contextmanager
def process(workers, index, facts=None, timeout_seconds=20.0, program=PROCESS, **options):
    """A worker in a process of its own, about to meet."""
    arguments = {
        "workers": workers,
        "worker_index": index,
        "facts": facts or {"seed": 7},
        "timeout_seconds": timeout_seconds,
        **options,
    }
    worker = subprocess.Popen(
        [sys.executable, "-X", "dev", "-c", program, json.dumps(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with worker:
        try:
            assert worker.stdout.readline() == "ready\n"
            yield worker
        finally:
            worker.kill()


def wait_until_it_listens(address, timeout_seconds=20.0):
    """Returns a connection to an address as soon as somebody listens there."""
    end = time.monotonic() + timeout_seconds
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port_of(address)), timeout=5)
        except ConnectionRefusedError:
            assert time.monotonic() < end, f"nobody listens at {address}"
            time.sleep(0.02)


def talk(address, message):
    """Says hello to the chief, and is welcome; returns the open connection."""
    return welcomed(address, message)[0]


def welcomed(address, message):
    """As `talk`; returns what says more, too."""
    connection = wait_until_it_listens(address)
    connection.sendall(GREETING)
    session = session_of(read_line(connection)["nonce"])

    def say(message):
        connection.sendall(session.sealed(wire.encoded(message)))

    say(message)
    assert read_line(connection) == {"welcome": message["index"]}
    return connection, say


def session_of(nonce, token=""):
    """A caller's, behind the listener's nonce."""
    return wire.Session(Secret(token), JOB, ("mine", nonce), is_caller=True)


def read_line(connection):
    """The next message without its proof; byte by byte: the one after it is not taken along."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        assert byte, f"hung up after {line!r}"
        line += byte
    return json.loads(line) if line.startswith(b"{") else wire.unproved(line)


def hello(workers, index, facts=None, **changes):
    return {
        "call": "hello", "index": index, "workers": workers,
        "facts": facts or {"seed": 7}, "host": "elsewhere", "pid": 4711, "seconds": 20.0, **changes,
    }  # fmt: skip


# All is well


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_workers_meet(num_workers):
    workers = free_addresses(num_workers)
    calls = [
        {**call, "facts": {"seed": 7, "rank": call["index"]}, "may_differ": ["rank"]}
        for call in calls_of(workers)
    ]
    results, _ = meet_in_threads(calls)
    expected = tuple({"seed": 7, "rank": rank} for rank in range(num_workers))
    assert results == [expected] * num_workers


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_other_forms_of_address(host):
    literal = "127.0.0.1" if host == "localhost" else host
    try:
        workers = free_addresses(3, literal)
    except OSError:
        pytest.skip(f"this host has no {host}")
    workers = [worker.replace("127.0.0.1", "localhost") for worker in workers]
    results, _ = meet_in_threads(calls_of(workers))
    assert results == [({"seed": 7},) * 3] * 3


@pytest.mark.parametrize("num_workers", [2, 3])
def test_processes_meet(num_workers):
    workers = free_addresses(num_workers)
    with contextlib.ExitStack() as running:
        started = [
            running.enter_context(process(workers, index, token="ours"))
            for index in range(num_workers)
        ]
        for worker in started:
            output, errors = worker.communicate(timeout=60)
            # Developer mode would tell of a socket or a task left behind, and of a look-up that
            # blocks; a busy machine may take a moment for anything.
            warnings = [line for line in errors.splitlines() if not A_MOMENT.fullmatch(line)]
            assert (worker.returncode, warnings) == (0, [])
            assert json.loads(output) == [{"seed": 7}] * num_workers


@pytest.mark.parametrize(
    "late", [0, *(pytest.param(worker, marks=pytest.mark.slow) for worker in (1, 2))]
)
def test_a_late_comer(late):
    workers = free_addresses(3)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(outcome, **call) for call in calls_of(workers, skip=[late])]
        time.sleep(1.5)
        assert not any(future.done() for future in futures)
        futures.append(threads.submit(outcome, **calls_of(workers)[late]))
        assert [future.result(60) for future in futures] == [({"seed": 7},) * 3] * 3


def test_meets_again_at_once_and_leaves_nothing():
    workers = free_addresses(3)
    descriptors = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    for _ in range(5):
        results, _ = meet_in_threads(calls_of(workers))
        assert results == [({"seed": 7},) * 3] * 3
        for worker in workers:
            # On all addresses, as TensorFlow does.
            socket.create_server(("", port_of(worker))).close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if "look up" in name or "rendezvous" in name]
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_under_a_running_event_loop():
    workers = free_addresses(1)

    async def notebook():
        return worker_rendezvous.meet(workers, 0, {"seed": 7}, timeout_seconds=20)

    assert asyncio.run(notebook()) == ({"seed": 7},)


def test_facts_come_back_as_json_has_them():
    workers = free_addresses(1)
    facts = {"shape": (2, 3), "nested": {"a": None}}
    assert worker_rendezvous.meet(workers, 0, facts) == ({"shape": [2, 3], "nested": {"a": None}},)


TENSORFLOW = """
import json, sys
import tensorflow as tf
from tfparallel.cluster import worker_rendezvous
arguments = json.loads(sys.argv[1])
cluster, index = {"worker": arguments["workers"]}, arguments["worker_index"]
print("ready", flush=True)
worker_rendezvous.meet(**arguments)
server = tf.distribute.Server(cluster, job_name="worker", task_index=index)
print(json.dumps(server.target), flush=True)
"""


@pytest.mark.slow
def test_tensorflow_takes_the_port_over():
    workers = free_addresses(2)
    with contextlib.ExitStack() as running:
        started = [
            running.enter_context(process(workers, index, timeout_seconds=60, program=TENSORFLOW))
            for index in (0, 1)
        ]
        for worker, address in zip(started, workers, strict=True):
            output, errors = worker.communicate(timeout=60)
            assert worker.returncode == 0, errors
            assert json.loads(output) == f"grpc://{address}"


# Somebody is missing


def named_as_missing(text):
    return {int(index) for index in re.findall(r"worker (\d+) \(\S+\) had not joined", text)}


@pytest.mark.slow
def test_whoever_is_missing_is_named():
    """Every set of missing workers out of 4, all jobs at the same time."""
    limit = 8.0  # Many threads on few cores.
    missing_sets = [
        set(missing) for size in (1, 2, 3) for missing in itertools.combinations(range(4), size)
    ]
    addresses = free_addresses(4 * len(missing_sets))
    jobs = [addresses[start : start + 4] for start in range(0, len(addresses), 4)]
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as threads:
        outcomes = threads.map(
            lambda workers, missing: meet_in_threads(calls_of(workers, skip=missing), limit),
            jobs,
            missing_sets,
        )
        for workers, missing, (results, seconds) in zip(jobs, missing_sets, outcomes, strict=True):
            for text in results:
                assert named_as_missing(text) == missing, text
                assert all(workers[index] in text for index in missing)
                assert "nothing listens there" in text
            assert seconds < limit + SLACK_SECONDS


@pytest.mark.slow
def test_all_say_the_same():
    workers = free_addresses(4)
    results, _ = meet_in_threads(calls_of(workers, skip=[2]), timeout_seconds=2.0)
    assert len(set(results)) == 1
    assert f"worker 2 ({workers[2]}) had not joined" in results[0]
    assert "All 4 workers must start" in results[0] and "--start_timeout" in results[0]


@pytest.mark.slow
def test_the_earliest_time_limit_holds_for_all():
    workers = free_addresses(3)
    calls = calls_of(workers, skip=[2])
    calls[1]["timeout_seconds"] = 1.5
    results, seconds = meet_in_threads(calls, timeout_seconds=60.0)
    assert [named_as_missing(text) for text in results] == [{2}, {2}]
    assert seconds < 1.5 + SLACK_SECONDS


@pytest.mark.slow
def test_says_what_is_there_instead_of_the_missing_worker():
    workers = free_addresses(2)
    with socket.create_server(("127.0.0.1", port_of(workers[0]))) as silent:
        [text], _ = meet_in_threads(calls_of(workers, skip=[0]), timeout_seconds=1.5)
        assert silent and "worker 0" in text and "had not joined (no answer)" in text


@pytest.mark.slow
def test_without_a_chief_a_silent_worker_is_named_too():
    workers = free_addresses(3)
    with socket.create_server(("127.0.0.1", port_of(workers[2]))):
        [text], seconds = meet_in_threads(calls_of(workers, skip=[0, 2]), timeout_seconds=1.5)
    assert named_as_missing(text) == {0, 2}
    assert f"worker 2 ({workers[2]}) had not joined (no answer)" in text
    assert seconds < 1.5 + SLACK_SECONDS


@pytest.mark.slow
def test_two_chiefs_are_told_apart():
    """The same two addresses in another order on each worker: nobody goes to anybody."""
    one = free_addresses(2)
    other = one[::-1]
    calls = [calls_of(one)[0], calls_of(other)[0]]
    results, _ = meet_in_threads(calls, timeout_seconds=2.0)
    for text in results:
        assert "had not joined (the process there claims to be worker 0)" in text


# The port


@pytest.mark.skipif(sys.platform != "linux", reason="the owner is read from /proc")
@pytest.mark.parametrize(
    "where",
    [
        "127.0.0.2",  # The least like the port's own address; each waits a second.
        pytest.param("127.0.0.1", marks=pytest.mark.slow),
        pytest.param("0.0.0.0", marks=pytest.mark.slow),
    ],
)
def test_a_taken_port_names_its_owner(where):
    """TensorFlow listens on every address: 127.0.0.2 is in its way too."""
    workers = free_addresses(2)
    with socket.create_server((where, port_of(workers[1]))):
        text = outcome(workers, 1, {}, timeout_seconds=20)
    assert f"Worker 1 ({workers[1]}) cannot use its port {port_of(workers[1])}" in text
    assert f"process {os.getpid()} (" in text


def test_a_port_that_becomes_free_in_a_moment():
    workers = free_addresses(1)
    server = socket.create_server(("127.0.0.1", port_of(workers[0])))
    timer = threading.Timer(0.3, server.close)
    timer.start()
    assert outcome(workers, 0, {"seed": 7}) == ({"seed": 7},)
    timer.join()


# Documentation addresses (RFC 5737) and names (RFC 6761) that are nobody's.
@pytest.mark.parametrize("host", ["203.0.113.7", "nobody.invalid"])
def test_an_address_of_another_host(host):
    calls = calls_of([f"{host}:38123", "127.0.0.1:38124"], skip=[1])
    [text], _ = meet_in_threads(calls, timeout_seconds=5)
    assert f"Worker 0 ({host}:38123) cannot listen on {host}:38123 on host" in text
    assert "Correct the task index" in text and "set TFPARALLEL_LISTEN_ADDR=0.0.0.0" in text


@pytest.mark.slow
def test_the_environment_says_where_to_listen(monkeypatch):
    """As `launch` sets it behind a gateway, whose address is not this host's."""
    assert listener.everywhere("203.0.113.7") == "0.0.0.0"
    assert listener.everywhere("127.0.0.1") is None
    assert listener.everywhere("nobody.invalid") is None
    monkeypatch.setenv(listener.LISTEN_ADDR, "127.0.0.1")
    text = outcome(["203.0.113.7:38125", "203.0.113.8:38125"], 0, {}, timeout_seconds=1)
    assert "cannot listen" not in text and "worker 1 (203.0.113.8:38125) had not joined" in text


@pytest.mark.slow
def test_loopback_is_not_reached_from_outside():
    workers = free_addresses(2)
    port = port_of(workers[0])
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        meeting = threads.submit(outcome, workers, 0, {}, timeout_seconds=1.5)
        wait_until_it_listens(workers[0]).close()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), timeout=1)
        assert named_as_missing(meeting.result(20)) == {1}


def name_of_the_loopback():
    """This host's own name, if it resolves to the loopback here."""
    name = socket.gethostname()
    try:
        if not socket.gethostbyname(name).startswith("127."):
            pytest.skip("this host knows its name by another address")
    except OSError:
        pytest.skip("this host does not know its own name")
    return name


@pytest.mark.slow
def test_a_host_that_knows_its_own_name_as_a_loopback():
    """Debian's /etc/hosts; with peers elsewhere it must be reached from outside all the same."""
    name = name_of_the_loopback()
    port = port_of(free_addresses(1)[0])
    workers = [f"{name}:{port}", "203.0.113.7:38125"]
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        meeting = threads.submit(outcome, workers, 0, {}, timeout_seconds=1.5)
        wait_until_it_listens(workers[0]).close()
        socket.create_connection(("127.0.0.2", port), timeout=1).close()
        assert named_as_missing(meeting.result(20)) == {1}


# They disagree


def test_another_seed():
    workers = free_addresses(3)
    calls = calls_of(workers)
    calls[1]["facts"] = {"seed": 8}
    results, _ = meet_in_threads(calls)
    assert len(set(results)) == 1
    assert "the workers disagree: seed: 7 on workers 0 and 2; 8 on worker 1." in results[0]


def test_disagreement_is_told_before_the_time_limit(monkeypatch):
    """Two disagree and the third never comes: nobody waits for it until the end."""
    monkeypatch.setattr(worker_rendezvous, "_GRACE_SECONDS", 0.5)
    workers = free_addresses(3)
    calls = calls_of(workers, skip=[2])
    calls[1]["facts"] = {"seed": 8}
    results, seconds = meet_in_threads(calls, timeout_seconds=60.0)
    assert len(set(results)) == 1
    assert "seed: 7 on worker 0; 8 on worker 1; worker 2 had not joined yet" in results[0]
    assert seconds < 60.0


def test_another_list_of_workers():
    workers = free_addresses(4)
    one, other = workers[:3], [*workers[:2], workers[3]]
    calls = [calls_of(one)[0], calls_of(other)[1], calls_of(one)[2]]
    results, _ = meet_in_threads(calls)
    assert len(set(results)) == 1
    there, elsewhere = workers[2:]
    assert f"workers[2]: '{there}' on workers 0 and 2; '{elsewhere}' on worker 1" in results[0]


def test_another_number_of_workers():
    workers = free_addresses(3)
    calls = [calls_of(workers[:2])[0], calls_of(workers)[1]]
    results, _ = meet_in_threads(calls)
    assert len(set(results)) == 1
    assert f"workers[2]: nothing on worker 0; '{workers[2]}' on worker 1" in results[0]


@pytest.mark.slow
def test_the_order_of_the_workers_differs():
    """Worker 2's chief is worker 1 to everybody else."""
    workers = free_addresses(3)
    swapped = [workers[1], workers[0], workers[2]]
    calls = [*calls_of(workers, skip=[2]), calls_of(swapped)[2]]
    results, _ = meet_in_threads(calls, timeout_seconds=2.0)
    assert f"workers[0]: '{workers[0]}' on worker 0; '{workers[1]}' on worker 2" in results[2]
    assert "a different list of workers" in results[2]
    assert named_as_missing(results[0]) == {2} and results[0] == results[1]


def test_two_that_say_they_are_the_same_worker():
    workers = free_addresses(3)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        chief = threads.submit(outcome, workers, 0, {"seed": 7}, timeout_seconds=20)
        first = talk(workers[0], hello(workers, 1, host="a", pid=11))
        second = talk(workers[0], hello(workers, 1, host="b", pid=12))
        with first, second:
            expected = (
                f"two processes claim to be worker 1 ({workers[1]}): "
                "process 11 on host a and process 12 on host b"
            )
            assert expected in read_line(first)["error"]
            assert expected in read_line(second)["error"]
        assert expected in chief.result(20)


@pytest.mark.parametrize("longer", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_too_many(longer):
    """It comes when all have come: it says that it is worker 1 too, or its list is longer."""
    workers = free_addresses(3)
    one = workers[:2]
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        chief = threads.submit(outcome, one, 0, {"seed": 7}, timeout_seconds=20)
        first = talk(workers[0], hello(one, 1))
        with first:
            assert "probe" in read_line(first)
            late = talk(workers[0], hello(workers, 2) if longer else hello(one, 1))
            with late:
                text = chief.result(20)
                assert read_line(first)["error"] == text == read_line(late)["error"]
    if longer:
        assert f"workers[2]: nothing on workers 0 and 1; '{workers[2]}' on worker 2" in text
    else:
        assert "two processes claim to be worker 1" in text


@pytest.mark.slow
def test_another_job_on_the_same_port():
    workers = free_addresses(3)
    calls = calls_of(workers, token="ours")
    calls[2]["token"] = "theirs"
    results, _ = meet_in_threads(calls, timeout_seconds=2.0)
    assert f"the address of worker 0 ({workers[0]}) is used by another tfparallel job" in results[2]
    for text in results[:2]:
        assert named_as_missing(text) == {2}
        intruder = f"process {os.getpid()} on host {socket.gethostname()}"
        assert f"{intruder} connected as worker 2 of" in text


# Somebody dies


@pytest.mark.parametrize("dying", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_death_is_named_at_once(dying):
    workers = free_addresses(3)
    with process(workers, dying, timeout_seconds=120) as victim:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            call = {"index": 1 - dying, "facts": {"seed": 7}, "timeout_seconds": 120}
            survivor = threads.submit(outcome, workers, **call)
            wait_until_it_listens(workers[dying]).close()
            time.sleep(1.5)
            assert not survivor.done()
            victim.send_signal(signal.SIGKILL)
            text = survivor.result(SLACK_SECONDS)
    assert f"worker {dying} ({workers[dying]})" in text and "ended during the rendezvous" in text
    assert dying == 0 or f"process {victim.pid} on host {socket.gethostname()}" in text


def test_control_c():
    workers = free_addresses(2)
    with process(workers, 0, timeout_seconds=120) as worker:
        wait_until_it_listens(workers[0]).close()
        worker.send_signal(signal.SIGINT)
        _, errors = worker.communicate(timeout=20)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "ResourceWarning" not in errors and "never retrieved" not in errors


def test_control_c_in_the_middle_of_a_task():
    program = f"""import os, signal
from tfparallel.cluster import rendezvous_peer
async def survey(self, absent):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # Python runs the handler between two of its instructions.
        pass
rendezvous_peer.RendezvousPeer.survey = survey
{PROCESS}"""
    with process(free_addresses(2), 0, timeout_seconds=120, program=program) as worker:
        _, errors = worker.communicate(timeout=20)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "ResourceWarning" not in errors and "never retrieved" not in errors


def test_a_worker_that_is_reached_by_nobody():
    """It comes to the chief, but nothing listens at the address in the list."""
    workers = free_addresses(3)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        meetings = [threads.submit(outcome, **call) for call in calls_of(workers, skip=[2])]
        lost, say = welcomed(workers[0], hello(workers, 2))
        with lost:
            assert read_line(lost)["probe"] > 0
            say({"reached": ""})
            text = read_line(lost)["error"]
        assert [meeting.result(20) for meeting in meetings] == [text, text]
    # Both the chief and its neighbour in the ring have tried.
    for source in (0, 1):
        assert (
            f"worker {source} ({workers[source]}) cannot reach worker 2 ({workers[2]}) "
            "(nothing listens there)" in text
        )


@pytest.mark.slow
def test_a_worker_that_falls_silent(monkeypatch):
    monkeypatch.setattr(worker_rendezvous, "_PROBE_SECONDS", 1.0)
    workers = free_addresses(2)
    with socket.create_server(("127.0.0.1", port_of(workers[1]))):
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            chief = threads.submit(outcome, workers, 0, {"seed": 7}, timeout_seconds=20)
            stopped = talk(workers[0], hello(workers, 1))
            with stopped:
                text = chief.result(20)
    assert f"worker 1 ({workers[1]}) stopped responding" in text and "cannot reach worker 1" in text


# Strangers


STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "bytes": bytes(range(256)) * 8,
    "no object": b"[1, 2]\n",
    "deep": b"[" * 60_000 + b"\n",
    "endless": b"x" * (2 * wire.MAX_BYTES),
    "digits": b"1" * 60_000 + b"\n",
    "no protocol": b'{"call": "hello"}\n',
    "no nonce": b'{"job": "%b"}\n' % JOB.encode(),
    "another job": b'{"job": "blobs", "nonce": "mine"}\n',
    "half a hello": GREETING + b"a" * 64 + b' {"call": "hello"}\n',
    "odd proof": GREETING + b"\xff" * 64 + b' {"call": "probe"}\n',
    "no proof": GREETING + b'{"call": "probe"}\n',
    "odd call": GREETING + b"0" * 64 + b' {"call": "exec"}\n',
    "deep call": GREETING + b"0" * 65 + b'{"call": ' + b"[" * 900 + b"]" * 900 + b"}\n",
}

GREETED = [["job", "nonce", "version"]]
REFUSED = [*GREETED, ["refused"]]


@pytest.mark.parametrize("target", [0, 1])
def test_strangers_do_not_disturb(target):
    workers = free_addresses(3)
    with contextlib.ExitStack() as open_until_the_end, \
            concurrent.futures.ThreadPoolExecutor(3) as threads:
        meetings = [threads.submit(outcome, **call) for call in calls_of(workers, skip=[2])]
        silent = open_until_the_end.enter_context(wait_until_it_listens(workers[target]))
        drip = open_until_the_end.enter_context(wait_until_it_listens(workers[target]))
        for name, said in STRANGERS.items():
            with wait_until_it_listens(workers[target]) as stranger:
                with contextlib.suppress(OSError):
                    stranger.sendall(said)
                    answer = stranger.makefile("rb").read()
                    lines = [json.loads(line) for line in answer.splitlines()]
                    assert [*map(list, lines)] in ([], GREETED, REFUSED, REFUSED[1:]), name
            drip.sendall(b"{")
        meetings.append(threads.submit(outcome, **calls_of(workers)[2]))
        assert [meeting.result(40) for meeting in meetings] == [({"seed": 7},) * 3] * 3
        assert silent.recv(1) == b""


@pytest.mark.slow
def test_a_thousand_wrong_hellos_end_nothing():
    """Each says all that a worker says, and does not know the token."""
    workers = free_addresses(2)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        chief = threads.submit(outcome, **calls_of(workers, token="ours")[0])
        wait_until_it_listens(workers[0]).close()
        for _ in range(1000):
            with wait_until_it_listens(workers[0]) as stranger:
                stranger.sendall(GREETING)
                nonce = read_line(stranger)["nonce"]
                theirs = session_of(nonce, "theirs")
                stranger.sendall(theirs.sealed(wire.encoded(hello(workers, 1))))
                assert read_line(stranger) == {"refused": JOB}
        other = threads.submit(outcome, **calls_of(workers, token="ours")[1])
        assert [chief.result(40), other.result(40)] == [({"seed": 7},) * 2] * 2


@pytest.mark.slow
def test_a_false_chief_hears_no_secret_and_is_not_believed():
    workers = free_addresses(2)
    heard = b""
    with socket.create_server(("127.0.0.1", port_of(workers[0]))) as false:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            call = calls_of(workers, token="our secret")[1]
            worker = threads.submit(outcome, **(call | {"timeout_seconds": 2}))
            with false.accept()[0] as caller:
                heard += caller.recv(1 << 16)
                caller.sendall(GREETING)
                heard += caller.recv(1 << 16)
                caller.sendall(b'{"welcome": "0"}\n')
            assert "worker 0" in worker.result(20)
    assert b'"hello"' in heard and b"secret" not in heard


@pytest.mark.slow
def test_a_silent_stranger_has_its_time(monkeypatch):
    monkeypatch.setattr(acceptor, "GREETING_SECONDS", 0.5)
    workers = free_addresses(2)
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        chief = threads.submit(outcome, workers, 0, {}, timeout_seconds=4)
        with wait_until_it_listens(workers[0]) as silent:
            silent.settimeout(2)
            # A byte now and then does not help.
            with contextlib.suppress(OSError):
                for _ in range(6):
                    silent.sendall(b"{")
                    time.sleep(0.2)
            with contextlib.suppress(ConnectionResetError):
                assert silent.recv(1) == b""
            assert not chief.done()
        assert named_as_missing(chief.result(20)) == {1}


def test_a_crowd_of_silent_strangers(monkeypatch):
    monkeypatch.setattr(acceptor, "_MAX_STRANGERS", 10)
    workers = free_addresses(2)
    with contextlib.ExitStack() as crowd, concurrent.futures.ThreadPoolExecutor(2) as threads:
        chief = threads.submit(outcome, **calls_of(workers)[0])
        first = crowd.enter_context(wait_until_it_listens(workers[0]))
        for _ in range(30):
            crowd.enter_context(wait_until_it_listens(workers[0]))
        # The oldest is hung up on, long before its time.
        first.settimeout(3)
        assert first.recv(1) == b""
        other = threads.submit(outcome, **calls_of(workers)[1])
        assert [chief.result(40), other.result(40)] == [({"seed": 7},) * 2] * 2


# Bad arguments


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"workers": []}, "the list of workers is empty"),
        ({"workers": ["a:1", "a:1"]}, "workers[1] and workers[0] have the same address, 'a:1'"),
        ({"workers": ["a:1", "b"]}, "workers[1], 'b', is not a valid address: it has no port"),
        ({"workers": ["a:1", "::1:2"]}, "workers[1], '::1:2', is not a valid address"),
        ({"workers": ["a:1", "b:65536"]}, "workers[1], 'b:65536', is not a valid address"),
        ({"worker_index": 2}, "worker_index is not from 0 to 1"),
        ({"worker_index": "0"}, "worker_index is not an integer"),
        ({"timeout_seconds": 0}, "timeout_seconds is not positive"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds is not positive"),
        ({"facts": {"model": object()}}, "facts are not JSON-serializable"),
        ({"facts": {"file": "x" * 70_000}}, "bytes; a message has at most 65536"),
    ],
)
def test_bad_arguments(changes, expected):
    arguments = {"workers": ["a:1", "b:1"], "worker_index": 0, "facts": {}, **changes}
    with pytest.raises(ValueError, match="Cannot hold a rendezvous:") as caught:
        worker_rendezvous.meet(**arguments)
    assert expected in str(caught.value)
    assert f"Received: workers={arguments['workers']}" in str(caught.value)


def test_bad_arguments_come_together():
    with pytest.raises(ValueError, match="is not a valid address(.|\n)*worker_index(.|\n)*timeout"):
        worker_rendezvous.meet(["a:1", "b"], 7, {}, timeout_seconds=-1)
