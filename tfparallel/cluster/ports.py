"""TCP ports: finds free ports, the owner of a port, and whether a server listens at an address.

TensorFlow's server listens on every address of the host (`[::]:port`), regardless of the address in
TF_CONFIG, and reports a taken port only as "Could not start gRPC server". The owner is read from
Linux's /proc: the port's line in /proc/net/tcp has the inode of a socket, which /proc/*/fd links to
a process. On other systems, and for processes of other users, it is unnamed.

```python
from tfparallel.cluster import ports

ports.is_free(38123)  # False
ports.owner(38123)    # 'process 4711 (python -m http.server 38123)'
```
"""

import collections
import contextlib
import errno
import os
import pathlib
import random
import shlex
import socket
import sys
import time

from tfparallel.cluster.address import split_address

# Below the ephemeral ports: an outgoing connection must not take a port in the seconds until the
# worker binds it.
_RANGE = range(20000, 32768)
_NUM_TRIES = 200
# Until a worker has imported TensorFlow and listens, nobody else shall choose its port.
_RESERVED_SECONDS = 120.0
_reservations: collections.deque[tuple[float, socket.socket]] = collections.deque()
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENING = "0A"
_MAX_COMMAND = 100
_CONNECT_SECONDS = 3.0
# A process has ended after this many refused connections in a row.
_REFUSALS, _REFUSED_SECONDS = 3, 0.2
# A host that does not answer at all counts as lost after this long.
_SILENCE_SECONDS = 15.0


def free_ports(num_ports: int) -> list[int]:
    """Finds ports that are free on all addresses of this host.

    On Linux, no process of this host that calls this finds the same ports for two minutes.

    Raises:
        RuntimeError: If there are too few.
    """
    # From the system's entropy: launchers that seed Python alike must choose different ports.
    choose = random.SystemRandom()
    with contextlib.ExitStack() as open_sockets:
        ports = []
        tries = choose.sample(_RANGE, min(len(_RANGE), _NUM_TRIES + num_ports))
        # Port 0 lets the system choose.
        for port in [*tries, *[0] * num_ports]:
            if len(ports) == num_ports:
                break
            # All stay bound until the last is found, to avoid duplicates. The address is that of
            # all interfaces, which TensorFlow binds.
            probe = open_sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                _reserve(probe.getsockname()[1])
                ports.append(probe.getsockname()[1])
    if len(ports) < num_ports:
        raise RuntimeError(
            f"This host has too few free ports; {num_ports} are required. Received: {len(ports)}. "
            "Stop other servers, or start fewer workers."
        )
    return ports


def _reserve(port):
    """Takes the port's name, which Linux frees when this process ends, or a later call does.

    Raises:
        OSError: If the name is taken.
    """
    now = time.monotonic()
    while _reservations and _reservations[0][0] < now - _RESERVED_SECONDS:
        _reservations.popleft()[1].close()
    if sys.platform == "linux":
        reservation = socket.socket(socket.AF_UNIX)
        _reservations.append((now, reservation))
        reservation.bind(f"\0tfparallel-port-{port}")


def is_free(port: int) -> bool:
    """Whether a server could listen on this port, on every IPv4 address of this host.

    A closing connection (TIME_WAIT) does not count: TensorFlow's server binds over it.

    Raises:
        PermissionError: If this user may not listen on the port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # No caller can connect: the socket is bound, but does not listen.
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def owner(port: int) -> str | None:
    """Returns the process that holds a port of this host, if visible; None if it is free."""
    inodes = _inodes(port)
    for inode in inodes:
        pid = _process_with(inode)
        if pid is not None:
            return f"process {pid} ({_command(pid)})"
    return None if not inodes and is_free(port) else "another process"


def is_there(address: str) -> bool:
    """Whether a server listens at an address, "host:port", now."""
    with contextlib.suppress(OSError):
        socket.create_connection(split_address(address), _CONNECT_SECONDS).close()
        return True
    return False


def wait_for_server(address: str, deadline: float) -> bool:
    """Waits for a server at an address, until a monotonic time; returns whether it came up."""
    while time.monotonic() < deadline:
        if is_there(address):
            return True
        time.sleep(0.1)
    return False


def hold_until_gone(address: str) -> None:
    """Holds a connection to a server until the server ends.

    TensorFlow closes a silent connection, so this reconnects. A busy host may answer slowly, but a
    process that has ended refuses at once.
    """
    misses, last_answer = 0, time.monotonic()
    while misses < _REFUSALS and time.monotonic() - last_answer < _SILENCE_SECONDS:
        try:
            with socket.create_connection(split_address(address), _CONNECT_SECONDS) as connection:
                _listen(connection)
            misses, last_answer = 0, time.monotonic()
        except ConnectionRefusedError:
            misses += 1
            time.sleep(_REFUSED_SECONDS)
        except OSError:
            time.sleep(_REFUSED_SECONDS)


def _listen(connection):
    """Reads until the peer closes the connection, or has been silent for too long."""
    connection.settimeout(_SILENCE_SECONDS)
    with contextlib.suppress(TimeoutError):
        while connection.recv(4096):
            pass


def _inodes(port):
    """Returns the inodes of the sockets bound to the port, listening ones first."""
    sockets = []
    for table in _TABLES:
        try:
            lines = pathlib.Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            local_port, state, inode = fields[1].rpartition(":")[2], fields[3], fields[9]
            # Inode 0: a closing connection, which belongs to no process.
            if int(local_port, 16) == port and inode != "0":
                sockets.append((state != _LISTENING, inode))
    return [inode for _, inode in sorted(sockets)]


def _process_with(inode):
    """Returns the first process that has the socket open and is visible to this user."""
    name = f"socket:[{inode}]"
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        # A process may end meanwhile, close a descriptor, or belong to another user.
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{descriptor}") == name:
                        return pid
    return None


def _command(pid):
    """Returns a process's command line, on one line and cut to a readable length."""
    try:
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return "which has ended"
    line = " ".join(shlex.join(word for word in words if word).split())
    return f"{line[:_MAX_COMMAND]}..." if len(line) > _MAX_COMMAND else line
