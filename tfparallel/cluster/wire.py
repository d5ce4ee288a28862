"""What the launchers and the workers of a job say to each other over TCP: lines, and proofs.

    caller ──{"job": "train-17", "nonce": a, …}──> listener
    caller <──{"job": "train-17", "nonce": b, …}── listener    or {"refused": its own job}
    caller ──proof 0 {…}─────────────────────────> listener
    caller <──proof 0 {…}───────────────────────── listener    or {"refused": its own job}

A message is a JSON object on a line of bounded size: what comes in may come from anybody, and
nothing in it is ever executed. From the second line on each has its proof, an HMAC of both nonces
(random words that are used once), who speaks, the line's number, and what is said; so none can be
used again, or for anything else. A number may be left out, of a line that a signal kept from being
sent. The job's token, which makes the proof, never crosses the wire. Without a proof what is said
is a reason for a person to read, and has no effect.

Nothing here touches a socket. Launchers wait in a selector (channel.py), workers in an event loop
(messages.py).

References:
    Hugo Krawczyk et al., "HMAC: Keyed-Hashing for Message Authentication", RFC 2104, 1997.
"""

import hashlib
import hmac
import json
import secrets
from typing import Any

__all__ = [
    "MAX_BYTES",
    "Lines",
    "RefusedError",
    "Secret",
    "Session",
    "encoded",
    "framed",
    "greeting",
    "is_greeting",
    "is_of_this_version",
    "is_word",
    "new_nonce",
    "parsed",
    "refusal",
    "unproved",
]

# Of one message; what a worker or a launcher says of itself is well below 2 KiB.
MAX_BYTES = 1 << 16
_MAX_WORD = 64
_VERSION = 2  # Of what is said, and how.
_MAX_DIGITS = 9  # Of the number of a line.
_PROOF_BYTES = 64  # Of hexadecimal digits.
_NONCE_BYTES = 16


class RefusedError(ConnectionError):
    """The other side does not belong to the job, but to `job`, if it says so."""

    def __init__(self, text: str, job: str | None = None):
        super().__init__(text)
        self.job = job


class Lines:
    """The lines of what has come in, in pieces of any size."""

    def __init__(self):
        self._received = bytearray()

    def feed(self, data: bytes) -> None:
        """Takes in what has come."""
        self._received += data

    def next(self, max_bytes: int = MAX_BYTES) -> bytes | None:
        """Returns the next line, None while it is not whole; `ValueError` if it is too long."""
        end = self._received.find(b"\n")
        if (len(self._received) if end < 0 else end) > max_bytes:
            raise ValueError(f"A message of more than {max_bytes} bytes.")
        if end < 0:
            return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line


class Secret:
    """What the members of a job know, and strangers do not.

    Args:
        token: The text that all members have; "" where there is none, and a proof proves nothing.
    """

    def __init__(self, token: str):
        self._key = token.encode(errors="surrogatepass")

    def proof(self, *said: Any) -> str:
        """Returns the proof of what is said: of nonces, and of what JSON can hold."""
        text = json.dumps(said, sort_keys=True).encode()
        return hmac.digest(self._key, text, hashlib.sha256).hex()

    def is_proof(self, candidate: Any, *said: Any) -> bool:
        """Whether something that has come is that proof."""
        if not isinstance(candidate, str):
            return False
        try:
            expected = self.proof(*said).encode()
        except RecursionError:  # What has come is nested too deeply to be written again.
            return False
        # Bytes: `compare_digest` refuses text beyond ASCII.
        return hmac.compare_digest(candidate.encode(errors="surrogatepass"), expected)

    def derived(self, *said: Any) -> str:
        """Returns another secret, which all members can make, and which does not show this one."""
        return self.proof("derived", *said)[: 2 * _NONCE_BYTES]


def new_nonce() -> str:
    """Returns a random word."""
    return secrets.token_hex(_NONCE_BYTES)


class Session:
    """What two say to each other once each has named a nonce: first the caller's, in `nonces`."""

    def __init__(self, secret: Secret, job: str, nonces: tuple[str, str], *, is_caller: bool):
        self._secret, self._said = secret, (job, *nonces)
        speakers = ("caller", "listener")
        self._own, self._other = speakers if is_caller else reversed(speakers)
        self._next_sent = self._next_heard = 0  # Numbers of lines: none is believed twice.

    def sealed(self, message: bytes) -> bytes:
        """Returns the line to send, of what `encoded` returned."""
        digest = hashlib.sha256(message).hexdigest()
        number = self._next_sent
        self._next_sent += 1
        proof = self._secret.proof(self._own, *self._said, number, digest)
        return f"{proof} {number} ".encode() + message + b"\n"

    def opened(self, line: bytes) -> dict[str, Any] | None:
        """Returns the message of a line; None if the proof is wrong or it is no message."""
        proof, number, message = _taken_apart(line)
        digest = hashlib.sha256(message).hexdigest()
        if number < self._next_heard or not self._secret.is_proof(
            proof, self._other, *self._said, number, digest
        ):
            return None
        self._next_heard = number + 1
        return parsed(message)


def _taken_apart(line: bytes) -> tuple[str, int, bytes]:
    """The proof of a line, its number, -1 if it has none, and the message."""
    number, _, message = line[_PROOF_BYTES + 1 :].partition(b" ")
    is_number = number.isdigit() and len(number) <= _MAX_DIGITS
    return line[:_PROOF_BYTES].decode("latin-1"), int(number) if is_number else -1, message


def framed(message: dict[str, Any], session: Session | None) -> bytes:
    """Returns the line to send of a message; without a session, without proof."""
    data = encoded(message)
    return data + b"\n" if session is None else session.sealed(data)


def encoded(message: dict[str, Any]) -> bytes:
    """Returns a message as bytes, without the end of its line; errors as of `json.dumps`."""
    return json.dumps(message).encode()


def parsed(line: bytes) -> dict[str, Any] | None:
    """Returns what a line says; None if it is no JSON object."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def unproved(line: bytes) -> dict[str, Any]:
    """Returns what a line says whose proof is wrong, for a person to read; empty if nothing."""
    return parsed(_taken_apart(line)[2]) or {}


def greeting(job: str) -> dict[str, Any]:
    """Returns what each says first: its job, a nonce, and the version of what it will say."""
    return {"job": job, "nonce": new_nonce(), "version": _VERSION}


def is_greeting(said: dict[str, Any] | None) -> bool:
    """Whether somebody names a job and a nonce."""
    return said is not None and is_word(said.get("job")) and is_word(said.get("nonce"))


def is_of_this_version(said: dict[str, Any]) -> bool:
    """Whether somebody who greets speaks as this version of the package does."""
    return said.get("version") == _VERSION


def refusal(said: dict[str, Any] | None, job: str) -> RefusedError:
    """Returns the error for what answers a caller of a job without being of it."""
    other = said.get("refused") if said is not None else None
    if not is_word(other):
        return RefusedError("what listens there is no launcher")
    if other == job:
        return RefusedError("the launcher there has another TFPARALLEL_JOB_TOKEN", other)
    text = f"the launcher there is of the job {other!r}, and this one of {job!r}"
    return RefusedError(text, other)


def is_word(text: Any) -> bool:
    """Whether it is up to 64 printable characters of ASCII without a space, as a job's name is."""
    return (
        isinstance(text, str)
        and 0 < len(text) <= _MAX_WORD
        and text.isascii()
        and text.isprintable()
        and " " not in text
    )
