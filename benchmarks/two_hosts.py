"""Two hosts on one machine: network namespaces, joined by a link of a given rate. Linux, as root.

    host 0, 10.77.0.1  ── wire, tbf RATE ──────── wire, tbf RATE ──  host 1, 10.77.0.2

Each process gets its own /dev/shm, so that programs do not take the two for one host.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys

ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINK = "wire"
HOST_VARIABLE = "BENCH_NETWORK_NAMESPACE"
NUM_BYTES = 2**26  # Sent to measure the link itself.
_TOOLS = ("ip", "tc", "unshare")
# The prefix of a command that runs on the host that HOST_VARIABLE names. Each part replaces itself
# by the next, so that the command's parent is the process that started all of this.
ON_HOST = (
    *("sh", "-c"),
    f'exec ip netns exec "${HOST_VARIABLE}" unshare --mount sh -c '
    '\'mount -t tmpfs tmpfs /dev/shm && exec "$@"\' sh "$@"',
    "sh",
)
_RECEIVE = """
import socket
with socket.create_server(("10.77.0.1", 7700)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while connection.recv(2**20):
        pass
    connection.sendall(b"x")
"""
_SEND = """
import json, socket, sys, time
with socket.create_connection(("10.77.0.1", 7700)) as connection:
    started = time.monotonic()
    connection.sendall(bytes(int(sys.argv[1])))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(json.dumps(time.monotonic() - started))
"""


@contextlib.contextmanager
def linked(rate="1gbit"):
    """Yields the names of two namespaces that are joined by a link, and removes them on exit.

    Args:
        rate: What the link carries in each direction, as `tc` reads it.

    Raises:
        RuntimeError: If this process may not make them, or a tool is missing.
    """
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        raise RuntimeError(f"Two hosts need the tools {', '.join(_TOOLS)}. Missing: {missing}.")
    names = [f"bench_{os.getpid()}_{index}" for index in range(2)]
    with contextlib.ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        ends = ["netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1]]
        _run("ip", "link", "add", "name", LINK, *ends)
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", LINK)
            for device in ("lo", LINK):
                _run("ip", "-n", name, "link", "set", device, "up")
            shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", LINK, "root", *shape)
        yield names


def on_host(name):
    """The prefix of a command that runs on the host."""
    return ["env", f"{HOST_VARIABLE}={name}", *ON_HOST]


def megabits(names):
    """Returns the rate that one TCP connection reaches between the hosts, in Mbit/s."""
    receive, send = (
        {
            "args": [*ON_HOST, sys.executable, "-c", program, str(NUM_BYTES)],
            "env": os.environ | {HOST_VARIABLE: name},
            "text": True,
        }
        for name, program in zip(names, (_RECEIVE, _SEND), strict=True)
    )
    with subprocess.Popen(**receive, stdout=subprocess.PIPE) as receiver:
        try:
            receiver.stdout.readline()
            sent = subprocess.run(**send, capture_output=True, check=True, timeout=60)
        finally:
            receiver.kill()
    return 8e-6 * NUM_BYTES / json.loads(sent.stdout)


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            "Two hosts on one machine need Linux, and a process that may make network namespaces. "
            f"Received: `{' '.join(command)}` failed with {done.stderr.strip()!r}. Run it as root."
        )
