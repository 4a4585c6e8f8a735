"""Tests answers of real models whose template or vocabulary has a property that makes other servers lose a part of the
answer: special tokens as tags or in forced text, an opened thought, an end of turn that is named elsewhere."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from reprise.app.main import create_app
from tests.app.fakes import events, make_settings
from tests.app.odd_models import FIRST, SECOND, write_odd
from tests.fleet.engine_here import EngineHere

pytestmark = pytest.mark.long
FUNCTION = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
ASKED = {"role": "user", "content": "What is the capital of France?"}


class Served:
    """The app over one model, whose engine runs in this process."""

    def __init__(self, http: httpx.AsyncClient, engine: EngineHere) -> None:
        self.http, self.engine = http, engine

    async def ask(self, path: str = "/v1/chat/completions", **fields: Any) -> Any:
        """Return the answer, of a stream its events."""
        said = {"input": [ASKED]} if path == "/v1/responses" else {"messages": [ASKED]}
        limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 60}
        answer = await self.http.post(path, json={**said, **limit, "temperature": 0, **fields}, timeout=60)
        assert answer.status_code == 200, answer.text
        return events_of(answer.text) if fields.get("stream") else answer.json()

    async def choice(self, **fields: Any) -> tuple[str, str, list[Any], str]:
        """Return the content, the thought, the calls (name and arguments) and the finish reason of a chat."""
        answer = await self.ask(**fields)
        if not fields.get("stream"):
            (choice,) = answer["choices"]
            message = choice["message"]
            calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
            return message["content"] or "", message.get("reasoning_content", ""), calls, choice["finish_reason"]
        choices = [event["choices"][0] for event in answer if event["choices"]]
        texts = ["".join(one["delta"].get(name) or "" for one in choices) for name in ("content", "reasoning_content")]
        pieces = [call for one in choices for call in one["delta"].get("tool_calls", ())]
        names = {call["index"]: call["function"]["name"] for call in pieces if call["function"].get("name")}
        arguments = {
            index: "".join(call["function"]["arguments"] for call in pieces if call["index"] == index)
            for index in names
        }
        return *texts, [(names[index], arguments[index]) for index in names], choices[-1]["finish_reason"]


def events_of(text: str) -> list[Any]:
    lines = [line for line in text.split("\n") if line.startswith("data: ")]
    return events("\n\n".join(lines))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of all variants, each of which is written and loaded once."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
async def serve(models: Path, tmp_path: Path) -> AsyncIterator[Any]:
    """Return a function that serves a variant of the bundled model, and ends what it served after the test."""
    contexts = []

    async def start(kind: str) -> Served:
        if not (models / kind).exists():
            write_odd(kind, models / kind)
        engine = EngineHere(models / kind, max_context=1024)
        app = create_app(make_settings(tmp_path / f"{kind} state"), engine=engine)
        context = app.router.lifespan_context(app)
        await context.__aenter__()
        await app.state.readiness.wait_loaded()
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")
        contexts.append((context, http))
        return Served(http, engine)

    yield start
    for context, http in contexts:
        await http.aclose()
        await context.__aexit__(None, None, None)


# --- forced texts that spell special tokens ---------------------------------------------------------------------------

SPELT = [
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "x<|im_start|>y",
    "a<|im_end|>b",
    "<tool_call>",
    "x</tool_call>y",
]


@pytest.mark.parametrize("stream", [False, True])
async def test_forced_texts_may_spell_special_tokens(serve, stream: bool):
    served = await serve("toolspecial")
    for text in SPELT:
        said = await served.choice(guided_choice=[text], stream=stream)
        assert (said[0], said[3]) == (text, "stop")
        schema = {"type": "object", "properties": {"v": {"enum": [text]}}, "required": ["v"]}
        given = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}},
        }
        content, _, _, reason = await served.choice(response_format=given, stream=stream)
        assert (json.loads(content), reason) == ({"v": text}, "stop")
        regex = "".join(f"[{letter}]" if letter in "|<>" else letter for letter in text)
        assert (await served.choice(guided_regex=regex, stream=stream))[0] == text


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_forced_texts_may_spell_special_tokens_in_other_dialects(serve, path: str):
    served = await serve("toolspecial")
    for text in SPELT:
        schema = {
            "type": "object",
            "properties": {"v": {"const": text}},
            "required": ["v"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "schema": schema}
        given = (
            {"text": {"format": {**form, "name": "x"}}} if "responses" in path else {"output_config": {"format": form}}
        )
        answer = await served.ask(path, **given)
        content = answer["output"][-1]["content"] if "output" in answer else answer["content"]
        assert json.loads(content[0]["text"]) == {"v": text}


@pytest.mark.always
@pytest.mark.parametrize("stream", [False, True])
async def test_calls_between_special_tokens_can_be_forced(serve, stream: bool):
    served = await serve("toolspecial")
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        content, _, calls, reason = await served.choice(
            tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, stream=stream
        )
        assert (content, [name for name, _ in calls], reason) == ("", ["get_weather"], "tool_calls")
        assert json.loads(calls[0][1])["city"] in ("Rome", "Oslo")
    tools = [{"name": "get_weather", "input_schema": FUNCTION["parameters"]}]
    message = await served.ask(
        "/v1/messages", tools=tools, tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    offered = [{"type": "function", **FUNCTION}]
    response = await served.ask("/v1/responses", tools=offered, tool_choice="required", parallel_tool_calls=False)
    assert [item["type"] for item in response["output"]] == ["function_call"]


# --- tags that are special tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skips", [None, True, False])
async def test_calls_between_special_tokens_are_read(serve, skips: bool | None, stream: bool):
    served = await serve("toolspecial")
    said = json.dumps({"name": "get_weather", "arguments": {"city": "Rome"}})
    grammar = f"start: <[{FIRST}]> {json.dumps(said)} <[{SECOND}]>"
    content, _, calls, reason = await served.choice(
        tools=TOOLS, guided_grammar=grammar, stream=stream, skip_special_tokens=skips
    )
    assert (content, reason) == ("", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("get_weather", {"city": "Rome"})]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skips", [None, True, False])
async def test_thoughts_between_special_tokens_are_read(serve, skips: bool | None, stream: bool):
    """A grammar that ends a thought begins in the one that the template opens; others begin after it."""
    served = await serve("thinkspecial")
    opened = {"chat_template_kwargs": {"enable_thinking": False}}  # what the model opens comes after the template's
    for begin, fields in (("", {}), (f"<[{FIRST}]>", opened)):
        grammar = f'start: {begin} "hm" <[{SECOND}]> "The answer"'
        content, thought, _, _ = await served.choice(
            guided_grammar=grammar, stream=stream, skip_special_tokens=skips, **fields
        )
        assert (thought, content) == ("hm", "The answer")


@pytest.mark.always
async def test_an_opened_thought_ends_at_a_special_token(serve):
    served = await serve("thinkspecial")
    bias = {str(SECOND): 100.0}
    for stream in (False, True):
        content, thought, _, _ = await served.choice(logit_bias=bias, max_tokens=1, stream=stream)
        assert (content, thought) == ("", "")
    # The model says nothing but the mark, which is part of neither.
    message = await served.ask("/v1/chat/completions", logit_bias=bias, max_tokens=3)
    assert "</think>" not in json.dumps(message)


# --- an opened thought and an answer of a given form ------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["think", "thinkspecial"])
async def test_an_answer_of_a_given_form_is_content(serve, kind: str, stream: bool):
    served = await serve(kind)
    for fields in (
        {"guided_choice": ["alpha", "omega"]},
        {"guided_regex": "alpha|omega"},
        {"structured_outputs": {"choice": ["alpha", "omega"]}},
        {"guided_grammar": 'start: "alpha" | "omega"'},
    ):
        content, thought, _, reason = await served.choice(stream=stream, **fields)
        assert (content in ("alpha", "omega"), thought, reason) == (True, "", "stop")
    content, thought, _, _ = await served.choice(response_format={"type": "json_object"}, max_tokens=200, stream=stream)
    assert (content[:1], thought) == ("{", "")
    content, thought, calls, reason = await served.choice(
        tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=stream
    )
    assert (content, thought, [name for name, _ in calls], reason) == ("", "", ["get_weather"], "tool_calls")


async def test_a_begun_answer_is_content(serve):
    served = await serve("think")
    begun = [ASKED, {"role": "assistant", "content": "The number is "}]
    content, thought, _, _ = await served.choice(messages=begun, continue_final_message=True, max_tokens=8)
    assert (bool(content), thought) == (True, "")
    message = await served.ask("/v1/messages", messages=begun, max_tokens=8)
    assert [block["type"] for block in message["content"]] == ["text"]


# --- the end of a turn ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eos_of_tokenizer", "eos_of_template"])
async def test_a_turn_ends_where_the_tokenizer_or_the_template_says(serve, kind: str):
    served = await serve(kind)
    for stream in (False, True):
        content, _, _, reason = await served.choice(logit_bias={"2": 100.0}, stream=stream)
        assert (content, reason) == ("", "stop")
    whole = await served.ask("/v1/messages", max_tokens=200)
    assert (whole["stop_reason"], "<|im" in json.dumps(whole)) == ("end_turn", False)
    response = await served.ask("/v1/responses", max_output_tokens=200)
    assert response["status"] == "completed"
    # An answer of an open form can end too.
    content, _, _, reason = await served.choice(guided_regex="[A-Za-z ,.!?']*", logit_bias={"2": 100.0})
    assert (content, reason) == ("", "stop")
