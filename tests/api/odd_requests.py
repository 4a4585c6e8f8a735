"""Generates requests of the three dialects that are wrong somewhere, from a seed.

A conversation has sane requests, with tools, calls and results. Between them come requests of two kinds. A *mutated*
one is changed anywhere: types, nulls, deep nests, huge numbers, odd characters, keys twice; it may be refused. A
*broken* one has only its history changed, in ways that clients and other servers do it: calls without results, results
without calls, roles in any order, arguments that are no JSON, parts of unknown types. It ends with a plain question of
the user, and has to be answered.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Json = Any
DIALECTS = ("chat", "responses", "messages")
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
FIELDS = {"chat": "messages", "responses": "input", "messages": "messages"}
_LIMITS = {"chat": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}
TOKENS = 3  # most tokens of a sane answer
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_TEXTS = ("Hello", "Who?", "5", "Is it\nso?", "Ünïcödé 🎉", "a <b> & c")


def nest(levels: int, *, is_list: bool) -> Json:
    """Return lists, or objects, in one another."""
    value: Json = 1
    for _ in range(levels):
        value = [value] if is_list else {"a": value}
    return value


ODD: tuple[Json, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        7,
        129,
        1 << 31,
        1 << 63,
        -(1 << 63),
        -(1 << 63) - 1,
        1 << 64,
        10**40,
        0.5,
        1e308,
        -0.0,
    ),
    *(
        "",
        " ",
        "a",
        "a" * 300,
        "\0",
        "\ud83d",
        "\udc00x",
        "\u202e",
        "🎉" * 40,
        "<|im_end|>",
        "null",
        "{}",
        "[",
        "../x",
        "é\u0301",
    ),
    *([], {}, [None], [[]], [{}], {"": ""}, {"type": "text"}, {"type": None}, {"type": "text", "text": None}),
    *([5], ["a"], {"a": 1}, {"type": "hologram", "x": {"y": [1]}}, {"type": "text", "text": "a"}, [1.5, "a", None, {}]),
    *(nest(levels, is_list=is_list) for levels in (5, 40, 70, 190) for is_list in (True, False)),
)
"""Values that stand in a mutated request for what belongs there."""
_NAMES = (
    "type",
    "role",
    "content",
    "id",
    "x",
    "name",
    "tool_calls",
    "important",
    "stop",
    "format",
    "schema",
    "a b",
    "é",
    "\ud83d",
)
_CONTENTS: tuple[Json, ...] = (
    *(None, "", " ", [], "\ud83dx", "a\0b", 17, True, {"type": "text", "text": "a"}, {"text": "a"}, {"x": 1}, ["a"]),
    *([None], [5], [{}], [{"type": "text"}], [{"type": "text", "text": None}], [{"type": "hologram", "x": [1]}]),
    *(
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
        [{"type": "input_image", "image_url": "x"}],
    ),
    *([{"type": "document", "source": {"type": "text", "data": 5}}], [{"type": "thinking", "thinking": None}]),
    *(
        [{"type": "refusal", "refusal": "No."}],
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "y": nest(9, is_list=True)}],
    ),
    *(
        [{"type": "image", "source": None}],
        [{"type": "tool_reference", "tool_name": "f"}],
        [{"type": 5, "text": "a"}],
        [[]],
    ),
)
"""Contents that a message of the history may have."""
_ARGUMENTS: tuple[Json, ...] = (
    *(
        None,
        "",
        "null",
        "5",
        "[1]",
        '"a"',
        '{"a": 1',
        '{"a": 1}}',
        '{"a": NaN}',
        "{'a': 1}",
        "no JSON",
        "{" * 150,
        "[" * 2000,
    ),
    *(
        {},
        {"a": 1},
        {"a": {"b": [None, 1e300, 10**25]}},
        {"\ud83d": "\ud83d"},
        '{"a": "\\ud83d"}',
        5,
        True,
        ["a"],
        nest(40, is_list=True),
    ),
)
_IDS: tuple[Json, ...] = (None, "", "a", "x" * 300, "é 🎉", 5, True, {}, ["a"])
_CALLED: tuple[str, ...] = ("", "f", "other", "x" * 200, "a b/c:d", "é🎉", "functions.f:0", "f\n")


@dataclass
class Conversation:
    """One conversation of a client with a server. Everything is drawn from `rng`."""

    rng: random.Random
    dialect: str

    def __post_init__(self) -> None:
        self.path, self.field = PATHS[self.dialect], FIELDS[self.dialect]
        self.has_tools = self.rng.random() < 0.5
        self.session = f"odd-{self.rng.getrandbits(40):x}"
        self.history: list[Json] = []
        self._calls = 0

    # --- what belongs in a request ------------------------------------------------------------------------------------

    def user(self) -> Json:
        text = self.rng.choice(_TEXTS)
        if self.rng.random() < 0.7:
            return {"role": "user", "content": text}
        kind = "input_text" if self.dialect == "responses" else "text"
        return {"role": "user", "content": [{"type": kind, "text": text}]}

    def exchange(self) -> list[Json]:
        """Return what comes between two questions: an answer, or a call with its result and an answer."""
        said = {"role": "assistant", "content": self.rng.choice(_TEXTS)}
        if not self.has_tools or self.rng.random() < 0.4:
            return [said]
        self._calls += 1
        call_id, arguments = f"call_{self._calls}", {"a": self._calls}
        if self.dialect == "chat":
            function = {"name": "f", "arguments": json.dumps(arguments)}
            call = {"id": call_id, "type": "function", "function": function}
            result = {"role": "tool", "tool_call_id": call_id, "content": "Done."}
            return [{"role": "assistant", "content": None, "tool_calls": [call]}, result, said]
        if self.dialect == "responses":
            call = {"type": "function_call", "call_id": call_id, "name": "f", "arguments": json.dumps(arguments)}
            return [call, {"type": "function_call_output", "call_id": call_id, "output": "Done."}, said]
        call = {"type": "tool_use", "id": call_id, "name": "f", "input": arguments}
        result = {"type": "tool_result", "tool_use_id": call_id, "content": "Done."}
        return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}, said]

    def grow(self) -> None:
        """Add an exchange to the history."""
        self.history += [self.user(), *self.exchange()]

    def body(self, said: list[Json]) -> dict[str, Json]:
        """Return a sane request with these messages."""
        body: dict[str, Json] = {self.field: said, _LIMITS[self.dialect]: TOKENS, "session_id": self.session}
        if self.rng.random() < 0.3:
            body["stream"] = True
        if self.has_tools:
            tool = {"name": "f", "description": "Adds.", "parameters": _SCHEMA}
            body["tools"] = [
                {"name": "f", "input_schema": _SCHEMA}
                if self.dialect == "messages"
                else {"type": "function", "function": tool}
                if self.dialect == "chat"
                else {"type": "function", **tool}
            ]
        body |= self.rng.choice(_MORE[self.dialect]) if self.rng.random() < 0.5 else {}
        return body

    def sane(self) -> dict[str, Json]:
        return self.body([*self.history, self.user()])

    # --- what does not ------------------------------------------------------------------------------------------------

    def mutated(self) -> bytes:
        """Return a request that is wrong in one to three places."""
        body = copy.deepcopy(self.sane())
        for _ in range(self.rng.randint(1, 3)):
            mutate(body, self.rng)
        data = json.dumps(body).encode()
        if self.rng.random() < 0.1:
            data = self.rng.choice(_RAW)(data, self.rng)
        return data

    def broken(self) -> dict[str, Json]:
        """Return a request that ends with a plain question, and whose history is broken in one to three places."""
        history = copy.deepcopy(self.history)
        for _ in range(self.rng.randint(1, 3)):
            if history:
                self.rng.choice(_BREAKS)(history, self.rng)
        return self.body([*history, {"role": "user", "content": "Go on."}])


_MORE: dict[str, list[dict[str, Json]]] = {
    "chat": [
        {"temperature": 0.5, "top_p": 0.9, "stop": ["zz"], "seed": 7},
        {"logprobs": True, "top_logprobs": 2, "n": 2},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}}},
        {"stream": True, "stream_options": {"include_usage": True, "include_progress": True}},
        {"guided_choice": ["a", "b"]},
        {"logit_bias": {"5": 1.5}, "metadata": {"a": "b"}, "reasoning_effort": "low", "thinking": {"type": "disabled"}},
        {"tool_choice": "auto", "parallel_tool_calls": False, "prediction": {"type": "content", "content": "Hello"}},
        {"tool_choice": "none", "truncation": "auto", "prompt_cache_options": {"ttl": "5m"}},
    ],
    "responses": [
        {"temperature": 0.5, "instructions": "Be brief.", "metadata": {"a": "b"}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": _SCHEMA}}},
        {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"]},
        {"top_logprobs": 2, "store": False},
        {"tool_choice": "auto", "truncation": "auto", "stream": True, "stream_options": {"include_obfuscation": False}},
    ],
    "messages": [
        {"temperature": 0.5, "system": "Be brief.", "stop_sequences": ["zz"]},
        {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "a"}},
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": _SCHEMA}}},
        {"tool_choice": {"type": "auto"}, "stream": True},
    ],
}


def _places(value: Json) -> Iterator[tuple[Json, Json]]:
    """Yield (object or list, key) of everything in a value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def mutate(body: dict[str, Json], rng: random.Random) -> None:
    """Change one place of a body."""
    places = list(_places(body))
    if not places:
        return
    holder, key = rng.choice(places)
    kind = rng.randrange(10)
    if kind < 5:
        holder[key] = copy.deepcopy(rng.choice(ODD))
    elif kind == 5:
        del holder[key]
    elif kind == 6:
        holder[key] = [holder[key]] if rng.random() < 0.5 else {"type": holder[key]}
    elif kind == 7 and isinstance(holder, dict):
        holder[rng.choice(_NAMES)] = copy.deepcopy(rng.choice(ODD))
    elif kind == 8 and isinstance(holder, list):
        holder += copy.deepcopy([holder[key]] * rng.choice((1, 3, 30)))
    else:
        other, place = rng.choice(places)
        if place in range(len(other)) if isinstance(other, list) else place in other:
            holder[key] = copy.deepcopy(other[place])


