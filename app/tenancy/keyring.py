"""Who is asking: bearer keys, and the tenants they stand for."""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

LOCAL_TENANT = "local"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What one key may have. 0: no limit of its own."""

    requests: int = 0  # answers under way
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    sessions: int = 0
    cache_bytes: int = 0


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Key:
    """All that is kept of a key: enough to know it again."""

    digest: bytes
    is_admin: bool = False
    limits: KeyLimits = NO_LIMITS


def digest_of(key: str) -> bytes:
    """Keys are random, so one round of a fast hash tells nothing of them."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keyring:
    """Checks bearer keys in a time that depends neither on the key nor on which of ours it resembles."""

    def __init__(self, keys: Iterable[Key], *, local: KeyLimits = NO_LIMITS) -> None:
        """local: the limits of everybody, where there are no keys. A key given twice has what it was given last."""
        self.use(keys)
        self.wants_keys = bool(self._keys)  # for ever: who takes the last key away lets nobody in
        self._local = local

    def use(self, keys: Iterable[Key]) -> None:
        """From now on these keys, and no others."""
        self._keys = {_tenant(key.digest): key for key in keys}
        self._digests = [key.digest for key in self._keys.values()]

    def __len__(self) -> int:
        return len(self._keys)

    def is_admin(self, tenant: str) -> bool:
        """Whether a tenant may see what is everybody's. Where no keys are needed, all who reach the server may."""
        return not self.wants_keys or (tenant in self._keys and self._keys[tenant].is_admin)

    def knows(self, tenant: str) -> bool:
        """Whether what a tenant has begun may go on: its key may have been taken away since."""
        return not self.wants_keys or tenant in self._keys

    def limits(self, tenant: str) -> KeyLimits:
        return self._keys[tenant].limits if tenant in self._keys else self._local

    def tenant(self, authorization: str | None) -> str | None:
        """The tenant of an Authorization header, or None when it opens nothing."""
        if not self.wants_keys:
            return LOCAL_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        digest = digest_of(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # no early way out
        if scheme.lower() != "bearer" or not any(matches):
            return None
        return _tenant(digest)


def _tenant(digest: bytes) -> str:
    return digest.hex()[:16]
