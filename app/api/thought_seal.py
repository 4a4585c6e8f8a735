"""Seals thoughts, so that a client can keep one as a word of its own and bring it back in a later request.

Messages calls the seal a `signature`, Responses `encrypted_content`. It holds the thought and a MAC. It hides nothing,
since the client may read the thought beside it; the MAC tells ours from those of other servers.
"""

import base64
import binascii
import hmac
from hashlib import blake2b

_VERSION = b"rt1"
_MAC_BYTES = 16


class ThoughtSeal:
    """A maker and reader of seals. A seal is a text that holds a thought (the model's reasoning) and a MAC, so that a
    client can keep it and send the thought back unchanged. All servers that share a secret read each other's seals,
    also after a restart."""

    def __init__(self, secret: bytes) -> None:
        """Set up. secret: the tenant secret, from which the key of the MAC is derived."""
        self._key = blake2b(key=secret, digest_size=32, person=b"reprise thoughts").digest()

    def seal(self, thought: str) -> str:
        """Return the seal of a thought, in base64: always the same for the same thought."""
        data = thought.encode("utf-8", "replace")
        return base64.b64encode(_VERSION + self._mac(data) + data).decode()

    def open(self, seal: str) -> str | None:
        """Return the thought that a seal holds; None if the seal was made with another secret, or was changed."""
        try:
            sealed = base64.b64decode(seal, validate=True)
        except (binascii.Error, ValueError):
            return None
        start = len(_VERSION) + _MAC_BYTES
        mac, data = sealed[len(_VERSION) : start], sealed[start:]
        if not sealed.startswith(_VERSION) or not hmac.compare_digest(mac, self._mac(data)):
            return None
        return data.decode()

    def _mac(self, data: bytes) -> bytes:
        return blake2b(data, key=self._key, digest_size=_MAC_BYTES).digest()