def _twice(data: bytes, rng: random.Random) -> bytes:
    """Return a body that has a key twice."""
    name = rng.choice(("messages", "input", "stream", "model", "tools", "max_tokens"))
    return b'{"%s": %s, ' % (name.encode(), rng.choice((b"5", b"null", b"[]", b'{"a": 1}'))) + data[1:]


_RAW: list[Callable[[bytes, random.Random], bytes]] = [
    _twice,
    lambda data, rng: data[: rng.randrange(len(data))],
    lambda data, rng: data.replace(b"1", b"1e999", 1),
    lambda data, rng: data.replace(b"1", b"NaN", 1),
    lambda data, rng: data.replace(b"a", b"\xff", 1),
    lambda data, rng: data.replace(b"1", b"1" * 5000, 1),
    lambda data, rng: b"\xef\xbb\xbf" + data,
    lambda data, rng: data.decode().encode("utf-16"),
    lambda data, rng: b"[" + data + b"]",
    lambda data, rng: b"[" * 100_000,
    lambda data, rng: b"",
]

# --- ways in which a history is broken --------------------------------------------------------------------------------

Break = Callable[[list[Json], random.Random], None]


def _drop(history: list[Json], rng: random.Random) -> None:
    del history[rng.randrange(len(history))]


def _repeat(history: list[Json], rng: random.Random) -> None:
    history.insert(rng.randrange(len(history) + 1), copy.deepcopy(rng.choice(history)))


