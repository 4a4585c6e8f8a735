"""Collects the keys that the settings name, including those of the keys file."""

from reprise.app.settings.settings import GIB, Settings
from reprise.app.tenancy.key_file import follow_keys, load_keys
from reprise.app.tenancy.keyring import Key, KeyLimits, Keyring, digest_of


def make_keyring(settings: Settings) -> Keyring:
    """Return a keyring of all configured keys. Raises KeyFileError."""
    server, limits = settings.server, limits_of_keys(settings)
    keys = [] if server.keys_file is None else load_keys(server.keys_file.expanduser(), limits)
    return Keyring([*keys, *_keys_of_settings(settings)], local=limits)


async def follow_keys_file(settings: Settings, keyring: Keyring) -> None:
    """Follow changes of the keys file, if there is one, until cancelled."""
    if settings.server.keys_file is not None:
        fixed = _keys_of_settings(settings)
        path = settings.server.keys_file.expanduser()
        await follow_keys(path, limits_of_keys(settings), lambda keys: keyring.use([*keys, *fixed]))


def limits_of_keys(settings: Settings) -> KeyLimits:
    """Return the limits of a key for which the keys file sets none."""
    limits = settings.limits
    return KeyLimits(
        requests=limits.key_requests,
        requests_per_minute=limits.key_requests_per_minute,
        tokens_per_minute=limits.key_tokens_per_minute,
        sessions=limits.key_sessions,
        cache_bytes=int(limits.key_cache_gib * GIB),
    )


def _keys_of_settings(settings: Settings) -> list[Key]:
    server, limits = settings.server, limits_of_keys(settings)
    keys = [Key(digest_of(key), limits=limits) for key in server.api_keys]
    return keys + [Key(digest_of(key), is_admin=True, limits=limits) for key in server.admin_keys]
