"""The authenticated wire protocol of a job, over TCP: between launchers, workers, MPI processes.

    caller ──{"job": "train-17", "nonce": a, …}──> listener
    caller <──{"job": "train-17", "nonce": b, …}── listener    or {"refused": its own job}
    caller ──proof 0 {…}─────────────────────────> listener
    caller <──proof 0 {…}───────────────────────── listener    or {"refused": its own job}

A message is a JSON object on a line of bounded size: input is untrusted, and never executed. From
the second line on, each line has a proof, an HMAC of both nonces (random words used once), the
sender's role, the line's number and the message; no line can be replayed or reused elsewhere. Line
numbers may have gaps: a signal may keep a line from being sent. The job's token, the key of the
HMAC, is never sent. A message without a valid proof has no effect; it can only explain an error.

Nothing here touches a socket (connection.py).

References:
    Hugo Krawczyk et al., "HMAC: Keyed-Hashing for Message Authentication", RFC 2104, 1997.
"""

import hashlib
import hmac
import json
import secrets
from typing import Any

# Of one message; the hello of a worker or a launcher is well below 2 KiB.
MAX_BYTES = 1 << 16
_MAX_WORD = 64
_VERSION = 2  # Of the protocol.
_MAX_DIGITS = 9  # Of a line number.
_PROOF_BYTES = 64  # Hexadecimal digits.
_NONCE_BYTES = 16


class RefusedError(ConnectionError):
    """The peer does not belong to this job; `job` is the one it names, or None."""

    def __init__(self, text: str, job: str | None = None):
        super().__init__(text)
        self.job = job


class Secret:
    """The shared secret of a job.

    Args:
        token: The text shared by all members; "" for none, in which case proofs are worthless.
    """

    def __init__(self, token: str):
        self._key = token.encode(errors="surrogatepass")

    def proof(self, *parts: Any) -> str:
        """Returns the proof (HMAC) of nonces and other JSON values."""
        text = json.dumps(parts, sort_keys=True).encode()
        return hmac.digest(self._key, text, hashlib.sha256).hex()

    def derived(self, *parts: Any) -> str:
        """Returns a secret that all members can derive, and that does not reveal this one."""
        return self.proof("derived", *parts)[: 2 * _NONCE_BYTES]


def new_nonce() -> str:
    """Returns a random word."""
    return secrets.token_hex(_NONCE_BYTES)


class Session:
    """Authenticates messages after the exchange of `nonces`, the caller's first."""

    def __init__(self, secret: Secret, job: str, nonces: tuple[str, str], *, is_caller: bool):
        self.job = job
        self._secret, self._handshake = secret, (job, *nonces)
        speakers = ("caller", "listener")
        self._role, self._peer_role = speakers if is_caller else reversed(speakers)
        self._next_sent = self._next_heard = 0  # Line numbers; each is accepted once.

    def sealed(self, message: bytes) -> bytes:
        """Returns the line to send for a message from `encoded`."""
        digest = hashlib.sha256(message).hexdigest()
        number = self._next_sent
        self._next_sent += 1
        proof = self._secret.proof(self._role, *self._handshake, number, digest)
        return f"{proof} {number} ".encode() + message + b"\n"

    def opened(self, line: bytes) -> dict[str, Any] | None:
        """Returns the message of a line; None if the proof is wrong or the message malformed."""
        proof, number, message = _split_line(line)
        digest = hashlib.sha256(message).hexdigest()
        expected = self._secret.proof(self._peer_role, *self._handshake, number, digest).encode()
        if number < self._next_heard or not hmac.compare_digest(proof, expected):
            return None
        self._next_heard = number + 1
        return parsed(message)


def _split_line(line: bytes) -> tuple[bytes, int, bytes]:
    """Splits a line into its proof, its number (-1 if it has none), and the message."""
    number, _, message = line[_PROOF_BYTES + 1 :].partition(b" ")
    is_number = number.isdigit() and len(number) <= _MAX_DIGITS
    return line[:_PROOF_BYTES], int(number) if is_number else -1, message


def framed(message: dict[str, Any], session: Session | None) -> bytes:
    """Returns the line to send for a message; without a session, without a proof."""
    data = encoded(message)
    return data + b"\n" if session is None else session.sealed(data)


def encoded(message: dict[str, Any]) -> bytes:
    """Returns a message as bytes, without a newline; raises the errors of `json.dumps`."""
    return json.dumps(message).encode()


def parsed(line: bytes) -> dict[str, Any] | None:
    """Parses a line; None if it is not a JSON object."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def unproved(line: bytes) -> dict[str, Any]:
    """Returns the message of a line with a wrong proof, for an error; empty if malformed."""
    return parsed(_split_line(line)[2]) or {}


def greeting(job: str) -> dict[str, Any]:
    """Returns each side's first message: its job, a nonce, and the protocol version."""
    return {"job": job, "nonce": new_nonce(), "version": _VERSION}


def is_greeting(message: dict[str, Any] | None) -> bool:
    """Whether a message has a valid job name and nonce."""
    return message is not None and is_word(message.get("job")) and is_word(message.get("nonce"))


def is_of_this_version(message: dict[str, Any]) -> bool:
    """Whether a greeting has this protocol version."""
    return message.get("version") == _VERSION


def refusal(answer: dict[str, Any] | None, job: str) -> RefusedError:
    """Returns the error for a listener that does not belong to the caller's job."""
    other = answer.get("refused") if answer is not None else None
    if not is_word(other):
        return RefusedError("the listener there is not a launcher")
    if other == job:
        return RefusedError("the launcher there has a different TFPARALLEL_JOB_TOKEN", other)
    text = f"the launcher there belongs to job {other!r}, and this one to job {job!r}"
    return RefusedError(text, other)


def is_word(text: Any) -> bool:
    """Whether it is 1 to 64 printable ASCII characters without a space, as a job name must be."""
    return (
        isinstance(text, str)
        and 0 < len(text) <= _MAX_WORD
        and text.isascii()
        and text.isprintable()
        and " " not in text
    )