def _swap(history: list[Json], rng: random.Random) -> None:
    one, other = rng.randrange(len(history)), rng.randrange(len(history))
    history[one], history[other] = history[other], history[one]


def _of_message(change: Callable[[dict[str, Json], random.Random], None]) -> Break:
    """Return what changes one entry of the history."""
    return lambda history, rng: change(rng.choice(history), rng)


def _recontent(entry: dict[str, Json], rng: random.Random) -> None:
    name = "output" if "output" in entry else "content"
    if name in entry:
        entry[name] = copy.deepcopy(rng.choice(_CONTENTS))


def _no_content(entry: dict[str, Json], rng: random.Random) -> None:
    entry.pop("output" if "output" in entry else "content", None)


def _rerole(entry: dict[str, Json], rng: random.Random) -> None:
    if "role" in entry and entry["role"] != "tool":
        entry["role"] = rng.choice(("user", "assistant"))


def _more_fields(entry: dict[str, Json], rng: random.Random) -> None:
    for name in ("x_unknown", "reasoning", "reasoning_details", "annotations", "status", "refusal", "cache_control"):
        if rng.random() < 0.3:
            entry[name] = copy.deepcopy(
                rng.choice((None, "Hm.", [], {}, [{"type": "reasoning.text", "text": "Hm."}], 5))
            )


def _calls_of(entry: dict[str, Json]) -> list[dict[str, Json]]:
    """Return the objects that are calls in an entry, in any dialect."""
    content = entry.get("content")
    blocks = content if isinstance(content, list) else []
    calls = entry.get("tool_calls")
    found = [entry] if entry.get("type") == "function_call" else []
    found += [block for block in blocks if isinstance(block, dict) and block.get("type") == "tool_use"]
    return found + (calls if isinstance(calls, list) else [])


def _rearguments(entry: dict[str, Json], rng: random.Random) -> None:
    for call in _calls_of(entry):
        holder = call.get("function", call)
        holder["input" if call.get("type") == "tool_use" else "arguments"] = copy.deepcopy(rng.choice(_ARGUMENTS))


def _rename(entry: dict[str, Json], rng: random.Random) -> None:
    for call in _calls_of(entry):
        call.get("function", call)["name"] = rng.choice(_CALLED)


def _reid(entry: dict[str, Json], rng: random.Random) -> None:
    """Give a call or a result another id."""
    content = entry.get("content")
    blocks = [entry, *(content if isinstance(content, list) else []), *(entry.get("tool_calls") or [])]
    for block in blocks:
        for name in ("tool_call_id", "tool_use_id", "call_id", "id"):
            if isinstance(block, dict) and name in block:
                block[name] = copy.deepcopy(rng.choice(_IDS))


_BREAKS: list[Break] = [
    _drop,
    _repeat,
    _swap,
    *map(_of_message, (_recontent, _recontent, _no_content, _rerole, _more_fields, _rearguments, _rename, _reid)),
]
