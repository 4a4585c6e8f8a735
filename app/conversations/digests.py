"""Makes the digests by which conversations are found."""

import json
from hashlib import blake2b
from typing import Any

Message = dict[str, Any]

DIGEST_BYTES = 16
REASONING = ("reasoning_content", "reasoning", "thinking")
_NEVER_RENDERED = frozenset(("annotations", "cache_control", "refusal"))
_VERBATIM = frozenset(("arguments", "parameters"))  # a call's arguments and a tool's schema
_ENCODE = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode  # json.dumps would build one per call


def digest(*fields: bytes | str | int) -> bytes:
    """Return a digest of typed, length-prefixed fields, so that no two different lists of fields have the same."""
    parts: list[bytes] = []
    for value in fields:
        if isinstance(value, bytes):
            kind, data = b"b", value
        elif isinstance(value, str):
            kind, data = b"s", value.encode("utf-8", "surrogatepass")
        else:
            kind, data = b"i", value.to_bytes(8, "little", signed=True)
        parts += (kind, len(data).to_bytes(8, "little"), data)
    return blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


def link(chain: bytes, message: Message) -> bytes:
    """Return the digest of a list of messages that ends with `message`. chain: the digest of the messages before it."""
    return digest("message", chain, canonical(message))


def without_reasoning(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in REASONING}


def canonical(value: object) -> str:
    """Return a value as JSON, the same for values that mean the same: keys are sorted, and objects lose fields that are
    null, [] or {} and those that no template renders, because clients add and drop such fields freely. The arguments of
    calls and the schemas of tools keep all fields: another value there is another call or another tool."""
    return _ENCODE(_without_empty(value))


def _without_empty(value: object) -> object:
    if isinstance(value, dict):
        if all(type(item) is str for item in value.values()) and _NEVER_RENDERED.isdisjoint(value):
            return value  # nothing to leave out: most messages
        return {
            name: item if name in _VERBATIM else _without_empty(item)
            for name, item in value.items()
            if name not in _NEVER_RENDERED and item is not None and item != [] and item != {}
        }
    if isinstance(value, list):
        return [_without_empty(item) for item in value]
    return value
