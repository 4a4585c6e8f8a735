"""Maps bearer keys to tenants."""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

LOCAL_TENANT = "local"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key. 0 is no limit, except for `requests`, where 0 means the share that every tenant may
    use."""

    requests: int = 0  # answers in progress
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    sessions: int = 0
    cache_bytes: int = 0


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Key:
    """The stored form of a key: its digest, by which the server recognises the key without knowing it, and its
    rights."""

    digest: bytes
    is_admin: bool = False
    limits: KeyLimits = NO_LIMITS
    is_exact: bool = False  # none of its KV may go through a lossy codec
    ttft_ms: float | None = None  # target for the first token of its requests that name none


def digest_of(key: str) -> bytes:
    """Hash a key. Keys are random, so one round of a fast hash reveals nothing about them."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keyring:
    """A set of bearer keys, against which the key of a request is checked. The time of a check depends neither on the
    key nor on which stored key it resembles."""

    def __init__(self, keys: Iterable[Key], *, local: KeyLimits = NO_LIMITS) -> None:
        """Set up. local: the limits of all clients, if no keys are configured. If a key is given twice, the last entry
        counts."""
        self.use(keys)
        self.wants_keys = bool(self._keys)  # never reset: when the last key is removed, nobody gets in
        self._local = local

    def use(self, keys: Iterable[Key]) -> None:
        """Replace all keys by these."""
        self._keys = {_tenant(key.digest): key for key in keys}
        self._digests = [key.digest for key in self._keys.values()]

    def __len__(self) -> int:
        return len(self._keys)

    def is_admin(self, tenant: str) -> bool:
        """Return whether a tenant may see all tenants' data. If no keys are needed, every client may."""
        return not self.wants_keys or (tenant in self._keys and self._keys[tenant].is_admin)

    def knows(self, tenant: str) -> bool:
        """Return whether the tenant's key is still valid, so that work which the tenant has begun may continue."""
        return not self.wants_keys or tenant in self._keys

    def limits(self, tenant: str) -> KeyLimits:
        return self._keys[tenant].limits if tenant in self._keys else self._local

    def is_exact(self, tenant: str) -> bool:
        """Return whether all requests of this tenant count as `kv_quality` "exact", which means that no codec changes
        their KV."""
        return tenant in self._keys and self._keys[tenant].is_exact

    def ttft_ms(self, tenant: str) -> float | None:
        """Return the target for the first token of a tenant's requests that name none, in milliseconds from the
        arrival; None: they have no target."""
        return self._keys[tenant].ttft_ms if tenant in self._keys else None

    def tenant(self, authorization: str | None) -> str | None:
        """Return the tenant that an Authorization header belongs to; None if its key is not valid."""
        if not self.wants_keys:
            return LOCAL_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        digest = digest_of(key.strip())
        # compares with all keys, so the time does not depend on the match
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            return None
        return _tenant(digest)


def _tenant(digest: bytes) -> str:
    return digest.hex()[:16]
