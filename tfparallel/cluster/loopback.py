"""Has TensorFlow's server of a job on one host listen to that host alone.

TensorFlow listens on all addresses (`[::]:port`), whatever its cluster says, and does what any
caller asks of it: it reads and writes files. Linux can bind a socket that listens already to a
device, here the loopback; then a call from another host is refused, as if nobody listened.

    before       device-bound sockets of our own on all other devices, which drop what comes
    the start    TensorFlow listens on [::]:port, beside them (SO_REUSEPORT)
    after        TensorFlow's socket is bound to `lo`; ours are closed

Without the first line another host had the moment between TensorFlow's start and our grip.
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

__all__ = ["OPEN", "are_loopback", "loopback_only", "moved_to_loopback", "network_name"]

_LOOPBACK = "lo"
_BIND_TO_DEVICE = getattr(socket, "SO_BINDTODEVICE", 25)
_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)  # A program of one BPF instruction, "return 0".
OPEN = "is open to other hosts and has no authentication"
_REUSE_PORT = "TF_GRPC_REUSE_PORT"  # TensorFlow's: its socket shares the port with ours.


def are_loopback(addresses: Sequence[str]) -> bool:
    """Whether all of these addresses, "host:port", are reached from their own host alone."""
    return all(_is_loopback(split_address(address)[0]) for address in addresses)


def moved_to_loopback(addresses: Sequence[str]) -> list[str]:
    """Returns the addresses by which processes of one network reach each other from within."""
    return [
        address if are_loopback([address]) else join_address("127.0.0.1", split_address(address)[1])
        for address in addresses
    ]


def network_name(addresses: Sequence[str]) -> str | None:
    """Names the network that this process sees, of a host or a container, if that can be told.

    The other processes of this network have the same name. It is None unless the addresses all have
    one host, and it is this one.
    """
    try:
        host, *others = {split_address(address)[0] for address in addresses}
        # To look all up may take long, and names that differ are of several hosts as a rule.
        if others or not _is_own(host):
            return None
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        status = os.stat("/proc/self/ns/net")
    except OSError:
        return None
    return f"{socket.gethostname()}/{boot}/{status.st_dev}/{status.st_ino}"


@contextlib.contextmanager
def loopback_only(port: int) -> Iterator[list[str]]:
    """Binds the sockets that begin to listen at a port inside to the loopback.

    Yields:
        A list, empty until the end; then it says how other hosts can or could reach the port, if
        they can or could: each text is a sentence whose subject is the port.
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
            # As a rule neither can be bound, and that TensorFlow's cannot says it all.
            if unguarded and not problems:
                problems.append(
                    "was open to other hosts for a moment while the server started; it is closed "
                    f"now (the port could not be guarded: {unguarded})"
                )


def _guards(port, stack):
    """Sockets at all devices but the loopback, ready to listen."""
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
    """Has the kernel drop what comes: a caller tries again a second later, and is refused then."""
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    pointer = struct.pack("HP", 1, ctypes.addressof(program))
    guard.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, pointer)


def _bind_to_loopback(port):
    """Binds this process's sockets that listen at a port; returns why not, if not."""
    is_found = False
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
                except (OSError, IndexError, TypeError):  # No socket, or not of TCP.
                    continue
                listener.setsockopt(socket.SOL_SOCKET, _BIND_TO_DEVICE, _LOOPBACK.encode())
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
                is_found = True
    except OSError as error:
        return [f"{OPEN}; its socket cannot be bound to the loopback ({error.strerror})"]
    return [] if is_found else [f"{OPEN}; its socket was not found"]


def _is_loopback(host):
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().removesuffix(".") in ("localhost", "localhost.localdomain")


def _is_own(host):
    """Whether a host's name or address is one of this host's."""
    family, _, _, _, location = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        try:
            tried.bind(location)
        except OSError:
            return False
    return True
