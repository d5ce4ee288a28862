"""Restricts TensorFlow's server to the loopback in a single-host job.

TensorFlow listens on all addresses (`[::]:port`), whatever its cluster spec, and serves any caller,
including reads and writes of files. Linux can bind a listening socket to a device, here the
loopback; connections from other hosts are then refused, as if nothing listened.

    before       our guard sockets, bound to all other devices, drop incoming packets
    start        TensorFlow listens on [::]:port, beside them (SO_REUSEPORT)
    after        TensorFlow's socket is bound to `lo`; the guards are closed

Without the guards, another host could connect between TensorFlow's start and the binding.
"""

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence

from tfparallel.cluster.address import join_address, split_address

_LOOPBACK = "lo"
_BIND_TO_DEVICE = getattr(socket, "SO_BINDTODEVICE", 25)
_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)  # A program of one BPF instruction, "return 0".
OPEN = "is open to other hosts and has no authentication"
_REUSE_PORT = "TF_GRPC_REUSE_PORT"  # TensorFlow's: its socket shares the port with ours.


def are_loopback(addresses: Sequence[str]) -> bool:
    """Whether all addresses, "host:port", can be reached only from their own host."""
    return all(_is_loopback(split_address(address)[0]) for address in addresses)


def moved_to_loopback(addresses: Sequence[str]) -> list[str]:
    """Returns the loopback form of addresses, for processes in one network namespace."""
    return [
        address if are_loopback([address]) else join_address("127.0.0.1", split_address(address)[1])
        for address in addresses
    ]


def network_name(addresses: Sequence[str]) -> str | None:
    """Returns a name for this process's network namespace, of a host or a container.

    All processes in the namespace get the same name. None unless all addresses have one host, and
    it is this one.
    """
    try:
        host, *others = {split_address(address)[0] for address in addresses}
        # Different names usually mean several hosts, and looking all of them up may be slow.
        if others or not _is_this_host(host):
            return None
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        status = os.stat("/proc/self/ns/net")
    except OSError:
        return None
    return f"{socket.gethostname()}/{boot}/{status.st_dev}/{status.st_ino}"


@contextlib.contextmanager
def loopback_only(port: int) -> Iterator[list[str]]:
    """Binds sockets that start to listen on a port inside the block to the loopback.

    Yields:
        A list, filled on exit with the ways in which other hosts can or could reach the port: each
        text is a predicate whose subject is the port.
    """
    problems: list[str] = []
    before = os.environ.get(_REUSE_PORT)
    unguarded = ""
    with contextlib.ExitStack() as stack:
        try:
            for guard in _guards(port, stack):
                guard.listen(1)
            os.environ[_REUSE_PORT] = "1"
        except OSError as error:
            unguarded = str(error.strerror or error)
            stack.close()
        try:
            yield problems
        finally:
            os.environ.pop(_REUSE_PORT, None)
            if before is not None:
                os.environ[_REUSE_PORT] = before
            problems += _bind_to_loopback(port)
            # Usually both fail together, and the problem of TensorFlow's socket is enough.
            if unguarded and not problems:
                problems.append(
                    "was open to other hosts for a moment while the server started; it is closed "
                    f"now (the port could not be guarded: {unguarded})"
                )


def _guards(port, stack):
    """Yields sockets bound to all devices except the loopback, ready to listen."""
    for _, device in socket.if_nameindex():
        if device == _LOOPBACK:
            continue
        for family, anywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            try:
                guard = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            except OSError:  # A host without IPv6.
                continue
            guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            guard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            guard.setsockopt(socket.SOL_SOCKET, _BIND_TO_DEVICE, device.encode())
            _drop_all(guard)
            if family == socket.AF_INET6:
                guard.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            guard.bind((anywhere, port))
            yield guard


def _drop_all(guard):
    """Makes the kernel drop incoming packets: callers retry a second later, and are refused."""
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    pointer = struct.pack("HP", 1, ctypes.addressof(program))
    guard.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, pointer)


def _bind_to_loopback(port):
    """Binds this process's listening sockets on a port to the loopback; returns the problems."""
    is_bound = False
    try:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.ExitStack() as stack:
                try:
                    if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                        continue  # `socket.socket` would raise, and leave the copy open.
                    listener = stack.enter_context(socket.socket(fileno=os.dup(int(name))))
                    if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        continue
                    if listener.getsockname()[1] != port:
                        continue
                    if listener.getsockopt(socket.SOL_SOCKET, _BIND_TO_DEVICE, 16).strip(b"\0"):
                        continue  # A guard.
                except (OSError, IndexError, TypeError):  # Not a TCP socket.
                    continue
                listener.setsockopt(socket.SOL_SOCKET, _BIND_TO_DEVICE, _LOOPBACK.encode())
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
                is_bound = True
    except OSError as error:
        return [f"{OPEN}; its socket cannot be bound to the loopback ({error.strerror})"]
    return [] if is_bound else [f"{OPEN}; its socket was not found"]


def _is_loopback(host):
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().removesuffix(".") in ("localhost", "localhost.localdomain")


def _is_this_host(host):
    """Whether a host name or address belongs to this host."""
    family, _, _, _, location = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(location)
        except OSError:
            return False
    return True
