"""A job's secret, and proofs that one knows it, which do not show it.

Who asks for a proof sends a *nonce*, a random word that is used once. The answer is an HMAC of the
nonce and of what is said with it, so that neither can be used again, or for anything else.

References:
    Hugo Krawczyk et al., "HMAC: Keyed-Hashing for Message Authentication", RFC 2104, 1997.
"""

import hashlib
import hmac
import json
import secrets
from typing import Any

__all__ = ["Secret", "new_nonce"]

_NONCE_BYTES = 16


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
