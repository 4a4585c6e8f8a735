"""Who is asking: bearer keys, the tenant they stand for, and the secret that keeps tenants' blocks apart."""

import contextlib
import hashlib
import hmac
import os
import secrets
from pathlib import Path

LOCAL_TENANT = "local"
SECRET_BYTES = 32


class Keyring:
    """Checks bearer keys in a time that depends neither on the key nor on which of ours it resembles."""

    def __init__(self, *, api_keys: tuple[str, ...], admin_keys: tuple[str, ...] = ()) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in (*api_keys, *admin_keys)]
        self._admins = {_tenant(hashlib.sha256(key.encode()).digest()) for key in admin_keys}

    @property
    def wants_keys(self) -> bool:
        return bool(self._digests)

    def is_admin(self, tenant: str) -> bool:
        """Whether a tenant may see what is everybody's. Where no keys are needed, all who reach the server may."""
        return not self._digests or tenant in self._admins

    def tenant(self, authorization: str | None) -> str | None:
        """The tenant of an Authorization header, or None when it opens nothing."""
        if not self._digests:
            return LOCAL_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # no early way out
        if scheme.lower() != "bearer" or not any(matches):
            return None
        return _tenant(digest)


def _tenant(digest: bytes) -> str:
    return digest.hex()[:16]


def load_tenant_secret(state_dir: Path) -> bytes:
    """The persistent secret of this installation, made on first use. Raises OSError, or ValueError for a damaged file.

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
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{path} is damaged: {SECRET_BYTES} bytes expected, {len(secret)} found; delete it")
    return secret
