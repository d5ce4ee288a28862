"""How a launcher comes in at another's acceptor, and how each knows the other as its job's.

    launcher ──{"job": "train-17", "nonce": a}─────────────> acceptor
    launcher <──{"job": "train-17", "nonce": b}───────────── acceptor    or {"refused": its own job}
    launcher ──proof {"nnodes": 2, "ports": [...], ...}────> acceptor
    launcher <──proof {"nodes": [...], ...}───────────────── acceptor

Each message is a line of bounded size. A proof (secret.py) is of the nonces and of what stands
behind it; the job's token, which makes it, never crosses the wire. Without a proof what is said is
a reason for a person to read, and has no effect.
"""

import contextlib
import hashlib
import json
import socket
import time
from typing import Any

from tfparallel.cluster.secret import Secret, new_nonce

__all__ = [
    "HELLO_BYTES",
    "Call",
    "RefusedError",
    "Session",
    "encoded",
    "is_greeting",
    "is_job",
    "parsed",
    "read_line",
    "who_listens",
]

HELLO_BYTES = 1 << 16
# Who listens has proved nothing while its answer is read. The addresses of all workers fit into
# TF_CONFIG, of 128 KiB, and an answer, which names a host once, takes less than twice as much.
_ANSWER_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16
_MAX_WORD = 64
_PROOF_BYTES = 64  # Of hexadecimal digits.


class RefusedError(ConnectionError):
    """What listens there does not belong to the job.

    Attributes:
        job: The job that it says it belongs to; None if it says nothing of the kind.
    """

    def __init__(self, text: str, job: str | None = None):
        super().__init__(text)
        self.job = job


class Session:
    """What two launchers say to each other once each has named a nonce.

    Args:
        secret: The job's.
        job: Its name.
        nonces: The caller's, and the acceptor's.
    """

    def __init__(self, secret: Secret, job: str, nonces: tuple[str, str]):
        self._secret, self._said = secret, (job, *nonces)

    def sealed(self, speaker: str, message: bytes) -> bytes:
        """Returns the line to send.

        Args:
            speaker: `"caller"` or `"acceptor"`.
            message: What `encoded` returned.
        """
        return self._proof(speaker, message).encode() + b" " + message + b"\n"

    def opened(self, speaker: str, line: bytes) -> Any:
        """Returns the message of a line; None if the proof is wrong or it is no message."""
        proof, message = line[:_PROOF_BYTES].decode("latin-1"), line[_PROOF_BYTES + 1 : -1]
        digest = hashlib.sha256(message).hexdigest()
        if not self._secret.is_proof(proof, speaker, *self._said, digest):
            return None
        return parsed(message)

    def _proof(self, speaker, message):
        digest = hashlib.sha256(message).hexdigest()
        return self._secret.proof(speaker, *self._said, digest)


class Call:
    """A launcher's own side of a connection to an acceptor.

    Args:
        connected: The connection, which the caller closes.
        secret: The job's.
        job: Its name.
    """

    def __init__(self, connected: socket.socket, secret: Secret, job: str):
        self._socket, self._secret, self._job = connected, secret, job
        self._received = bytearray()
        self._session: Session | None = None

    def ask(self, hello: dict[str, Any], until: float) -> None:
        """Says who this launcher is.

        Args:
            hello: What JSON can hold.
            until: The deadline, as `time.monotonic()` counts.

        Raises:
            OSError: If there is no answer, or a `RefusedError`.
        """
        nonces = self.greet(until)
        self._session = Session(self._secret, self._job, nonces)
        self._send(self._session.sealed("caller", encoded(hello)), until)

    def greet(self, until: float) -> tuple[str, str]:
        """Names the job; returns the nonces of both. Errors as of `ask`, which calls it."""
        own = new_nonce()
        self._send(encoded({"job": self._job, "nonce": own}) + b"\n", until)
        line = self._line(until, HELLO_BYTES)
        if line is None:
            raise TimeoutError("no answer")
        challenge = parsed(line)
        if not is_greeting(challenge):
            raise self._refused(challenge)
        return own, challenge["nonce"]

    def answer(self, until: float) -> dict[str, Any] | None:
        """Returns the next message; None if none has come until then.

        Raises:
            OSError: If the connection ends, or a `RefusedError`.
        """
        line = self._line(until, _ANSWER_BYTES)
        if line is None:
            return None
        message = self._session.opened("acceptor", line)
        if not isinstance(message, dict):
            raise self._refused(parsed(line))
        return message

    def _send(self, data, until):
        self._socket.settimeout(max(until - time.monotonic(), 0.001))
        self._socket.sendall(data)

    def _line(self, until, max_bytes):
        while (remaining := until - time.monotonic()) > 0:
            self._socket.settimeout(remaining)
            line = read_line(self._socket, self._received, max_bytes)
            if line == b"":
                raise RefusedError("it hung up (no launcher, or one of another version)")
            if line is not None:
                return line
        return None

    def _refused(self, said):
        other = said.get("refused") if isinstance(said, dict) else None
        if not is_job(other):
            return RefusedError("what listens there is no launcher")
        if other == self._job:
            return RefusedError("the launcher there has another TFPARALLEL_JOB_TOKEN", other)
        return RefusedError(
            f"the launcher there is of the job {other!r}, and this one of {self._job!r}", other
        )


def who_listens(address: tuple[str, int], job: str, timeout_seconds: float) -> str | None:
    """Returns the name of the job whose acceptor is at an address; None if there is none.

    Args:
        address: The host and the port.
        job: The name of this launcher's job.
        timeout_seconds: How long to wait.
    """
    with contextlib.suppress(OSError), socket.create_connection(address, timeout_seconds) as there:
        try:
            Call(there, Secret(""), job).greet(time.monotonic() + timeout_seconds)
        except RefusedError as error:
            return error.job
        return job
    return None


def encoded(message: dict[str, Any]) -> bytes:
    """Returns a message as bytes, without the end of its line."""
    return json.dumps(message).encode()


def parsed(line: bytes) -> Any:
    """Returns what a line says; None if it is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def is_greeting(said: Any) -> bool:
    """Whether somebody names a job and a nonce."""
    return isinstance(said, dict) and is_job(said.get("job")) and _is_word(said.get("nonce"))


def is_job(name: Any) -> bool:
    """Whether a job can have this name: up to 64 printable characters of ASCII, no space."""
    return _is_word(name)


def _is_word(text):
    return (
        isinstance(text, str)
        and 0 < len(text) <= _MAX_WORD
        and text.isascii()
        and text.isprintable()
        and " " not in text
    )


def read_line(connected: socket.socket, received: bytearray, max_bytes: int) -> bytes | None:
    """Reads what has come of a line, and nothing behind it.

    Args:
        connected: The connection.
        received: What has come before, which grows, and is empty again behind a whole line.
        max_bytes: The longest line.

    Returns:
        The line; `b""` if there will be none, None while more must come.
    """
    try:
        # What follows the line is for another reader.
        seen = connected.recv(_CHUNK_BYTES, socket.MSG_PEEK)
        chunk = connected.recv(seen.find(b"\n") + 1 or len(seen))
    except (BlockingIOError, TimeoutError):
        return None
    except OSError:
        return b""
    received += chunk
    if not chunk or len(received) > max_bytes:
        return b""
    if not received.endswith(b"\n"):
        return None
    line = bytes(received)
    received.clear()
    return line
