"""Free TCP ports of this host."""

import contextlib
import random
import socket

__all__ = ["free_ports"]

# Below the range from which systems take the ports of outgoing connections, so
# that none takes a port in the seconds until the worker binds it.
_RANGE = range(20000, 32768)
_NUM_TRIES = 200


def free_ports(num_ports: int) -> list[int]:
    """Finds ports on which nobody listens, on any address of this host.

    Args:
        num_ports: How many; all differ.

    Returns:
        The ports. They are free, not reserved: another program may still take one.

    Raises:
        RuntimeError: If there are not as many.
    """
    # From the system's entropy, so that launchers that seed Python alike differ.
    choose = random.SystemRandom()
    with contextlib.ExitStack() as held:
        ports = []
        tries = choose.sample(_RANGE, min(len(_RANGE), _NUM_TRIES + num_ports))
        # Port 0 lets the system choose.
        for port in [*tries, *[0] * num_ports]:
            if len(ports) == num_ports:
                break
            # All stay bound until the last is found, so that none is found twice. The
            # address is that of all interfaces, which TensorFlow binds.
            probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                ports.append(probe.getsockname()[1])
    if len(ports) < num_ports:
        raise RuntimeError(
            f"This host has too few free ports; {num_ports} are required. Received: {len(ports)}. "
            "Stop other programs that listen, or start fewer workers."
        )
    return ports
