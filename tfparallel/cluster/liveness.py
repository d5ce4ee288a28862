"""Whether a process that listens on an address is there, and when it has gone."""

import contextlib
import socket
import time

from tfparallel.cluster.address import split_address

__all__ = ["hold_until_gone", "is_there", "wait_for_server"]

_CONNECT_SECONDS = 3.0
# So often in a row is a connection refused by a process that has ended.
_REFUSALS, _REFUSED_SECONDS = 3, 0.2
# A host that does not answer at all is gone after this long.
_SILENCE_SECONDS = 15.0


def is_there(address: str) -> bool:
    """Whether somebody listens on an address just now."""
    with contextlib.suppress(OSError):
        socket.create_connection(split_address(address), _CONNECT_SECONDS).close()
        return True
    return False


def wait_for_server(address: str, deadline: float) -> bool:
    """Waits until somebody listens on an address.

    Args:
        address: `"host:port"`.
        deadline: Until when, as `time.monotonic()` counts.

    Returns:
        Whether somebody does.
    """
    while time.monotonic() < deadline:
        if is_there(address):
            return True
        time.sleep(0.1)
    return False


def hold_until_gone(address: str) -> None:
    """Holds connections to a process until nobody listens there any more.

    TensorFlow closes one that says nothing, so that the next must be tried; and on a busy host an
    answer may be slow, where a process that has ended refuses at once.
    """
    misses, seen = 0, time.monotonic()
    while misses < _REFUSALS and time.monotonic() - seen < _SILENCE_SECONDS:
        try:
            with socket.create_connection(split_address(address), _CONNECT_SECONDS) as connection:
                _listen(connection)
            misses, seen = 0, time.monotonic()
        except ConnectionRefusedError:
            misses += 1
            time.sleep(_REFUSED_SECONDS)
        except OSError:
            time.sleep(_REFUSED_SECONDS)


def _listen(connection: socket.socket) -> None:
    """Reads until the other side ends the connection, or has been silent: then ask anew."""
    connection.settimeout(_SILENCE_SECONDS)
    with contextlib.suppress(TimeoutError):
        while connection.recv(4096):
            pass
