"""Parses and checks worker addresses, `"host:port"`."""

import ipaddress
import re
from collections.abc import Iterable, Sequence

from tfparallel.cluster.config_error import shown

# Underscores violate the standard, but are common in cluster and container names.
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_DOTTED_NUMBERS = re.compile(r"[0-9.]+")
_MAX_PORT = 65535
_MAX_HOST = 253
_MAX_LABEL = 63


def split_address(address: str) -> tuple[str, int]:
    """Splits `"host:port"`; an IPv6 host is bracketed, `"[::1]:2222"`.

    Raises:
        ValueError: If the address is malformed.
    """
    try:
        return _split(address)
    except ValueError as error:
        raise ValueError(
            "An address must be host:port, or [host]:port for IPv6, with a port from 1 to "
            f"{_MAX_PORT}. Received: {address!r}; {error}. Example: node0.example.com:29400"
        ) from error


def join_address(host: str, port: int) -> str:
    """Joins a host and a port; brackets an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_place(addresses: Sequence[str], index: int) -> tuple[int, int]:
    """Finds a worker among those on its host, assuming one name per host.

    Returns:
        Its local rank, and the number of workers on its host.
    """
    hosts = [_canonical(split_address(address)[0]) for address in addresses]
    same_host = [other for other, host in enumerate(hosts) if host == hosts[index]]
    return same_host.index(index), len(same_host)


def address_problems(named: Iterable[tuple[str, object]]) -> list[str]:
    """Returns the problems of (name, address) pairs: malformed and duplicate addresses."""
    problems, owners = [], {}
    for name, address in named:
        if not isinstance(address, str):
            problems.append(f"{name} must be a string 'host:port', not {shown(address)}")
            continue
        try:
            host, port = _split(address)
        except ValueError as error:
            problems.append(f"{name}, {shown(address)}, is not a valid address: {error}")
            continue
        place = (_canonical(host), port)
        if place in owners:
            problems.append(
                f"{name} and {owners[place]} have the same address, {shown(address)}; "
                "each worker needs its own host or port"
            )
        owners.setdefault(place, name)
    return problems


def _split(address):
    """Like `split_address`, with a short error that only names the problem."""
    if not isinstance(address, str):
        raise ValueError("it is not a string")
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        raise ValueError("it has no port; it must be host:port")
    if not host:
        raise ValueError("it has no host; it must be host:port")
    bracketed = host.startswith("[") and host.endswith("]")
    if "://" in address:
        raise ValueError("it must be host:port, without a protocol prefix")
    if ":" in host and not bracketed:
        raise ValueError(
            f"its host has colons; write an IPv6 address in brackets, as in '[{host}]:{port}'"
        )
    host = host[1:-1] if bracketed else host
    if not (_is_of(ipaddress.IPv6Address, host) if bracketed else _is_host(host)):
        kind = "IPv6 address" if bracketed else "host name or IPv4 address"
        raise ValueError(f"{shown(host)} is not a valid {kind}")
    if not _PORT.fullmatch(port) or int(port) > _MAX_PORT:
        raise ValueError(f"its port must be a number from 1 to {_MAX_PORT}, not {shown(port)}")
    return host, int(port)


def _canonical(host):
    """Normalizes a host's spelling; all names of the loopback become one."""
    host = host.lower().removesuffix(".")
    if host in ("localhost", "localhost.localdomain"):
        return "127.0.0.1"
    return str(ipaddress.IPv6Address(host)) if ":" in host else host


def _is_host(host):
    if _DOTTED_NUMBERS.fullmatch(host):
        # All digits and dots: a mistyped IPv4 address rather than a name.
        return _is_of(ipaddress.IPv4Address, host)
    if len(host) > _MAX_HOST:
        return False
    labels = host.removesuffix(".").split(".")
    return all(len(label) <= _MAX_LABEL and _LABEL.fullmatch(label) for label in labels)


def _is_of(kind, host):
    try:
        kind(host)
    except ValueError:
        return False
    return True
