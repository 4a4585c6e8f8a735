"""The name by which a server is asked, where no key says who asks.

A page on the internet can have its own name resolve to a loopback address; the browser then takes our server for that
page's own and lets it read every answer. Such a name has a dot, and none of ours has.
"""

import ipaddress
from collections.abc import Collection


def is_ours(host_header: str, names: Collection[str]) -> bool:
    """host_header: `name`, `name:port` or `[address]:port`; empty where a client sent none, which no browser does.
    Ours are addresses, names without a dot, those below `localhost`, and `names` (lower case)."""
    name = _name(host_header).lower().removesuffix(".")
    return "." not in name or name in names or name.endswith(".localhost") or _is_address(name)


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
