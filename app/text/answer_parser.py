"""Splits an answer's text into content, thoughts and tool calls.

Text arrives in pieces cut anywhere. A part is passed on as soon as it is clear what it belongs to; the arguments of a
call are passed on while they are written.
"""

import json
import re
import secrets
from collections.abc import Container
from dataclasses import dataclass, field

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
MAX_HEAD_CHARS = 16_384  # after a tag, before it is clear that this is a call
MAX_BARE_HEAD_CHARS = 512  # longest head of a call without tags, where no text is shown meanwhile
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.){1,256}")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BARE_HEAD = re.compile(r"[\s;,\[]*" + _HEAD.pattern)
_BARE_BEGINNING = '{"name":"'


@dataclass(slots=True)
class Call:
    """A tool call, as far as it has been parsed."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class AnswerParts:
    """The parts that one piece of text added to the answer."""

    content: str = ""
    reasoning: str = ""
    # (index, the call if it is new, more of its arguments)
    calls: list[tuple[int, Call | None, str]] = field(default_factory=list)

    def add(self, later: "AnswerParts") -> None:
        self.content += later.content
        self.reasoning += later.reasoning
        self.calls += later.calls

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class AnswerParser:
    """Parses the answer of one choice.

    `style`: how the model writes calls: "tags" (JSON inside <tool_call>), "bare" (the whole text is JSON), None (no
    tools). Calls of functions outside `names` are treated as content, because no client could answer them. `thinks`: a
    leading <think> block is thought. `in_thought`: the prompt has already opened that block.
    """

    def __init__(
        self, *, style: str | None, names: Container[str], parallel: bool, thinks: bool, in_thought: bool
    ) -> None:
        self.calls: list[Call] = []
        self.content = ""
        self.reasoning = ""
        self.thought_chars = 0  # characters pushed up to the end of the thought
        self._read = 0  # characters pushed
        self._style = style
        self._names = names
        self._parallel = parallel
        self._held = ""  # read, but not yet clear what it belongs to
        self._gap = ""  # white space before the last tag
        self._state = "thought" if in_thought else "start" if thinks else "content"
        # position inside the arguments of the current call
        self._depth, self._in_string, self._escaped = 0, False, False
        self._dropped = False  # whether the current call exceeds the permitted number

    def push(self, text: str) -> AnswerParts:
        self._read += len(text)
        self._held += text
        parts = AnswerParts()
        while self._step(parts, final=False):
            pass
        return self._noted(parts)

    def flush(self) -> AnswerParts:
        """Return the parts that were held back, at the end of the answer."""
        parts = AnswerParts()
        while self._step(parts, final=True):
            pass
        self._held = ""
        return self._noted(parts)

    def _noted(self, parts: AnswerParts) -> AnswerParts:
        self.content += parts.content
        self.reasoning += parts.reasoning
        return parts

    def _step(self, parts: AnswerParts, *, final: bool) -> bool:
        """Take from the held text what can be told to be content, reasoning or a call, and add it to `parts`. Returns
        whether another step may take more."""
        return bool(getattr(self, f"_in_{self._state}")(parts, final))

    def _in_start(self, parts: AnswerParts, final: bool) -> bool:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held, self._state = text[len(THINK) :], "thought"
            return True
        if THINK.startswith(text) and not final:
            return False
        self._state = "content"
        return True

    def _in_thought(self, parts: AnswerParts, final: bool) -> bool:
        if not self.reasoning and not parts.reasoning:
            self._held = self._held.lstrip("\n")
        before, found, after = self._held.partition(END_THINK)
        if found or final:
            parts.reasoning += before.rstrip("\n")
            self.thought_chars = self._read - len(after)
            self._held, self._state = after, "after_thought"
            return True
        shown = before[: len(before) - _possible(before, END_THINK)].rstrip("\n")
        parts.reasoning += shown
        self._held = before[len(shown) :]
        return False

    def _in_after_thought(self, parts: AnswerParts, final: bool) -> bool:
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = "content"
        return bool(self._held)

    def _in_content(self, parts: AnswerParts, final: bool) -> bool:
        if self._style == "bare" and not self.content and not parts.content:
            return self._bare(parts, final)
        if self._style != "tags":
            parts.content, self._held = parts.content + self._held, ""
            return False
        before, found, after = self._held.partition(CALL)
        # White space before a call belongs to the tag.
        shown = before[: len(before) - (0 if found or final else _possible(before, CALL))].rstrip()
        if final and not found and not self.calls:
            shown = before
        parts.content += shown
        if found:
            self._gap, self._held, self._state = before[len(shown) :], after, "call"
            return True
        self._held = "" if final else before[len(shown) :]
        return False

    def _bare(self, parts: AnswerParts, final: bool) -> bool:
        """Decide whether an answer without tags consists of calls; otherwise all of it is content. Returns whether
        another step may take more of the held text; False if more text is needed to decide."""
        if _BARE_HEAD.match(self._held):
            self._state = "call"
            return True
        compact = re.sub(r"[\s;,\[]+", "", self._held[:MAX_BARE_HEAD_CHARS])
        could_be = compact.startswith(_BARE_BEGINNING) or _BARE_BEGINNING.startswith(compact)
        if could_be and len(self._held) < MAX_BARE_HEAD_CHARS and not final:
            return False
        if self.calls:  # only brackets and separators surround the calls
            self._held = ""
            return False
        self._style = None
        return True

    def _in_call(self, parts: AnswerParts, final: bool) -> bool:
        """Read the beginning of a call, up to its arguments: the function's name. Returns whether another step may take
        more of the held text."""
        pattern = _BARE_HEAD if self._style == "bare" else _HEAD
        head = pattern.match(self._held)
        name = _name(head[1]) if head is not None else None
        if head is not None and name is not None and name in self._names:
            self._held, self._state = self._held[head.end() :], "arguments"
            self._depth, self._in_string, self._escaped = 0, False, False
            self._dropped = bool(self.calls) and not self._parallel
            if not self._dropped:
                self.calls.append(Call(f"call_{secrets.token_hex(12)}", name))
                parts.calls.append((len(self.calls) - 1, self.calls[-1], ""))
            return True
        is_over = END_CALL in self._held or len(self._held) > MAX_HEAD_CHARS
        if head is None and not is_over and not final:
            return False
        if self._whole_call(parts):
            return True
        parts.content += (self._gap + CALL if self._style == "tags" else "") + self._held[:1]
        self._held, self._state = self._held[1:], "content"
        if self._style == "bare":
            self._style = None
        return True

    def _whole_call(self, parts: AnswerParts) -> bool:
        """Parse a complete call whose JSON does not begin with the name and then the arguments. Returns False if the
        held text has no such call to one of the known functions."""
        text, found, after = self._held.partition(END_CALL)
        try:
            value = json.loads(text) if found else None
        except ValueError:
            value = None
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in self._names:
            return False
        arguments = value.get("arguments", value.get("parameters"))
        if self._parallel or not self.calls:
            text = json.dumps(arguments if isinstance(arguments, dict) else {}, ensure_ascii=False)
            call = Call(f"call_{secrets.token_hex(12)}", value["name"], text)
            self.calls.append(call)
            parts.calls.append((len(self.calls) - 1, call, text))
        self._held, self._state = after, "content"
        return True

    def _in_arguments(self, parts: AnswerParts, final: bool) -> bool:
        end = self._end_of_arguments()
        text, self._held = self._held[:end], self._held[end:]
        if text and not self._dropped:
            self.calls[-1].arguments += text
            parts.calls.append((len(self.calls) - 1, None, text))
        if self._depth == 0 and text:
            self._state = "closing"
            return True
        return False

    def _end_of_arguments(self) -> int:
        """Return how many characters of the held text belong to the current arguments object."""
        for place, char in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return len(self._held)

    def _in_closing(self, parts: AnswerParts, final: bool) -> bool:
        """Read the text after a call's arguments, up to the end of the call. Returns whether another step may take more
        of the held text."""
        if self._style == "bare":
            rest = self._held.lstrip()
            if not rest:
                return False
            self._held, self._state = rest.removeprefix("}"), "content"
            return bool(self._held)
        _, found, after = self._held.partition(END_CALL)
        if not found:
            return False
        self._held, self._state = after, "content"
        return True


def _possible(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `tag`, and must be held back."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)


def _name(quoted: str) -> str | None:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return None
