"""Makes the items of a response's input readable."""

import json
from collections.abc import Callable
from typing import Any

from reprise.app.schemas.past.parts import (
    MAX_ID_CHARS,
    Losses,
    as_arguments,
    as_json,
    asked_at,
    content_of,
    line,
    placeholder,
    readable,
    short_id,
)

Item = dict[str, Any]

TAKEN = frozenset(
    {"message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"}
    | {"reasoning", "item_reference"}
)
"""The types of items that the schema judges itself."""
_ASKS = frozenset({"compaction_trigger"})  # items that ask for something, wherever they stand
_THEIRS = ("_output", "_response")  # endings of the types of items that a client makes


def input_items(items: object, losses: Losses) -> object:
    """Return items in the form that the schema takes. Items of unknown types become calls and texts, or are left out.
    Malformed items stay as they are, so that the schema refuses them. So does an unknown item that is the last, because
    it may be what the request asks."""
    if not isinstance(items, list):
        return items
    items = [_referenced(item) for item in items]
    asked = asked_at([_maker(item) for item in items])
    settled: list[object] = []
    for place, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(item, dict) or not isinstance(kind, str) or kind in _ASKS:
            settled.append(item)
        elif kind in TAKEN:
            settled.append(_taken(item, kind, losses, is_asked=place == asked))
        else:
            found = _converted(item, kind, losses)
            is_last = place == len(items) - 1
            settled += [item] if not found and is_last and kind not in _CONVERTERS else found
    return settled


def _maker(item: object) -> object:
    """Return the role of a message, and "assistant" for an item that the model made, or a server on its behalf."""
    if not isinstance(item, dict):
        return None
    kind = item.get("type", "message")
    if kind == "message":
        return item.get("role")
    is_theirs = not isinstance(kind, str) or kind.endswith(_THEIRS) or kind in ("additional_tools", "agent_message")
    return None if is_theirs else "assistant"


def _referenced(item: object) -> object:
    """Return an item of which there is only the id as a reference, whose type may be left out, or null."""
    if not isinstance(item, dict) or item.get("type") is not None:
        return item
    if "role" in item or "content" in item or not isinstance(item.get("id"), str):
        return {name: value for name, value in item.items() if name != "type"}
    return {"type": "item_reference", "id": item["id"]}


def _taken(item: Item, kind: str, losses: Losses, *, is_asked: bool) -> Item:
    """Return an item of a type that the schema knows, with all of its content as text."""
    name = item.get("id")
    if kind != "item_reference" and (not isinstance(name, str | None) or len(name or "") > MAX_ID_CHARS):
        item = {field: value for field, value in item.items() if field != "id"}
    if kind == "message":
        content = content_of(item.get("content"), losses, field="input", is_asked=is_asked)
        return {**item, "content": "" if content is None and not is_asked else content}
    if kind == "function_call":
        return {**item, **_with_id(item), "arguments": as_arguments(item.get("arguments"))}
    if kind == "custom_tool_call":
        given = item.get("input")
        text = given if isinstance(given, str) else "" if given is None else as_json(given)
        return {**item, **_with_id(item), "input": text}
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = readable(item.get("output"), losses, field="input", is_asked=False, inside="output")
        if not isinstance(output, str | list):
            output = "" if output is None else as_json(output)
        return {**item, **_with_id(item), "output": output}
    if kind == "reasoning":
        thoughts = {name: _thought(item, name, losses) for name in ("content", "summary")}
        sealed = item.get("encrypted_content")
        return {**item, **thoughts, "encrypted_content": sealed if isinstance(sealed, str) else None}
    return item


def _with_id(item: Item) -> Item:
    return {"call_id": short_id(item["call_id"])} if "call_id" in item else {}


def _thought(item: Item, name: str, losses: Losses) -> object:
    """Return a field of a thought, or None and a word where it is no text and no list of parts."""
    thought = readable(item.get(name), losses, field="input", is_asked=False, inside=name)
    if thought is None or isinstance(thought, str | list):
        return thought
    losses.add("input", "reasoning")
    return None


