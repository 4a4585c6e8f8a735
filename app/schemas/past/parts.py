"""The policy for parts of a conversation that this server cannot show its model, in all dialects.

What stands in the history is never refused, because a client sends its history again in every turn: one refusal would
end the conversation. Such a part becomes text where it has any, else a placeholder, or it is left out; the answer's
`Warning` header names what was lost. In the last message of a user, a part that cannot be shown stays as it is until
the model has answered, and the request's schema refuses it by name.

The same part always becomes the same text, so that a history that is sent again is found in the cache.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from reprise.app.schemas.unknown import SAID_ANYHOW

Part = dict[str, Any]

MAX_ID_CHARS = 256  # longest id of a call
NO_ID = "unknown"
MAX_LINE_CHARS = 2000  # longest line that stands for a part without text
TEXT_KINDS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})
_OF_TEXTS = SAID_ANYHOW | {"type", "text"}
_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image", "image_file", "computer_screenshot"), "image"),
    **dict.fromkeys(("audio", "input_audio", "output_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file", "document", "container_upload"), "file"),
}
_BINARY = ("image/", "audio/", "video/", "application/pdf", "application/zip", "application/octet-stream")


class Losses:
    """The names of what was left out of a request, in order and without repetitions."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = dict.fromkeys(names)

    def add(self, field: str, kind: object) -> None:
        self._names[f"{field}.{str(kind)[:64]}"] = None

    @property
    def names(self) -> list[str]:
        return list(self._names)


def placeholder(what: str) -> str:
    """Return the text that stands in a message for a part that a model of text cannot read. what: the kind of part."""
    return f"[{what}: not shown, this model reads text]"


def as_json(value: object) -> str:
    """Return a value that should have been a text as JSON, always the same for the same value."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def as_arguments(value: object) -> str:
    """Return the arguments of a call as a text, whatever type a client gave them; "{}" if there are none."""
    if value is None:
        return "{}"
    return value if isinstance(value, str) else as_json(value)


def short_id(call_id: object) -> str:
    """Return the id of a call in a form that can be used: the same for the call and its result. One that is too long is
    cut and ends in its hash, one that is not a string becomes its JSON, and a missing one becomes `NO_ID`."""
    if call_id is None or call_id == "":
        return NO_ID
    if not isinstance(call_id, str):
        call_id = as_json(call_id)
    if len(call_id) <= MAX_ID_CHARS:
        return call_id
    digest = hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()
    return call_id[: MAX_ID_CHARS - len(digest)] + digest


def line(what: str, said: object) -> str:
    """Return one line of text that stands for an event in the history, such as a call of another server's tool. said:
    its text, or a value that is shown as JSON."""
    text = said if isinstance(said, str) else json.dumps(said, ensure_ascii=False, sort_keys=True)
    text = " ".join(text.split())
    return f"[{what}: {text[:MAX_LINE_CHARS]}]" if text else f"[{what}]"


def asked_at(roles: Sequence[object]) -> int | None:
    """Return the index of the message that the request asks about: the last one of a user. None if there is none, or if
    an answer follows it. A message of the model that is the very last does not count as an answer, since the model is
    to continue it. roles: for each message "assistant" if the model made it, "user" if a user did, else anything.

    Earlier messages are history, even without an answer between them and the last: a message that was refused comes
    back with the next one."""
    for place in range(len(roles) - 1, -1, -1):
        if roles[place] == "user":
            return place
        if roles[place] == "assistant" and place < len(roles) - 1:
            return None
    return None


def readable(content: object, losses: Losses, *, field: str, is_asked: bool, inside: str = "content") -> object:
    """Return a content in which all parts are texts; a content that is no list is returned as it is. A string is a
    text, and so is a part with a text and no type. In the history a text that is null is empty, and a malformed part
    becomes its JSON, or is left out if it says nothing.

    field: the request field to name when a part is lost. inside: the field of its items that holds this content, to
    name unknown fields of a text. is_asked: whether this is the message that the request asks about (`asked_at`). Its
    parts that cannot be shown, or are malformed, are kept, so that the schema refuses them."""
    if not isinstance(content, list) or all(_is_own(part) for part in content):
        return content
    parts: list[object] = []
    for part in content:
        if _is_own(part):
            parts.append(part)
        elif (text := _plain(part)) is not None:
            parts.append({"type": "text", "text": text})
            _name_unknown(part, losses, f"{field}.{inside}")
        elif is_asked:
            parts.append(part)
        elif (text := _odd(part, losses, field)) is not None:
            parts.append({"type": "text", "text": text})
    return parts


def content_of(content: object, losses: Losses, *, field: str, is_asked: bool) -> object:
    """Return the content of a message as `readable` does. In the history, a content that is neither text nor list is
    treated as one part, or becomes its JSON."""
    if isinstance(content, str | list | None) or is_asked:
        return readable(content, losses, field=field, is_asked=is_asked)
    is_part = isinstance(content, dict) and ("type" in content or "text" in content)
    return readable([content], losses, field=field, is_asked=False) if is_part else as_json(content)


def _plain(part: object) -> str | None:
    """Return the text of a part whose meaning is plain, whoever has written it; None if it is not."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        return None
    if isinstance(kind := part.get("type"), str) and not _is_text(part):
        return text_of(part)
    text = part.get("text") if kind is None or _is_text(part) else None
    if isinstance(text, dict):  # as OpenAI's Assistants write it
        text = text.get("value")
    return text if isinstance(text, str) else None


