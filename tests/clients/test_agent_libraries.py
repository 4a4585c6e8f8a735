"""Tests the libraries of which agents are made: two turns with calls of a tool, as each library runs them, in the
dialects that it speaks."""

import asyncio
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from the_server import RunningServer

NODE = Path(__file__).parent / "node"
MODEL, KEY = "scripted", "none"
FIRST, SECOND = "What is the weather in Paris and in Rome?", "And in Oslo?"
SAID = ("In both the sky is clear, 21 degrees.", "There as well, as it seems.")
# Long, as the instructions of agents are, so that a block of KV more or less is a small share.
SYSTEM = "You tell people about the weather. " + " ".join(f"Rule {n}: be brief about item {n}." for n in range(150))
LEAST = 0.95
ANSWERS, LOGGED_S = 5, 10.0


def weather(city: str) -> str:
    """Get the weather in a city.

    Args:
        city: The city.
    """
    return f"It is 21 degrees and clear in {city}."


@pytest.fixture
def measured(scripted: RunningServer, report: list[str], request: pytest.FixtureRequest) -> Any:
    """Check and report the shares of all requests of a test, after it."""
    before = len(scripted.shares())
    yield scripted
    end = time.monotonic() + LOGGED_S
    while len(shares := scripted.shares(before)) < ANSWERS and time.monotonic() < end:
        time.sleep(0.05)  # an answer is logged just after its client has it
    report.append(f"{request.node.name}: " + ", ".join(f"{cached}/{prompt}" for prompt, cached in shares))
    assert len(shares) == ANSWERS
    prompts, cached = (sum(column) for column in zip(*shares[1:], strict=True))
    assert cached >= LEAST * prompts, shares


@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_openai_agents(measured: RunningServer, dialect: str) -> None:
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{measured.url}/v1", api_key=KEY, max_retries=0)
    kind = OpenAIResponsesModel if dialect == "responses" else OpenAIChatCompletionsModel
    agent = Agent(
        name="Assistant",
        instructions=SYSTEM,
        tools=[function_tool(weather)],
        model=kind(model=MODEL, openai_client=client),
    )

    async def both() -> tuple[str, str]:
        first = await agents.Runner.run(agent, FIRST)
        later = agents.Runner.run_streamed(agent, [*first.to_input_list(), {"role": "user", "content": SECOND}])
        async for _ in later.stream_events():
            pass
        return str(first.final_output), str(later.final_output)

    assert asyncio.run(both()) == SAID


@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
def test_langchain(measured: RunningServer, dialect: str) -> None:
    langchain = pytest.importorskip("langchain.agents")
    model: Any
    if dialect == "messages":
        anthropic = pytest.importorskip("langchain_anthropic")
        model = anthropic.ChatAnthropic(model=MODEL, base_url=measured.url, api_key=KEY, max_retries=0)
    else:
        openai = pytest.importorskip("langchain_openai")
        model = openai.ChatOpenAI(
            model=MODEL, base_url=f"{measured.url}/v1", api_key=KEY, max_retries=0, stream_usage=True, streaming=True,
            use_responses_api=dialect == "responses",
        )  # fmt: skip
    agent = langchain.create_agent(model, [weather], system_prompt=SYSTEM)
    first = agent.invoke({"messages": [("user", FIRST)]})
    later = agent.invoke({"messages": [*first["messages"], ("user", SECOND)]})
    assert (first["messages"][-1].text, later["messages"][-1].text) == SAID


def test_anthropic(measured: RunningServer) -> None:
    """Hold the conversation as coding agents do: with marks for the cache that move to the last message, and reminders
    beside what the user says."""
    import anthropic

    client = anthropic.Anthropic(base_url=measured.url, api_key=KEY, max_retries=0)
    mark: Any = {"cache_control": {"type": "ephemeral"}}
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools: Any = [{"name": "weather", "description": "Get the weather.", "input_schema": schema, **mark}]
    messages: Any = []

    def ask(content: Any) -> str:
        messages.append({"role": "user", "content": content})
        while True:
            with client.messages.stream(
                model=MODEL, max_tokens=1000, system=[{"type": "text", "text": SYSTEM, **mark}], tools=tools,
                messages=messages,
            ) as stream:  # fmt: skip
                answer = stream.get_final_message()
            messages.append({"role": "assistant", "content": [part.model_dump() for part in answer.content]})
            uses = [part for part in answer.content if part.type == "tool_use"]
            if not uses:
                return answer.content[-1].text
            for message in messages:
                for part in message["content"] if isinstance(message["content"], list) else ():
                    part.pop("cache_control", None)
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": weather(**use.input)} for use in uses]
            messages.append({"role": "user", "content": [{**result, **mark} for result in results]})

    reminder = {"type": "text", "text": "<system-reminder>\nThe date has changed.\n</system-reminder>"}
    assert (ask(FIRST), ask([{"type": "text", "text": SECOND}, reminder])) == SAID


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
@pytest.mark.parametrize("provider", ["compatible", "openai", "anthropic"])
def test_ai_sdk(measured: RunningServer, provider: str) -> None:
    arguments = [provider, measured.url, MODEL, json.dumps([SYSTEM, FIRST, SECOND])]
    done = subprocess.run(["node", "ai_sdk.mjs", *arguments], cwd=NODE, capture_output=True, text=True, timeout=120)
    if "ERR_MODULE_NOT_FOUND" in done.stderr:
        pytest.skip("the AI SDK could not be installed")
    assert done.returncode == 0, done.stderr[-4000:]
    assert tuple(json.loads(done.stdout.splitlines()[-1])) == SAID  # the SDK may print warnings before it
