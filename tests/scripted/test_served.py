"""Tests that a server reads the calls of a scripted model in every dialect, and finds the history of each next request,
also after a restart and with thoughts."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from benchmarks.harness.servers import ServerProcess, serve
from reprise.app.cli import program
from tests.scripted.agents import COUNT, LIST, READ, answers, template
from tests.scripted.chain import write_model

pytestmark = pytest.mark.servers

SETTINGS: dict[str, str | int | float] = {"cache.hbm_tokens": 32_768, "engine.threads": 1}
LEAST = 0.98  # share of the history's tokens that each request has to find
# Some 3,000 tokens: a block that is not found again must not count for more than a hundredth of the history.
SYSTEM = "You work on a small project. " + " ".join(f"Rule {n}: say nothing about item {n}." for n in range(250))
SHELL = {"type": "object", "properties": {"command": {"type": "string"}, "description": {"type": "string"}}}
TOOL, TOLD = "bash", "Runs a command."
DIALECTS = ("chat", "responses", "messages")


@dataclass
class Step:
    """One request and its answer."""

    text: str
    calls: list[tuple[str, Any]]  # name and arguments
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int


@dataclass
class Agent:
    """A client that sends its whole history in every request, and runs a call by giving it a short result."""

    url: str
    dialect: str
    history: list[dict[str, Any]] = field(default_factory=list)
    result: Any = "done"  # content of every result, in Messages

    @property
    def system(self) -> str:
        """The instructions, which begin differently in each dialect: what one leaves in the cache helps no other."""
        return f"You speak {self.dialect}. {SYSTEM}"

    def ask(self, text: str) -> list[Step]:
        """Return all steps until an answer without a call."""
        self.history.append({"role": "user", "content": text})
        steps = [self.step()]
        while steps[-1].calls:
            steps.append(self.step())
        return steps

    def step(self) -> Step:
        return {"chat": self._chat, "responses": self._respond, "messages": self._message}[self.dialect]()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{self.url}{path}", json={"model": "any", **body}, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def _chat(self) -> Step:
        tool = {"type": "function", "function": {"name": TOOL, "description": TOLD, "parameters": SHELL}}
        messages = [{"role": "system", "content": self.system}, *self.history]
        answer = self._post("/v1/chat/completions", {"messages": messages, "tools": [tool]})
        message, usage = answer["choices"][0]["message"], answer["usage"]
        calls = message.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in calls]
        self.history += [message, *results]
        named = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Step(message["content"] or "", named, usage["prompt_tokens"], cached, usage["completion_tokens"])

    def _respond(self) -> Step:
        tool = {"type": "function", "name": TOOL, "description": TOLD, "parameters": SHELL}
        body = {"instructions": self.system, "input": self.history, "tools": [tool], "store": False}
        answer = self._post("/v1/responses", body)
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
        results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "done"} for call in calls]
        self.history += [*answer["output"], *results]
        named, usage = [(call["name"], json.loads(call["arguments"])) for call in calls], answer["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        return Step("".join(texts), named, usage["input_tokens"], cached, usage["output_tokens"])

    def _message(self) -> Step:
        tool = {"name": TOOL, "description": TOLD, "input_schema": SHELL}
        body = {"system": self.system, "messages": self.history, "tools": [tool], "max_tokens": 1000}
        answer = self._post("/v1/messages", body)
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        texts = [block["text"] for block in answer["content"] if block["type"] == "text"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": self.result} for call in calls]
        self.history.append({"role": "assistant", "content": answer["content"]})
        self.history += [{"role": "user", "content": results}] if results else []
        named, usage = [(call["name"], call["input"]) for call in calls], answer["usage"]
        cached = usage["cache_read_input_tokens"]
        return Step("".join(texts), named, usage["input_tokens"] + cached, cached, usage["output_tokens"])


def said(steps: list[Step]) -> list[object]:
    """Return the commands and texts of steps."""
    return [step.calls[0][1]["command"] if step.calls else step.text for step in steps]


def assert_found(before: Step, step: Step) -> None:
    history = before.prompt_tokens + before.answer_tokens
    assert step.cached_tokens >= LEAST * history, (before, step)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "thinks"])
def thinks(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def model(thinks: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("scripted"), template(thinks=thinks), answers(thinks=thinks))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[ServerProcess]:
    with serve("scripted", {**SETTINGS, "model.source": str(model), "model.aliases": "*"}) as running:
        yield running


@pytest.mark.always
@pytest.mark.parametrize("dialect", DIALECTS)
def test_calls_are_read_and_each_request_finds_its_history(server: ServerProcess, dialect: str, thinks: bool) -> None:
    agent = Agent(server.url, dialect)
    first = agent.ask("List the files, then read hello.py.")
    assert said(first) == [LIST, READ, "The program greets by name."]
    assert first[0].text == "I look."
    assert {name for step in first for name, _ in step.calls} == {TOOL}
    for before, step in pairwise(first):
        assert_found(before, step)
    second = agent.ask("How many lines has it?")
    assert said(second) == [COUNT, "hello.py is five lines long."]
    assert_found(*second)
    if not thinks:  # thoughts of earlier turns leave the prompt, and what comes after them moves
        assert_found(first[-1], second[0])


def picture(data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def test_a_conversation_with_pictures_goes_on_and_finds_its_history(server: ServerProcess, thinks: bool) -> None:
    """The first picture comes from a tool, the second from the user, who sends it before the question. Some clients
    encode a picture anew for every request."""
    if thinks:
        pytest.skip("thoughts of earlier turns leave the prompt, and what comes after them moves")
    agent = Agent(server.url, "messages", result=[{"type": "text", "text": "a chart"}, picture("AAAA")])
    steps = agent.ask("Look at the chart.")
    assert len(steps) == 3
    agent.history.append({"role": "user", "content": [picture("AAAA")]})
    for turn in range(10):
        for message in agent.history:
            for block in message["content"] if isinstance(message["content"], list) else ():
                if block.get("type") == "image":
                    block["source"]["data"] = "AAAA" * (turn + 1)
        steps += agent.ask(f"And what is number {turn}?")
    assert len(steps) >= 13
    for before, step in pairwise(steps):
        assert_found(before, step)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_programs_own_trial_passes(server: ServerProcess, dialect: str) -> None:
    client = {"chat": "opencode", "responses": "codex", "messages": "anthropic"}[dialect]
    done = CliRunner().invoke(program.cli, ["client", client, "--url", server.url, "--test"], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert f'{dialect}: a call was read: report_weather {{"city": "Paris"}}' in done.stderr


def test_the_history_is_found_after_a_restart(model: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "model.source": str(model), "model.aliases": "*", "cache.disk_dir": str(tmp_path)}
    agents = [Agent("", dialect, [{"role": "user", "content": "List the files."}]) for dialect in DIALECTS]

    def step_of_all(server: ServerProcess) -> list[Step]:
        for agent in agents:
            agent.url = server.url
        return [agent.step() for agent in agents]

    with serve("scripted-first", settings) as server:
        before = step_of_all(server)
        asyncio.run(asyncio.sleep(1.0))  # a turn's KV is written after its answer
    with serve("scripted-second", settings) as server:
        after = step_of_all(server)
    for one, other in zip(before, after, strict=True):
        assert said([one, other]) == [LIST, READ]
        assert_found(one, other)