def _odd(part: object, losses: Losses, field: str) -> str | None:
    """Return the text that stands for a part of the history that has none, or that is malformed; None to leave it out,
    which `losses` then names."""
    if not isinstance(part, dict):
        if part is None:
            losses.add(field, "part")
        return None if part is None else as_json(part)
    kind = part.get("type")
    if _is_text(part) and "text" in part:
        return "" if part["text"] is None else as_json(part["text"])
    losses.add(field, kind if isinstance(kind, str) else "part")
    what = _MEDIA.get(kind) if isinstance(kind, str) else None
    return None if what is None else placeholder(_named(what, part))


def text_of(part: Part) -> str | None:
    """Return the text of a content part; None if it has none, such as an image, or is of an unknown type."""
    read = _READERS.get(part["type"])
    try:
        return None if read is None else read(part)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # a part whose fields are not what its type says


def _is_own(part: object) -> bool:
    """Return whether a part is a text in the form that all dialects take."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _name_unknown(part: object, losses: Losses, path: str) -> None:
    """Name what a text has besides its text, as `reprise.app.schemas.unknown` does for those that stay as they are."""
    if not isinstance(part, dict) or not (part.get("type") is None or part["type"] in TEXT_KINDS):
        return  # a document or the like has fields of its own, which say what its text is
    if not _OF_TEXTS.issuperset(part):
        for name, value in part.items():
            if name not in _OF_TEXTS and value is not None:
                losses.add(path, name)


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text")


def _named(what: str, part: Part) -> str:
    """Return the kind of a part, with the name of its file if it has one."""
    inner = part.get("file")
    names = [part.get("filename"), part.get("title"), inner.get("filename") if isinstance(inner, dict) else None]
    name = next((name for name in names if isinstance(name, str) and name), "")
    return f"{what} {' '.join(name.split())[:256]}" if name else what


def _document(part: Part) -> str | None:
    """Return the text of Anthropic's `document`, with its title and context."""
    source = part["source"]
    if source["type"] == "text":
        text: str | None = source["data"]
    elif source["type"] == "content":
        content = source["content"]
        text = content if isinstance(content, str) else _texts(content)
    else:
        text = _decoded(source["data"], source["media_type"])
    if not isinstance(text, str):
        return None
    return "\n".join(said for said in (part.get("title"), part.get("context"), text) if isinstance(said, str))


def _file(part: Part) -> str | None:
    """Return the text of OpenAI's `file` or `input_file`, after its name."""
    given = part.get("file", part)
    data, name = given["file_data"], given.get("filename")
    media_type = ""
    if data.startswith("data:"):
        head, _, data = data.partition(",")
        media_type = head.removeprefix("data:").partition(";")[0]
    text = _decoded(data, media_type)
    return text if text is None or not isinstance(name, str) else f"{name}\n{text}"


def _decoded(data: str, media_type: str) -> str | None:
    """Return the text in base64 `data`; None if its type or its bytes say that it is none."""
    if media_type.lower().startswith(_BINARY):
        return None
    try:
        text = base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
    return None if "\0" in text or text.startswith("%PDF") else text


def _texts(parts: list[Any]) -> str:
    return "\n".join(text for part in parts if (text := _plain(part)) is not None)


def _search_result(part: Part) -> str:
    """Return the title, the source and the text of Anthropic's `search_result`."""
    said = (part.get("title"), part.get("source"), _texts(part["content"]))
    return "\n".join(text for text in said if isinstance(text, str) and text)


def _result(part: Part) -> str:
    """Return one line about the result of a tool that another server ran."""
    content = part["content"]
    found = content if isinstance(content, list) else [content]
    shown = [_shown_result(one) for one in found]
    return line(part["type"], "; ".join(said for said in shown if said))


def _shown_result(found: Any) -> str:
    if isinstance(found, str):
        return found
    names = ("title", "url", "tool_name", "text", "stdout", "stderr", "error_code")
    said = [found[name] for name in names if isinstance(found.get(name), str) and found[name]]
    if isinstance(listed := found.get("tool_references"), list):
        said += [one["tool_name"] for one in listed]
    return " ".join(said)


def _compaction(part: Part) -> str | None:
    return part["content"] if isinstance(part["content"], str) and part["content"] else None


_READERS: dict[str, Callable[[Part], str | None]] = {
    **dict.fromkeys(TEXT_KINDS, lambda part: str(part["text"]) if isinstance(part["text"], str) else None),
    "refusal": lambda part: part["refusal"] if isinstance(part["refusal"], str) else None,
    "document": _document,
    "file": _file,
    "input_file": _file,
    "search_result": _search_result,
    "tool_reference": lambda part: line("tool", part["tool_name"]),
    "compaction": _compaction,
    **dict.fromkeys(("server_tool_use", "mcp_tool_use"), lambda part: line(part["name"], part["input"])),
    **dict.fromkeys(
        (
            *("web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result", "mcp_tool_result"),
            *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
        ),
        _result,
    ),
}
