"""Decodes stored records of responses and conversations, which another program may have changed. Checks all of a record
before its use."""

from typing import Any, TypeVar

import msgspec

from reprise.app.conversations.response_store import MAX_ITEMS, Item, StoredConversation

MAX_DEPTH = 250  # levels of nesting, more than a request may have
T = TypeVar("T")


class BadRecord(Exception):
    """The record is not what was stored, or is stored under another name."""


class _Part(msgspec.Struct):
    text: str


class _Message(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    role: str
    content: list[_Part]


class _Reasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    content: list[_Part]
    summary: list[_Part] = []


class _Call(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class _CustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class _CustomOutput(msgspec.Struct, tag_field="type", tag="custom_tool_call_output"):
    id: str
    call_id: str
    output: Any


class _CallOutput(msgspec.Struct, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: Any


_Item = _Message | _Reasoning | _Call | _CallOutput | _CustomCall | _CustomOutput


class _Response(msgspec.Struct):
    id: str
    status: str
    background: bool
    output: list[_Item]


def response_of(data: object, response_id: str) -> dict[str, Any]:
    """Return the body of a response from its stored record, checked. Raises BadRecord if the record is damaged or that
    of another response."""
    body = _decode(data, dict[str, Any])
    if _shaped(body, _Response).id != response_id:
        raise BadRecord(f"it is that of {body['id']!r:.100}")
    return body


def items_of(data: object) -> list[Item]:
    """Decode a stored list of conversation items. Raises BadRecord."""
    items = _decode(data, list[dict[str, Any]])
    if len(items) > MAX_ITEMS:
        raise BadRecord(f"{len(items)} items")
    _shaped(items, list[_Item])
    return items


def item_of(data: object) -> Item:
    """Decode one stored item of a conversation. Raises BadRecord."""
    item = _decode(data, dict[str, Any])
    _shaped(item, _Item)
    return item


def conversation_of(created: object, metadata: object, conversation_id: str) -> StoredConversation:
    """Return a conversation made from the stored fields. Raises BadRecord."""
    return StoredConversation(conversation_id, _decode(created, int), _decode(metadata, dict[str, str]))


def text_of(data: object) -> str:
    """Decode the id of a response as Redis returns it. Raises BadRecord."""
    if not isinstance(data, bytes):
        raise BadRecord("a part of it is missing")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadRecord("a name in it is no text") from None


def _decode(data: object, kind: type[T]) -> T:
    if not isinstance(data, bytes):
        raise BadRecord("a part of it is missing")
    try:
        value = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRecord(str(error)) from None
    if _is_deeper(value, MAX_DEPTH):
        raise BadRecord(f"more than {MAX_DEPTH} levels")
    return value


def _shaped(value: object, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadRecord(str(error)) from None


def _is_deeper(value: object, most: int) -> bool:
    level: list[object] = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
