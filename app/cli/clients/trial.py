"""Tries what an agent needs of a server: a call that is read from the model's answer, and a history that is found again
when the call's result comes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

Body = dict[str, Any]
Post = Callable[[str, Body], Body]

_TOOL = "report_weather"
_DESCRIPTION = "Reports the weather in a city."
_PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# Long enough for several blocks of KV, and short enough for a window of 1,024 tokens.
_SYSTEM = "You tell people about the weather. " + " ".join(f"Rule {n}: be brief." for n in range(1, 41))
_QUESTION = "What is the weather in Paris?"
_RESULT = "Clear, 21 degrees."
_CALL_TOKENS, _TEXT_TOKENS = 128, 16
LEAST_FOUND = 0.9  # share of the first request's tokens that the second one has to find


@dataclass(frozen=True, slots=True)
class Call:
    id: str
    name: str
    arguments: Any  # JSON or an object, by the dialect


class Dialect(Protocol):
    """An API in whose form a trial is sent. `first` is a request that requires a call; `second` brings the result of
    that call."""

    path: str

    def first(self, model: str) -> Body: ...
    def call(self, answer: Body) -> Call | None: ...
    def second(self, first: Body, answer: Body, call: Call) -> Body: ...
    def usage(self, answer: Body) -> tuple[int, int]: ...  # prompt tokens, and how many of them were cached


class Chat:
    path = "/v1/chat/completions"

    def first(self, model: str) -> Body:
        function = {"name": _TOOL, "description": _DESCRIPTION, "parameters": _PARAMETERS}
        return {
            "model": model,
            "messages": [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _QUESTION}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": _TOOL}},
            "max_tokens": _CALL_TOKENS,
        }

    def call(self, answer: Body) -> Call | None:
        for call in answer["choices"][0]["message"].get("tool_calls") or []:
            return Call(call["id"], call["function"]["name"], call["function"]["arguments"])
        return None

    def second(self, first: Body, answer: Body, call: Call) -> Body:
        result = {"role": "tool", "tool_call_id": call.id, "content": _RESULT}
        messages = [*first["messages"], answer["choices"][0]["message"], result]
        return {**first, "messages": messages, "tool_choice": "auto", "max_tokens": _TEXT_TOKENS}

    def usage(self, answer: Body) -> tuple[int, int]:
        usage = answer["usage"]
        return usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Responses:
    path = "/v1/responses"

    def first(self, model: str) -> Body:
        return {
            "model": model,
            "instructions": _SYSTEM,
            "input": [{"role": "user", "content": _QUESTION}],
            "tools": [{"type": "function", "name": _TOOL, "description": _DESCRIPTION, "parameters": _PARAMETERS}],
            "tool_choice": {"type": "function", "name": _TOOL},
            "max_output_tokens": _CALL_TOKENS,
            "store": False,
        }

    def call(self, answer: Body) -> Call | None:
        for item in answer["output"]:
            if item["type"] == "function_call":
                return Call(item["call_id"], item["name"], item["arguments"])
        return None

    def second(self, first: Body, answer: Body, call: Call) -> Body:
        result = {"type": "function_call_output", "call_id": call.id, "output": _RESULT}
        items = [*first["input"], *answer["output"], result]
        return {**first, "input": items, "tool_choice": "auto", "max_output_tokens": _TEXT_TOKENS}

    def usage(self, answer: Body) -> tuple[int, int]:
        usage = answer["usage"]
        return usage["input_tokens"], (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0


class Messages:
    path = "/v1/messages"

    def first(self, model: str) -> Body:
        return {
            "model": model,
            "system": _SYSTEM,
            "messages": [{"role": "user", "content": _QUESTION}],
            "tools": [{"name": _TOOL, "description": _DESCRIPTION, "input_schema": _PARAMETERS}],
            "tool_choice": {"type": "tool", "name": _TOOL},
            "max_tokens": _CALL_TOKENS,
        }

    def call(self, answer: Body) -> Call | None:
        for block in answer["content"]:
            if block["type"] == "tool_use":
                return Call(block["id"], block["name"], block["input"])
        return None

    def second(self, first: Body, answer: Body, call: Call) -> Body:
        result = {"type": "tool_result", "tool_use_id": call.id, "content": _RESULT}
        said = {"role": "assistant", "content": answer["content"]}
        messages = [*first["messages"], said, {"role": "user", "content": [result]}]
        return {**first, "messages": messages, "tool_choice": {"type": "auto"}, "max_tokens": _TEXT_TOKENS}

    def usage(self, answer: Body) -> tuple[int, int]:
        usage = answer["usage"]
        cached = usage.get("cache_read_input_tokens") or 0
        return usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0), cached


DIALECTS: dict[str, Dialect] = {"chat": Chat(), "responses": Responses(), "messages": Messages()}


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a trial. If no call was read, no second request was sent, and all numbers are 0."""

    problem: str  # "": all is well
    call: str = ""  # the call that was read
    prompt_tokens: int = 0  # those of the second request
    cached_tokens: int = 0

    @property
    def share(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)


def attempt(dialect: Dialect, model: str, post: Post) -> Outcome:
    """Send both requests of a trial, and judge the answers. post: sends a body to a path and returns the answer; its
    exceptions are not caught."""
    first = dialect.first(model)
    answer = post(dialect.path, first)
    call = dialect.call(answer)
    if call is None:
        return Outcome("no call was read from the answer, although one was required")
    shown = f"{call.name} {call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)}"
    if call.name != _TOOL or not _is_object(call.arguments):
        return Outcome(f"the call that was read is not the one that was required: {shown}", shown)
    history_tokens, _ = dialect.usage(answer)
    later = post(dialect.path, dialect.second(first, answer, call))
    prompt_tokens, cached_tokens = dialect.usage(later)
    problem = ""
    if cached_tokens < LEAST_FOUND * history_tokens:
        problem = f"the second request found only {cached_tokens:,} of the first one's {history_tokens:,} tokens"
        if reasons := _reasons(later):
            problem += f" ({reasons})"
    return Outcome(problem, shown, prompt_tokens, cached_tokens)


def _is_object(arguments: object) -> bool:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return False
    return isinstance(arguments, dict)


def _reasons(answer: Body) -> str:
    """Return why tokens were computed, where the answer says it."""
    reasons = (answer.get("x_cache") or {}).get("miss_reasons") or {}
    return ", ".join(f"{name} {count}" for name, count in reasons.items() if count)