def _converted(item: Item, kind: str, losses: Losses) -> list[Item]:
    """Return the items that stand for one that the schema does not know; none where nothing of it can be told."""
    try:
        found = _CONVERTERS[kind](item, losses) if kind in _CONVERTERS else []
    except (KeyError, TypeError, ValueError, AttributeError):
        found = []  # its fields are not what its type says
    if not found:
        losses.add("input", kind)
    return found


def _call(call_id: Any, name: Any, arguments: object) -> Item:
    if not (isinstance(call_id, str) and call_id and isinstance(name, str)):
        raise TypeError("no call that could have a result")
    given = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, sort_keys=True)
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": given}


def _output(call_id: Any, output: str) -> Item:
    if not (isinstance(call_id, str) and call_id):
        raise TypeError("no result of a call")
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def _said(text: str) -> list[Item]:
    return [{"type": "message", "role": "assistant", "content": text}]


def _flat(value: Any) -> str:
    """Return what a tool has written as one text, whatever its form."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return "" if value is None else json.dumps(value, ensure_ascii=False, sort_keys=True)
    names = ("text", "stdout", "stderr")
    parts = [{"text": part} if isinstance(part, str) else part for part in value]
    return "\n".join(part[name] for part in parts for name in names if isinstance(part.get(name), str) and part[name])


def _mcp_call(item: Item, losses: Losses) -> list[Item]:
    """Return the call of a tool that another server ran, and its result."""
    name = f"{item['server_label']}__{item['name']}" if isinstance(item.get("server_label"), str) else item["name"]
    result = item.get("output") if item.get("output") is not None else item.get("error")
    return [_call(item["id"], name, item.get("arguments") or {}), _output(item["id"], _flat(result))]


def _tool_search_output(item: Item, losses: Losses) -> list[Item]:
    tools = item.get("tools") or []
    names = [tool["name"] for tool in tools if isinstance(tool, dict) and isinstance(tool.get("name"), str)]
    return [_output(item["call_id"], line("tools", ", ".join(names)))]


def _computer_output(item: Item, losses: Losses) -> list[Item]:
    losses.add("input", "computer_screenshot")
    return [_output(item["call_id"], placeholder("image"))]


def _web_search(item: Item, losses: Losses) -> list[Item]:
    action = item["action"]
    what = action.get("query") or action.get("queries") or action.get("url") or action.get("pattern")
    return _said(line("web search", what)) if what else []


def _image(item: Item, losses: Losses) -> list[Item]:
    losses.add("input", "image_generation_call")
    return _said(placeholder("image"))


def _agent_message(item: Item, losses: Losses) -> list[Item]:
    """Return what another agent of the client wrote, as a message to this one."""
    content = readable(item["content"], losses, field="input", is_asked=False)
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)  # type: ignore[attr-defined]
    author = item.get("author")
    whole = f"[message of {author}]\n{text}" if isinstance(author, str) and author else text
    return [{"type": "message", "role": "user", "content": whole}] if text else []


_CONVERTERS: dict[str, Callable[[Item, Losses], list[Item]]] = {
    "local_shell_call": lambda item, _: [_call(item["call_id"], "local_shell", item["action"])],
    "local_shell_call_output": lambda item, _: [_output(item.get("call_id", item.get("id")), _flat(item["output"]))],
    "shell_call": lambda item, _: [_call(item["call_id"], "shell", item["action"])],
    "shell_call_output": lambda item, _: [_output(item["call_id"], _flat(item["output"]))],
    "apply_patch_call": lambda item, _: [_call(item["call_id"], "apply_patch", item["operation"])],
    "apply_patch_call_output": lambda item, _: [_output(item["call_id"], _flat(item.get("output")))],
    "computer_call": lambda item, _: [_call(item["call_id"], "computer", item["action"])],
    "computer_call_output": _computer_output,
    "tool_search_call": lambda item, _: [_call(item["call_id"], "tool_search", item.get("arguments") or {})],
    "tool_search_output": _tool_search_output,
    "tool_search_call_output": _tool_search_output,
    "mcp_call": _mcp_call,
    "web_search_call": _web_search,
    "file_search_call": lambda item, _: _said(line("file search", item["queries"])),
    "code_interpreter_call": lambda item, _: _said(line("code", item["code"])),
    "image_generation_call": _image,
    "agent_message": _agent_message,
}
"""Maps a type of item to what stands for it. Other types are left out, such as `compaction`, which only its maker can
read."""
