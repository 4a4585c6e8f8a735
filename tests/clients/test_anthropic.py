from typing import Any

import anthropic
import pytest
from the_server import KEY, MODEL

HELLO: Any = [{"role": "user", "content": "Hello! Do you like music?"}]
TOOLS: Any = [
    {
        "name": "get_weather",
        "description": "The weather in a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
]


@pytest.fixture
def client(base_url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=base_url, api_key=KEY, max_retries=0, timeout=120)


def test_messages_plain_and_streamed(client: anthropic.Anthropic) -> None:
    plain = client.messages.create(
        model=MODEL, max_tokens=30, messages=HELLO, system="Be brief.", extra_body={"top_k": 1}
    )
    with client.messages.stream(
        model=MODEL, max_tokens=30, messages=HELLO, system="Be brief.", extra_body={"top_k": 1}
    ) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == plain.content[0].text
    assert final.usage.cache_read_input_tokens > 0
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.")
    assert counted.input_tokens == final.usage.input_tokens + final.usage.cache_read_input_tokens


def test_tools(client: anthropic.Anthropic) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 120, "tools": TOOLS, "tool_choice": {"type": "any"}}
    answer = client.messages.create(messages=HELLO, **fields)
    call = next(block for block in answer.content if block.type == "tool_use")
    assert (call.name, list(call.input)) == ("get_weather", ["city"])
    assert answer.stop_reason == "tool_use"
    with client.messages.stream(messages=HELLO, **fields) as stream:
        assert any(block.type == "tool_use" for block in stream.get_final_message().content)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny."}
    history = [*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    later = client.messages.create(messages=history, model=MODEL, max_tokens=20, tools=TOOLS)
    assert later.usage.cache_read_input_tokens > 100


def test_a_coding_agents_turns_find_those_before(client: anthropic.Anthropic) -> None:
    """Its system prompt begins with a line that is another one each time, and its blocks are marked."""
    marked: Any = {"cache_control": {"type": "ephemeral"}}
    messages: Any = []
    for turn in range(3):
        billing = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=cli; cch={turn}6ee5;"
        system: Any = [
            {"type": "text", "text": text, **marked} for text in (billing, "You are an agent. " * 20, "Be brief.")
        ]
        messages.append({"role": "user", "content": [{"type": "text", "text": "Hello! " * 5, **marked}]})
        answer = client.beta.messages.create(
            model=MODEL, max_tokens=20, messages=messages, system=system, tools=TOOLS,
            betas=["context-management-2025-06-27"],
            context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        )  # fmt: skip
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        if turn:
            assert answer.usage.cache_read_input_tokens > 5 * answer.usage.input_tokens
    assert answer.usage.cache_creation_input_tokens == 0


def test_errors_are_the_clients_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=MODEL, max_tokens=5, messages=[])
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong-key-1").messages.create(model=MODEL, max_tokens=5, messages=HELLO)
