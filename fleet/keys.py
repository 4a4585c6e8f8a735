"""Names the keys of the directory in Redis, and seals their values, that is, adds a keyed digest to them.

Tenants and sessions appear as keyed digests, so no key holds a name and none needs escaping. Everything here is a
function of the fleet's secret and its arguments: no I/O, no clock.
"""

import hmac
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 16
SEAL_BYTES = 16
PREFIX = "r1:"  # begins every key; another layout takes another number

BORN = PREFIX + "born"  # random id of this data set; another one, or none: the directory was flushed
EPOCH = PREFIX + "epoch"  # the last epoch given out
CHECK = PREFIX + "check"  # a digest of the fleet's secret: a replica with another one may not join
MEMBERS = PREFIX + "m"  # hash: replica -> its last beat
BEATEN = PREFIX + "ma"  # sorted set: replica -> milliseconds of its last beat, by Redis' clock
DRAINED = PREFIX + "dr"  # set of the replicas to which gateways send nothing new, because an operator says so
FORGOTTEN = PREFIX + "x"  # sorted set: name of a deleted session -> epoch of its deletion
TRIMMED = PREFIX + "xl"  # the highest epoch that was trimmed from it


@dataclass(frozen=True, slots=True)
class SessionName:
    """The names of a session: its tenant, its id and its salt. Sessions of one id under different salts are different
    sessions, but are deleted together."""

    tenant: str
    session_id: str
    salt: str = ""


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """The names by which Redis knows one session of one model: the keys of its record and transcript, and its names in
    sets."""

    tenant: str  # digest of the tenant
    session: str  # digest of salt and session id
    name: str  # "tenant:name", digests of the tenant and of the session id without its salt: what is deleted together
    member: str  # "fingerprint:session": how the tenant's sets name the session

    @property
    def record(self) -> str:
        return record(self.tenant, self.member)

    @property
    def transcript(self) -> str:
        """The key of the rows of the session's transcript. It is not specific to a model: another model with the same
        template and tokenizer reads the same rows."""
        return f"{PREFIX}t:{self.tenant}:{self.session}"


class BadSeal(ValueError):
    """The bytes do not begin with the seal (`Keys.seal`) that a member of this fleet makes for this Redis key."""


class Keys:
    """A maker of Redis keys for one fleet, whose members share a secret."""

    def __init__(self, secret: bytes) -> None:
        self._key = blake2b(b"fleet directory", key=secret, digest_size=32).digest()
        self.check = self._digest("check")

    def tenant(self, tenant: str) -> str:
        return self._digest("tenant", tenant)

    def session(self, name: SessionName, *, fingerprint: str) -> SessionKeys:
        """Return the keys of a session. fingerprint: of the model whose KV the session has, in hex."""
        session = self._digest("session", name.tenant, name.salt, name.session_id)
        return SessionKeys(
            tenant=self.tenant(name.tenant),
            session=session,
            name=self.name(name.tenant, name.session_id),
            member=f"{fingerprint}:{session}",
        )

    def name(self, tenant: str, session_id: str) -> str:
        """Return the name that a deletion uses for the sessions of this id, with any salt and of any model."""
        return f"{self.tenant(tenant)}:{self._digest('name', tenant, session_id)}"

    def chain(self, tenant: str, digest: bytes) -> str:
        """Return the Redis key under which the session of a conversation is found. digest: of the conversation's
        messages up to and including an answer, or of a response's id (`response_digest`), from
        `reprise.fleet.identify`."""
        return f"{PREFIX}c:{self.tenant(tenant)}:{self._digest('chain', tenant, digest)}"

    def bucket(self, tenant: str, kind: str) -> str:
        """Return the key of a tenant's bucket. kind: `r` for requests a minute, `k` for tokens."""
        return f"{PREFIX}q:{self.tenant(tenant)}:{kind}"

    def seal(self, data: bytes, *, key: str) -> bytes:
        """Return the bytes with a seal before them: a digest, keyed with the fleet's secret, of the bytes and of `key`,
        the Redis key under which they will be stored."""
        return self._mac(data, key) + data

    def unseal(self, sealed: bytes, *, key: str) -> bytes:
        """Check the digest that `seal` has put before the bytes, and return the bytes without it. key: the Redis key
        under which they were stored. Raises BadSeal."""
        mac, data = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
        if not hmac.compare_digest(mac, self._mac(data, key)):
            raise BadSeal(f"{len(sealed)} bytes under {key!r:.80}")
        return data

    def _mac(self, data: bytes, key: str) -> bytes:
        name = key.encode()
        return blake2b(
            len(name).to_bytes(4, "little") + name + data, key=self._key, digest_size=SEAL_BYTES, person=b"seal"
        ).digest()

    def _digest(self, kind: str, *fields: str | bytes) -> str:
        """Return a digest of length-prefixed fields, so that no two different lists of fields have the same."""
        mac = blake2b(key=self._key, digest_size=DIGEST_BYTES, person=kind.encode())
        for field in fields:
            data = field if isinstance(field, bytes) else field.encode("utf-8", "surrogatepass")
            mac.update(len(data).to_bytes(8, "little") + data)
        return mac.hexdigest()


def places(tenant: str) -> str:
    """Return the Redis key of the leases that a tenant's running answers have. tenant: digest of the tenant's name."""
    return f"{PREFIX}p:{tenant}"


def record(tenant: str, member: str) -> str:
    """Return the Redis key of a session's record. tenant: digest of the tenant's name. member: `SessionKeys.member`."""
    fingerprint, _, session = member.partition(":")
    return f"{PREFIX}s:{fingerprint}:{tenant}:{session}"


def acknowledgements(epoch: int) -> str:
    """Return the Redis key of the set of members that have not yet carried out the deletion with this epoch."""
    return f"{PREFIX}d:{epoch}"
