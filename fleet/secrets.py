"""Makes the files that the members of a fleet share: its secret, keys, and the users and rights of the two Redis
servers.

Each member reads what it needs and no more. Redis gets hashes of passwords. Its users:

    replica   the directory, and the KV; no commands that are dangerous to others
    gateway   of the directory only what routes turns; neither transcripts nor KV
    metrics   how much memory is used, and the like; no keys
    ray       of the directory the tables of Ray's head, so that another head goes on with them
    health    whether the server answers; needs no password

Redis' own user, `default`, is off.
"""

import contextlib
import json
import os
import secrets
from hashlib import sha256
from pathlib import Path

from reprise.app.tenancy.key_file import add_key

PRIVATE, FOR_GROUP = 0o600, 0o640
TENANT_SECRET, KEYS = "tenant_secret", "keys.toml"
CLIENT_KEY, PROMETHEUS_KEY, GRAFANA_PASSWORD = "client_key", "prometheus_key", "grafana_password"
RAY_TOKEN, RAY_PASSWORD = "ray_token", "ray_redis_password"
REDIS_FILES = ("directory.acl", "kv.acl", "replica.toml", "gateway.toml", "redis_passwords.json", RAY_PASSWORD)
"""The files that are made together, because they have passwords in common."""

# Sessions with their heads (r1:s), answers that lead to them (r1:c), allowances (r1:q) and places (r1:p) of keys. A
# transcript is r1:t.
_GATEWAY_KEYS = "%R~r1:born %R~r1:m %R~r1:ma ~r1:dr %R~r1:c:* ~r1:s:* ~r1:q:* ~r1:p:*"
_GATEWAY_MAY = (
    "+@connection +@transaction +time +get +mget +hget +hmget +hgetall +hset +exists +pexpire +pttl +persist "
    "+smembers +sadd +srem +zrange +zadd +zrem +zremrangebyscore"
)
_SCRIPTS = "+eval +evalsha +script|load +script|exists"
_NOTHING_DANGEROUS = "-@dangerous +info"  # `reprise doctor` reads how the server is set up


class SecretsExist(Exception):
    """Some of the files that belong together exist and some do not."""


def make_secrets(directory: Path, *, directory_host: str, kv_host: str) -> list[Path]:
    """Make the files that are missing, and return their paths. directory_host and kv_host: HOST:PORT of the two Redis
    servers. Raises SecretsExist, OSError, KeyFileError."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o750)
    missing = [name for name in REDIS_FILES if not (directory / name).exists()]
    if 0 < len(missing) < len(REDIS_FILES):
        raise SecretsExist(
            f"{directory} lacks {', '.join(missing)}, whose passwords stand in the others too; delete all of "
            f"{', '.join(REDIS_FILES)}, and restart every member afterwards"
        )
    made = []
    if not (directory / TENANT_SECRET).exists():
        made.append(_write(directory / TENANT_SECRET, secrets.token_hex(32), PRIVATE))
    for name, file, admin in (("client", CLIENT_KEY, False), ("prometheus", PROMETHEUS_KEY, True)):
        if not (directory / file).exists():
            key = add_key(directory / KEYS, name, admin=admin)
            made.append(_write(directory / file, key, FOR_GROUP if admin else PRIVATE))
    if not (directory / GRAFANA_PASSWORD).exists():
        made.append(_write(directory / GRAFANA_PASSWORD, secrets.token_urlsafe(24), FOR_GROUP))
    if not (directory / RAY_TOKEN).exists():
        made.append(_write(directory / RAY_TOKEN, secrets.token_hex(32), PRIVATE))
    if missing:
        replica, gateway, metrics, ray = (secrets.token_urlsafe(32) for _ in range(4))
        of_directory = f'[fleet]\nredis_url = "redis://{{user}}:{{password}}@{directory_host}/0"\n'
        of_kv = f'[cache]\nredis_url = "redis://replica:{replica}@{kv_host}/0"\n'
        texts = {
            "directory.acl": directory_acl(replica=replica, gateway=gateway, metrics=metrics, ray=ray),
            "kv.acl": kv_acl(replica=replica, metrics=metrics),
            "replica.toml": of_directory.format(user="replica", password=replica) + of_kv,
            "gateway.toml": of_directory.format(user="gateway", password=gateway),
            # As redis_exporter reads it: the address with the user, or in older versions without.
            "redis_passwords.json": json.dumps(
                {f"redis://{user}{host}": metrics for host in (directory_host, kv_host) for user in ("metrics@", "")}
            ),
            RAY_PASSWORD: ray,
        }
        for name, text in texts.items():
            is_ours = name.endswith(".toml") or name == RAY_PASSWORD
            made.append(_write(directory / name, text, PRIVATE if is_ours else FOR_GROUP))
    return made


def directory_acl(*, replica: str, gateway: str, metrics: str, ray: str) -> str:
    """Return the ACL file of the directory, for these passwords."""
    return _acl(
        metrics,
        _user("replica", replica, "~r1:* ~reprise:*", f"+@read +@write +@connection +@transaction +time {_SCRIPTS}"),
        _user("gateway", gateway, _GATEWAY_KEYS, f"{_GATEWAY_MAY} {_SCRIPTS}"),
        # Ray deletes DUMMY to learn whether this is a Redis cluster.
        _user("ray", ray, "~RAYreprise@* ~DUMMY", "+@read +@write +@connection +@transaction"),
    )


def kv_acl(*, replica: str, metrics: str) -> str:
    """Return the ACL file of the KV's Redis, for these passwords."""
    return _acl(metrics, _user("replica", replica, "~r1:k*", f"+@read +@write +@connection +time {_SCRIPTS}"))


def _acl(metrics: str, *users: str) -> str:
    off, health = "user default reset", "user health on nopass -@all +ping"
    may = "+ping +info +config|get +client|setname +latency|latest +latency|histogram +slowlog|get +slowlog|len"
    return "\n".join((off, health, f"user metrics on {_hash(metrics)} -@all {may}", *users, ""))


def _user(name: str, password: str, keys: str, may: str) -> str:
    return f"user {name} on {_hash(password)} {keys} -@all {may} {_NOTHING_DANGEROUS}"


def _hash(password: str) -> str:
    """Return the hash of a password in the form in which Redis takes it."""
    return f"#{sha256(password.encode()).hexdigest()}"


def _write(path: Path, text: str, mode: int) -> Path:
    """Write a new file, completely or not at all, and return its path. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "w", encoding="utf-8"
        ) as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
        os.link(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    return path
