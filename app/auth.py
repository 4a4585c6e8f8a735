"""Who is asking: bearer keys, the tenant they stand for, and the secret that keeps tenants' blocks apart."""

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

LOCAL_TENANT = "local"
SECRET_BYTES = 32


class DamagedSecret(ValueError):
    """The file of the tenant secret does not hold one."""


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


def load_tenant_secret(state_dir: Path) -> bytes:
    """The persistent secret of this installation, made on first use. Raises OSError, or DamagedSecret.

    It keys every block hash, so nobody can tell from a hash, or from a hit, what another tenant said. A link from a
    complete temporary file publishes it: two servers that start at once agree on one secret.
    """
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = state_dir / "tenant_secret"
    if not path.exists():
        temporary = state_dir / f".tenant_secret.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(SECRET_BYTES))
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
        finally:
            temporary.unlink()
    secret = read_tenant_secret(state_dir)
    if secret is None:
        raise FileNotFoundError(errno.ENOENT, "it was deleted just now", str(path))
    return secret


def read_tenant_secret(state_dir: Path) -> bytes | None:
    """The secret that is there; None: no server has made one yet. Raises OSError, or DamagedSecret."""
    path = state_dir / "tenant_secret"
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(secret) != SECRET_BYTES:
        raise DamagedSecret(f"{path} is damaged: {SECRET_BYTES} bytes expected, {len(secret)} found; delete it")
    return secret
