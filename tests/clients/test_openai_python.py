import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from the_server import KEY, MODEL

# Of the whole vocabulary a draw may fall between two unlikely tokens, closer to their border than the 1e-7 by which
# another batch rounds; of a few likely ones it does not.
LIKELY = {"top_k": 8}
HELLO = [{"role": "user", "content": "Hello! Do you like music?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 12},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }
]


def an_object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


WORD = {"type": "string", "maxLength": 8}
SCHEMAS: list[dict[str, Any]] = [
    an_object(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}),
    an_object(answer={"type": "boolean"}),
    an_object(color={"type": "string", "enum": ["red", "green", "blue"]}, count={"type": "integer", "maximum": 9,
                                                                                "minimum": -9}),
    an_object(tags={"type": "array", "items": WORD, "minItems": 1, "maxItems": 3}),
    an_object(point=an_object(x={"type": "integer", "minimum": 0, "maximum": 99}, y={"type": "null"})),
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    an_object(when={"type": "string", "format": "date"}),
    an_object(code={"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"}),
    {"anyOf": [an_object(a={"const": 1}), an_object(b=WORD)]},
    {"$defs": {"leaf": an_object(v={"type": "integer", "minimum": 0, "maximum": 9})},
     **an_object(left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"})},
]  # fmt: skip


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 40, **fields})


def test_a_conversation_is_cached_from_turn_to_turn(client: openai.OpenAI) -> None:
    messages: list[Any] = []
    for text in ("Hello! Do you like music?", "What kind of music?", "Who is your favorite singer?"):
        messages.append({"role": "user", "content": text})
        answer = chat(client, messages=messages, temperature=0.3)
        messages.append(answer.choices[0].message)
        cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached > answer.usage.prompt_tokens / 2


def test_a_stream_says_what_the_plain_answer_says(client: openai.OpenAI) -> None:
    plain = chat(client, seed=7)
    stream = chat(client, seed=7, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == plain.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens


def test_n_logprobs_and_bias(client: openai.OpenAI) -> None:
    answer = chat(client, n=3, logprobs=True, top_logprobs=2, stop=["."], presence_penalty=0.5, logit_bias={"5": -100})
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def test_tools_are_called_plain_and_streamed(client: openai.OpenAI) -> None:
    answer = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=120)
    (call,) = answer.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])
    named = {"type": "function", "function": {"name": "get_weather"}}
    with client.chat.completions.stream(
        model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=named, parallel_tool_calls=False, max_tokens=120
    ) as stream:
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])
    history = [*HELLO, answer.choices[0].message, {"role": "tool", "tool_call_id": "x", "content": "20 C"}]
    later = chat(client, messages=history, tools=TOOLS, max_tokens=10)
    assert later.usage.prompt_tokens_details.cached_tokens > 100


@pytest.mark.parametrize("place", range(len(SCHEMAS)))
def test_answers_are_valid_for_their_schema(client: openai.OpenAI, place: int) -> None:
    """Ten each, from a model that knows nothing."""
    schema = SCHEMAS[place]
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    for seed in range(5):
        answer = chat(client, response_format=form, max_tokens=150, n=2, seed=seed, temperature=1.0)
        for choice in answer.choices:
            assert choice.finish_reason == "stop", choice.message.content
            jsonschema.validate(json.loads(choice.message.content), schema)


def test_a_bad_schema_is_refused(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "frobnicate"}}}
    with pytest.raises(openai.BadRequestError):
        chat(client, response_format=form)


def test_completions_score_and_go_on(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["Hello", "Good morning"], max_tokens=5, echo=True, logprobs=1
    )
    assert [choice.text[:4] for choice in answer.choices] == ["Hell", "Good"]
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    *_, last = client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=5, stream=True, stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert last.usage.completion_tokens == 5  # several of them may come in one event


def test_responses_and_conversations(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="Hello!", max_output_tokens=20)
    second = client.responses.create(model=MODEL, input="And you?", previous_response_id=first.id, max_output_tokens=20)
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert len(list(client.responses.input_items.list(second.id))) == 3
    with client.responses.stream(model=MODEL, input="Hello!", max_output_tokens=20) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text
    assert "response.output_text.delta" in kinds
    begun = client.responses.create(model=MODEL, input="Hello!", background=True, max_output_tokens=400)
    assert client.responses.cancel(begun.id).status in ("cancelled", "completed", "incomplete")
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    conversation = client.conversations.create(metadata={"a": "b"})
    client.responses.create(model=MODEL, input="Hello!", conversation=conversation.id, max_output_tokens=20)
    assert len(list(client.conversations.items.list(conversation.id))) == 2


def test_fifty_streams_at_once_and_some_that_leave(base_url: str) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:

            async def one(place: int) -> str:
                said = ""
                stream = await client.chat.completions.create(
                    model=MODEL, messages=HELLO, max_tokens=30, seed=place % 5, stream=True, extra_body=LIKELY
                )
                async for chunk in stream:
                    said += chunk.choices[0].delta.content or ""
                    if place % 10 == 9:  # leaves in the middle
                        await stream.close()
                        return ""
                return said

            return await asyncio.gather(*[one(place) for place in range(50)])

    said = asyncio.run(run())
    for seed in range(5):
        assert len({text for place, text in enumerate(said) if place % 5 == seed and place % 10 != 9}) == 1


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        chat(client, model="other")
    with pytest.raises(openai.BadRequestError) as bad:
        chat(client, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong-key-1").models.list()
