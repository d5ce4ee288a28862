"""Is a TCP port free for TensorFlow, and if not, which process holds it.

TensorFlow's server listens on every address of the host (`[::]:port`), whatever
the address in TF_CONFIG says, and reports a port that is taken only as "Could
not start gRPC server". The owner is read from Linux's /proc: the port's line in
/proc/net/tcp bears the inode of a socket, which /proc/*/fd links to a process.
Elsewhere, and for processes of other users, it stays unnamed.

```python
from tfparallel.cluster import port_owner

port_owner.is_free(38123)  # False
port_owner.owner(38123)    # 'process 4711 (python -m http.server 38123)'
```
"""

import contextlib
import errno
import os
import pathlib
import shlex
import socket

__all__ = ["is_free", "owner"]

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENING = "0A"
_MAX_COMMAND = 100


def is_free(port: int) -> bool:
    """Whether a server could listen on this port, on every address of this host.

    A connection that is closing (TIME_WAIT) does not count: TensorFlow's server
    binds over it.

    Args:
        port: The number of the port, 1 to 65535.

    Returns:
        True if nothing holds the port on any IPv4 address.

    Raises:
        PermissionError: If this user may not listen on the port at all.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # Nobody can connect: the socket is bound, but does not listen.
            probe.bind(("", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def owner(port: int) -> str | None:
    """Names the process that holds a TCP port of this host.

    Args:
        port: The number of the port, 1 to 65535.

    Returns:
        `"process 4711 (its command line)"`; `"another process"` where the
        system does not show whose the socket is; None if the port is free.
    """
    inodes = _inodes(port)
    for inode in inodes:
        pid = _process_with(inode)
        if pid is not None:
            return f"process {pid} ({_command(pid)})"
    if inodes:
        return "another process"
    return None if is_free(port) else "another process"


def _inodes(port):
    """The inodes of the sockets bound to the port, those that listen first."""
    found = []
    for table in _TABLES:
        try:
            lines = pathlib.Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            local_port, state, inode = fields[1].rpartition(":")[2], fields[3], fields[9]
            # Inode 0: a connection that is closing, and belongs to nobody.
            if int(local_port, 16) == port and inode != "0":
                found.append((state != _LISTENING, inode))
    return [inode for _, inode in sorted(found)]


def _process_with(inode):
    """The first process that has the socket open, as far as this user may look."""
    name = f"socket:[{inode}]"
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        # A process may end meanwhile, close a descriptor, or be another user's.
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{descriptor}") == name:
                        return pid
    return None


def _command(pid):
    """A process's command line, on one line and cut to a readable length."""
    try:
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return "which has ended"
    line = " ".join(shlex.join(word for word in words if word).split())
    return f"{line[:_MAX_COMMAND]}..." if len(line) > _MAX_COMMAND else line
