"""Makes the messages of a chat readable."""

import json
from typing import Any

from reprise.app.schemas.past.parts import Losses, as_arguments, as_json, asked_at, content_of, short_id

Message = dict[str, Any]
_PLAIN = frozenset({"role", "content"})
_OF_ANSWERS = ("tool_calls", "refusal", "audio", "function_call")


def chat_messages(messages: object, losses: Losses) -> object:
    """Return a chat's messages in the form that the schema takes. The list itself is returned if nothing has to change,
    as in most requests. Malformed messages stay as they are, so that the schema refuses them."""
    if not isinstance(messages, list) or all(_is_plain(message) for message in messages):
        return messages
    asked = asked_at([message.get("role") if isinstance(message, dict) else None for message in messages])
    settled, called = [], ""
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or _is_plain(message):
            settled.append(message)
        elif message.get("role") == "assistant":
            answer = _answer(message, place, losses)
            called = _legacy_id(place) if isinstance(message.get("function_call"), dict) else called
            settled.append(answer)
        elif message.get("role") == "function":
            rest = {name: value for name, value in message.items() if name != "role"}
            settled.append(_result({"role": "tool", "tool_call_id": called, **rest}, losses))
        elif message.get("role") == "tool":
            settled.append(_result(message, losses))
        else:
            settled.append(_question(message, losses, is_asked=place == asked))
    return settled


def _is_plain(message: object) -> bool:
    return isinstance(message, dict) and message.keys() == _PLAIN and isinstance(message["content"], str)


def _question(message: Message, losses: Losses, *, is_asked: bool) -> Message:
    """Return a message of a user or the system. In the history it loses what only answers and results can have."""
    if not is_asked:
        message = _without_answer(message, losses, "tool_call_id")
    return _with_content(message, losses, is_asked=is_asked)


def _without_answer(message: Message, losses: Losses, *more: str) -> Message:
    """Return a copy of a message without the fields that only answers can have, and `more`."""
    names = {*_OF_ANSWERS, *more}
    for name in _OF_ANSWERS + more:
        if message.get(name) is not None:
            losses.add("messages", name)
    return {name: value for name, value in message.items() if name not in names}


def _with_content(message: Message, losses: Losses, *, is_asked: bool = False) -> Message:
    content = message.get("content")
    if content is None and not is_asked:
        return {**message, "content": ""}
    taken = content_of(content, losses, field="messages", is_asked=is_asked)
    return message if taken is content else {**message, "content": taken}


def _result(message: Message, losses: Losses) -> Message:
    """Return a tool's result. A tool that returned nothing has an empty one."""
    result = _without_answer(message, losses)
    if message.get("tool_call_id") is not None:
        result["tool_call_id"] = short_id(message["tool_call_id"])
    if not isinstance(message.get("content"), str | list | None):
        result["content"] = as_json(message["content"])
    return _with_content(result, losses)


def _answer(message: Message, place: int, losses: Losses) -> Message:
    """Return an answer of the model with its thoughts in `reasoning_content`, a refusal as its text, and calls of every
    kind as calls of functions."""
    answer = dict(message)
    thought = _thought_beside(message)
    if isinstance(content := message.get("content"), list):
        within = [_thought(part) for part in content if _is_thought(part)]
        thought = thought or "\n".join(text for text in within if text)
        answer["content"] = [part for part in content if not _is_thought(part)]
    if thought or "reasoning_content" in answer:
        answer["reasoning_content"] = thought
    refusal = answer.pop("refusal", None)
    if isinstance(refusal, str) and not answer.get("content"):
        answer["content"] = refusal
    elif refusal and not isinstance(refusal, str):
        losses.add("messages", "refusal")
    if answer.get("audio") is not None:
        losses.add("messages", "audio")
    answer.pop("audio", None)
    legacy = answer.pop("function_call", None)
    if isinstance(legacy, dict) and not answer.get("tool_calls"):
        answer["tool_calls"] = [{"id": _legacy_id(place), "type": "function", "function": legacy}]
    elif legacy and not isinstance(legacy, dict):
        losses.add("messages", "function_call")
    if isinstance(calls := answer.get("tool_calls"), list):
        answer["tool_calls"] = _calls(calls, place, losses)
    return _with_content(answer, losses)


def _legacy_id(place: int) -> str:
    """Return an id for a call of the time when calls had none."""
    return f"call_{place}"


def _calls(calls: list[object], place: int, losses: Losses) -> list[object]:
    """Return the calls of an answer, without those of which nothing can be told."""
    found: list[object] = []
    for number, call in enumerate(calls):
        if (taken := _call(call, f"{_legacy_id(place)}_{number}")) is not None:
            found.append(taken)
        else:
            losses.add("messages", call.get("type", "tool_calls") if isinstance(call, dict) else "tool_calls")
    return found


def _call(call: object, made_up_id: str) -> Message | None:
    """Return a call of any kind as a call of a function; None if it names none. A custom tool's has one argument."""
    if not isinstance(call, dict):
        return None
    if isinstance(custom := call.get("custom"), dict):
        function = custom_call(custom)
    elif isinstance(called := call.get("function"), dict):
        function = {**called, "arguments": as_arguments(called.get("arguments"))}
    else:
        return None
    if not isinstance(function.get("name"), str):
        return None
    call_id = made_up_id if call.get("id") is None else short_id(call["id"])
    return {"id": call_id, "type": "function", "function": function}


def custom_call(custom: dict[str, Any]) -> dict[str, Any]:
    """Return a custom tool's call as a call of a function: its name and arguments. The tool's input becomes the
    argument `input`."""
    given = custom.get("input")
    text = given if isinstance(given, str) else "" if given is None else as_json(given)
    return {"name": custom.get("name"), "arguments": custom_arguments(text)}


def custom_arguments(given: str) -> str:
    """Return the arguments by which a function is called that stands for a custom tool. given: the input of that
    tool."""
    return json.dumps({"input": given}, ensure_ascii=False)


def _is_thought(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in ("thinking", "reasoning", "redacted_thinking")


def _thought_beside(message: Message) -> str:
    """Return the thought in a field of the message. Clients and servers call it by different names."""
    fields = [_joined(message.get(name)) for name in ("reasoning_content", "reasoning", "thinking")]
    thought = next((text for text in fields if text), "")
    if thought or not isinstance(details := message.get("reasoning_details"), list):
        return thought
    texts = (part.get("text", part.get("summary")) for part in details if isinstance(part, dict))
    return "".join(text for text in texts if isinstance(text, str))


def _thought(part: dict[str, Any]) -> str:
    """Return the text of a thought, which is a string or a list of texts."""
    return _joined(part.get("thinking", part.get("text", part.get("reasoning"))))


def _joined(texts: object) -> str:
    """Return a text that is a string or a list of texts; an empty one for anything else."""
    if isinstance(texts, list):
        found = (one.get("text") if isinstance(one, dict) else one for one in texts)
        texts = "".join(text for text in found if isinstance(text, str))
    return texts if isinstance(texts, str) else ""
