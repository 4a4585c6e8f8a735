"""Makes the content blocks of Anthropic's messages readable."""

from typing import Any

from reprise.app.schemas.past.parts import Losses, as_json, asked_at, content_of, line, readable, short_id

Block = dict[str, Any]
_TAKEN = {
    "user": frozenset({"text", "tool_result", "tool_use"}),
    "assistant": frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"}),
}
"""Maps a role to the blocks that the schema judges itself."""
_PLACES = {
    "tool_use": "assistant",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_result": "user",
}
"""Maps a block to the only role whose messages can have it. In the history another's calls and results become a text,
and its thoughts are left out."""
_TEXTS = ("text", "input_text", "output_text")


def blocks(messages: object, losses: Losses) -> object:
    """Return Anthropic's messages with content that the schema takes. Malformed messages stay as they are, so that the
    schema refuses them."""
    if not isinstance(messages, list):
        return messages
    asked = asked_at([message.get("role") if isinstance(message, dict) else None for message in messages])
    return [_message(message, losses, is_asked=place == asked) for place, message in enumerate(messages)]


def _message(message: object, losses: Losses, *, is_asked: bool) -> object:
    if not isinstance(message, dict):
        return message
    role, content = message.get("role"), message.get("content")
    if content is None and not is_asked:
        return {**message, "content": ""}
    if not isinstance(content, list):
        return {**message, "content": content_of(content, losses, field="messages", is_asked=is_asked)}
    taken = _TAKEN.get(role, frozenset({"text"})) if isinstance(role, str) else frozenset({"text"})
    settled: list[object] = []
    for place, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        kind = kind if isinstance(kind, str) else None
        if not is_asked and kind in _PLACES and role != _PLACES[kind]:
            if kind.startswith("tool"):
                settled.append({"type": "text", "text": _told(block, losses)})
            else:
                losses.add("messages", kind)
        elif kind == "tool_result":
            settled.append(_result(block, losses))
        elif kind == "thinking":
            settled.append(_thought(block))
        elif kind == "tool_use":
            settled.append(_call(block))
        elif kind == "redacted_thinking" and not isinstance(block.get("data"), str):
            losses.add("messages", kind)
        elif kind in taken and kind != "text":
            settled.append(block)
        else:
            found = readable([block], losses, field="messages", is_asked=is_asked)
            assert isinstance(found, list)
            is_apart = role == "assistant" and kind is not None and kind not in _TEXTS
            settled += _apart(found, place, len(content)) if is_apart else found
    return {**message, "content": settled}


def _told(block: Block, losses: Losses) -> str:
    """Return one line about a call, or a result, that stands in a message of the wrong role."""
    if block["type"] == "tool_use":
        return line(str(block.get("name")), block.get("input"))
    content = readable(block.get("content"), losses, field="messages", is_asked=False)
    texts = [part["text"] for part in content] if isinstance(content, list) else [content]
    return line("result", "\n".join(text if isinstance(text, str) else as_json(text) for text in texts))


def _apart(found: list[Any], place: int, count: int) -> list[Any]:
    """Put a text that stands for another block on a line of its own: the texts of an answer are joined as they are. A
    block without a text stays as it is, for the schema to judge."""
    before, after = "\n" if place else "", "\n" if place < count - 1 else ""
    return [
        {**block, "text": f"{before}{block['text']}{after}"} if isinstance(block.get("text"), str) else block
        for block in found
    ]


def _thought(block: Block) -> Block:
    """Return a thought, which may have come back without its text or its signature."""
    signature = block.get("signature")
    signed = signature if isinstance(signature, str) else None
    thought = block.get("thinking")
    return {**block, "thinking": thought if isinstance(thought, str) else "", "signature": signed}


def _call(block: Block) -> Block:
    """Return a call whose input is an object: one without an input has none, and another value is its one argument."""
    given = block.get("input")
    if not isinstance(given, dict):
        given = {} if given is None else {"input": given}
    return {**block, **_with_id(block, "id"), "input": given}


def _result(block: Block, losses: Losses) -> Block:
    """Return a tool's result. It is what a tool has found, so all of it counts as history."""
    content = readable(block.get("content"), losses, field="messages", is_asked=False)
    if not isinstance(content, str | list | None):
        content = as_json(content)
    return {**block, **_with_id(block, "tool_use_id"), "content": content}


def _with_id(block: Block, name: str) -> Block:
    return {name: short_id(block[name])} if name in block else {}
