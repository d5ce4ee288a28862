"""Hosts on one machine: network namespaces with a switch between them. Linux, as root.

    host 0, 10.78.0.1  ── wire ──┐
    host 1, 10.78.0.2  ── wire ──┼── switch
    host 2, 10.78.0.3  ── wire ──┘

Each host has a /dev/shm of its own, so that programs do not take two for one; and each wire a rate,
and may be cut and mended. Between a host and the switch may be a gateway that translates addresses
(NAT): then the address above is the gateway's, and the host knows itself as 192.168.0.2 alone.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

WIRE = "wire"
_TOOLS = ("ip", "tc", "unshare")
_PRIVATE, _GATEWAY = "192.168.0.2", "192.168.0.1"  # The same behind each gateway, as at homes.
# To the host what is for the gateway; and what comes from the host is from the gateway, also what
# the host sends to itself by the gateway's address.
_TRANSLATION = """\
table ip nat {{
    chain to {{ type nat hook prerouting priority -100; ip daddr {address} dnat to {private}; }}
    chain from {{ type nat hook postrouting priority 100; ip saddr {private} snat to {address}; }}
}}
"""
# Each part gives its process on to the next, so that a signal reaches the command itself.
_ON_HOST = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'


class Hosts:
    """The hosts of one test.

    Attributes:
        addresses: Of each host.
    """

    def __init__(self, names: list[str]):
        self._names = names
        self.addresses = [f"10.78.0.{index + 1}" for index in range(len(names))]

    def command(self, host: int, *command: str) -> list[str]:
        """Returns what runs a command on a host."""
        there = ["ip", "netns", "exec", self._names[host], "unshare", "--mount"]
        return [*there, "sh", "-c", _ON_HOST, "sh", *map(str, command)]

    def cut(self, host: int) -> None:
        """Takes a host's wire down."""
        _run("ip", "-n", self._names[host], "link", "set", WIRE, "down")

    def mute(self, host: int) -> None:
        """Has a host's wire carry nothing from it; what comes to it still does."""
        _run("tc", "-n", self._names[host], *f"qdisc replace dev {WIRE} root pfifo limit 0".split())

    def mend(self, host: int) -> None:
        """Takes it up again."""
        _run("ip", "-n", self._names[host], "link", "set", WIRE, "up")

    def limit(self, rate: str) -> None:
        """Has each wire carry no more than a rate, "100mbit", from its host."""
        for name in self._names:
            shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            _run("tc", "-n", name, "qdisc", "replace", "dev", WIRE, "root", *shape)

    def also(self, host: int, address: str) -> None:
        """Gives a host a second address, on a network of its own that leads nowhere."""
        name = self._names[host]
        _run("ip", "-n", name, "link", "add", "other", "type", "veth", "peer", "name", "nowhere")
        _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "other")
        _run("ip", "-n", name, "link", "set", "other", "up")


@contextlib.contextmanager
def hosts(number: int, *, translated: Sequence[int] = ()) -> Iterator[Hosts]:
    """Makes hosts, and takes them down after.

    Args:
        number: How many.
        translated: Which of them are behind a gateway of their own.

    Raises:
        RuntimeError: If this process may not, with the reason.
    """
    tools = [*_TOOLS, *(["nft"] if translated else [])]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"hosts need the tools {', '.join(tools)}; missing: {missing}")
    switch = f"tfp_{os.getpid()}_switch"
    names = [f"tfp_{os.getpid()}_{index}" for index in range(number)]
    with contextlib.ExitStack() as stack:
        for name in (switch, *names):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        network = Hosts(names)
        for index, (name, address) in enumerate(zip(names, network.addresses, strict=True)):
            port = f"port{index}"
            if index in translated:
                gateway = f"{name}_gateway"
                _run("ip", "netns", "add", gateway)
                stack.callback(_run, "ip", "netns", "del", gateway)
                _put_behind(gateway, name, address)
                name = gateway
            ends = ["netns", name, "type", "veth", "peer", "name", port, "netns", switch]
            _run("ip", "link", "add", "name", WIRE, *ends)
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", WIRE)
            for device in ("lo", WIRE):
                _run("ip", "-n", name, "link", "set", device, "up")
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
            _run("ip", "-n", switch, "link", "set", port, "up")
        yield network


def _put_behind(gateway, name, address):
    """Joins a host to its gateway, which translates between the host's address and its own."""
    ends = ["netns", name, "type", "veth", "peer", "name", "inside", "netns", gateway]
    _run("ip", "link", "add", "name", WIRE, *ends)
    for there, device, own_address in ((name, WIRE, _PRIVATE), (gateway, "inside", _GATEWAY)):
        _run("ip", "-n", there, "address", "add", f"{own_address}/24", "dev", device)
        for each in ("lo", device):
            _run("ip", "-n", there, "link", "set", each, "up")
    _run("ip", "-n", name, "route", "add", "default", "via", _GATEWAY)
    in_gateway = ["ip", "netns", "exec", gateway]
    _run(*in_gateway, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    _run(*in_gateway, "nft", "-f", "-", text=_TRANSLATION.format(address=address, private=_PRIVATE))


def _run(*command, text=None):
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}; it needs root")
