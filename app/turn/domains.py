"""Names the domains in which transcripts are kept: a client with another salt must not even learn that another had the
same conversation."""

from reprise.engine.messages import salt_of


def domain_of(tenant: str, salt: str) -> str:
    """Return the domain of a tenant's requests with this salt: the name under which their transcripts are kept apart
    from others. salt: what `reprise.engine.messages.salt_of` returns."""
    return f"{tenant}/{salt}" if salt else tenant


def domains_of(tenant: str, cache_salt: str) -> tuple[str, str]:
    """Return the domains of a tenant's requests with this `cache_salt`, one for each `kv_quality`."""
    usual, exact = (domain_of(tenant, salt_of(cache_salt, is_exact=is_exact)) for is_exact in (False, True))
    return usual, exact
