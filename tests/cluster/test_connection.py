"""Messages over real sockets: what is sent arrives, what is too much is refused."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfparallel.cluster import connection, wire

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


def receive(sent, count=1, **options):
    """What a connection receives of the bytes that the other end sends before it hangs up."""
    near, far = socket.socketpair()
    far.settimeout(10)

    async def all_of_them():
        with connection.Connection(near) as receiver:
            async with asyncio.timeout(10):
                sending = asyncio.get_running_loop().run_in_executor(None, send_and_close)
                try:
                    return [await receiver.receive(**options) for _ in range(count)]
                finally:
                    receiver.close()
                    await sending

    def send_and_close():
        with far:
            try:
                far.sendall(sent)
            except OSError:
                pass

    return connection.run(all_of_them())


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.dictionaries(st.text(), JSON), min_size=1, max_size=4))
def test_what_is_sent_arrives(said):
    line = b"".join(wire.encoded(message) + b"\n" for message in said)
    assert receive(line, len(said)) == said


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"[" * 60_000 + b"\n", "not a JSON object"),
        (b"[1]\n", "not a JSON object"),
        (b"null\n", "not a JSON object"),
        (b"GET / HTTP/1.1\r\n", "not a JSON object"),
        (b"\xff\xfe\n", "not a JSON object"),
        (b'{"a": ' + b"1" * 60_000 + b"}\n", "not a JSON object"),
        (b"x" * 300_000, "more than 65536 bytes"),
        (b'{"a": "' + b"x" * 300_000 + b'"}\n', "more than 65536 bytes"),
    ],
)
def test_what_is_no_message_is_refused(line, expected):
    with pytest.raises(ValueError, match=expected):
        receive(line)


def test_the_limit_is_the_callers():
    line = json.dumps({"a": "x" * 300_000}).encode() + b"\n"
    assert receive(line, max_bytes=400_000) == [json.loads(line)]


@pytest.mark.parametrize("sent", [b"", b'{"a": 1'])
def test_a_closed_connection(sent):
    with pytest.raises(ConnectionResetError):
        receive(sent)


def connect(address, **options):
    async def near_port():
        async with asyncio.timeout(10):
            with await connection.connect(address, **options) as connected:
                return connected._socket.getsockname()[1]

    return connection.run(near_port())


def test_a_connection_keeps_off_the_workers_ports():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        # Nearly all that the system gives out: one port in eight is left.
        avoided = {port for port in range(65536) if port % 8 != 1}
        assert all(connect(address, avoid_ports=avoided) % 8 == 1 for _ in range(20))


def test_why_a_connection_fails():
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{chosen.getsockname()[1]}"
        with pytest.raises(ConnectionRefusedError) as refused:
            connect(address)
    assert connection.reason(refused.value) == "connection refused"
    with pytest.raises(OSError) as unknown:
        connect("nobody.invalid:80")
    assert "host name" in connection.reason(unknown.value)
    assert connection.reason(TimeoutError()) == "no answer"


def test_the_callers_event_loop_is_left_alone():
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        assert connection.run(asyncio.sleep(0, "done")) == "done"
        assert asyncio.get_event_loop() is loop and not loop.is_closed()
    finally:
        asyncio.set_event_loop(None)
        loop.close()


INTERRUPTED = """
import asyncio, random, signal
from tfparallel.cluster import connection

async def two_busy_tasks():
    # By the clock it comes between any two instructions, as from a keyboard.
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0005, 0.001))
    other = asyncio.create_task(busy())
    try:
        await busy()
    finally:
        other.cancel()
        await asyncio.wait([other])

async def busy():
    while True:
        await asyncio.sleep(0)

signal.signal(signal.SIGALRM, lambda *call: signal.getsignal(signal.SIGINT)(*call))
for _ in range(1000):
    try:
        connection.run(two_busy_tasks())
    except KeyboardInterrupt:
        continue
    raise SystemExit("the interrupt is lost")
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


@pytest.mark.slow
def test_an_interrupt_ends_the_loop_wherever_it_comes():
    """Python's own handler, in the middle of the loop, can lose what was to wake a task."""
    subprocess.run([sys.executable, "-c", INTERRUPTED], check=True, timeout=60)


@pytest.mark.parametrize("error", [None, ValueError("of its own")])
def test_an_interrupt_as_the_task_ends(error):
    """It is not forgotten; an error of the task is what its caller must see."""

    async def last_words():
        os.kill(os.getpid(), signal.SIGINT)
        if error:
            raise error

    with pytest.raises(type(error) if error else KeyboardInterrupt):
        connection.run(last_words())


WITHOUT_DESCRIPTORS = """
import asyncio, os, resource
from tfparallel.cluster import connection, pmi

server = pmi.Server("127.0.0.1", ["a"], "secret")
limit = len(os.listdir("/proc/self/fd")) - 1  # The listing itself needs one.
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
try:
    connection.run(asyncio.sleep(0), in_another_thread=True)
except OSError as error:
    print(error.strerror)
server.start()
try:
    server.close()
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_without_free_descriptors_it_fails_and_does_not_hang():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS], capture_output=True, text=True, timeout=20
    )
    assert done.stdout == "Too many open files\n" * 2, done.stderr


IN_A_NOTEBOOK = """
import asyncio, signal
from tfparallel.cluster import connection

async def cell():
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    connection.run(asyncio.sleep(600))

try:
    asyncio.new_event_loop().run_until_complete(cell())
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_under_a_running_event_loop():
    done = subprocess.run(
        [sys.executable, "-c", IN_A_NOTEBOOK], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_the_callers_own_handler_of_interrupts_is_left_alone():
    def handler(number, frame):
        heard.append(number)

    async def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.01)
        return "goes on"

    heard = []
    before = signal.signal(signal.SIGINT, handler)
    try:
        assert connection.run(interrupted()) == "goes on"
        assert signal.getsignal(signal.SIGINT) is handler and heard == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_line_is_heard_once_and_none_before_another():
    """One that a signal kept from being sent is missing, and the next is heard."""
    secret, nonces = wire.Secret("right"), ("a", "b")
    said, heard = (
        wire.Session(secret, "blobs", nonces, is_caller=is_caller) for is_caller in (True, False)
    )
    first, second, third = (said.sealed(wire.encoded({"n": n})).rstrip() for n in range(3))
    assert [heard.opened(line) for line in (first, first, third, second, third)] == [
        {"n": 0}, None, {"n": 2}, None, None,
    ]  # fmt: skip
    proof, _, message = third.split(b" ", 2)
    for number in (b"3", b"-1", b"", b"9" * 5000):
        assert heard.opened(b" ".join([proof, number, message])) is None
    assert wire.unproved(second) == {"n": 1}
