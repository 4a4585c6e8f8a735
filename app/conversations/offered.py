"""Defines the tools of a request together with the key by which they are kept."""

from dataclasses import dataclass
from typing import Any

import msgspec

from reprise.app.conversations.digests import canonical, digest

MAX_LIST_BYTES = 1 << 20  # a longer list of tools is not kept

Tools = list[dict[str, Any]]

_sorted = msgspec.json.Encoder(order="sorted").encode  # ten times as fast as the standard library's


@dataclass(frozen=True, slots=True)
class Offered:
    """The tools of a request, with the keys of their JSON objects in the order in which the template renders them."""

    key: bytes  # the same for all lists of a tenant that are equal as JSON
    tools: Tools
    canonical: str  # `canonical(tools)`
    num_bytes: int  # length of the list as JSON

    @classmethod
    def of(cls, tools: Tools, *, tenant: str) -> "Offered":
        key, num_bytes = key_of(tools, tenant=tenant)
        return cls(key, tools, canonical(tools), num_bytes)


def key_of(tools: Tools, *, tenant: str) -> tuple[bytes, int]:
    """Return (key under which transcripts store this list of tools of the tenant, length of the list as JSON in bytes).
    The order of keys in the tools' JSON objects changes neither."""
    text = _sorted(tools)
    return digest("tools", tenant, text), len(text)
