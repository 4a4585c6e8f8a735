"""Checks the host name under which a server without API keys is addressed.

A web page can have its own host name resolve to a loopback address. The browser then treats our server as that page's
own and lets the page read every answer. Such a name ends in a domain that can be bought. Names without a dot do
not, nor do those in domains that are kept for private networks.
"""

import ipaddress
from collections.abc import Collection

_PRIVATE = (".localhost", ".internal", ".local", ".lan", ".home.arpa", ".test")
"""The domains that nobody can buy a name in: reserved, or answered on the local network alone."""


def is_ours(host_header: str, names: Collection[str]) -> bool:
    """Return whether a Host header names this server. host_header: `name`, `name:port` or `[address]:port`, or empty if
    the client sent none, which no browser does. Accepted are addresses, names without a dot, names in domains of
    private networks, and `names` (lower case)."""
    name = _name(host_header).lower().removesuffix(".")
    return "." not in name or name in names or name.endswith(_PRIVATE) or _is_address(name)


def _name(host_header: str) -> str:
    if host_header.startswith("["):
        return host_header[1:].partition("]")[0]
    return host_header.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
