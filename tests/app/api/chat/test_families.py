"""Tests calls in the forms of several families, from the request to the engine and back, over two turns."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.app.fakes import FakeEngine, Running, in_process, make_settings, model_info
from tests.app.text.families.samples import SAMPLES, write_model, written

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    }
]
ARGUMENTS = {"place": "Zürich", "days": 3}
ASKED = [{"role": "user", "content": "Rain?"}]


class LargeEngine(FakeEngine):
    def loaded(self) -> None:
        self.model, self.state = model_info(self.directory, max_context=8192, vocab_size=400), "ready"
        self._loaded.set()


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Running]:
    """Return a function that serves a model of a family, and ends what it served at the end of the test."""
    contexts = []

    async def start(family: str, **model: str) -> Running:
        engine = LargeEngine(directory=write_model(family, tmp_path / "model"))
        contexts.append(in_process(engine, make_settings(tmp_path / "state", model=model)))
        return await contexts[-1].__aenter__()

    yield start
    for context in contexts:
        await context.__aexit__(None, None, None)


@pytest.mark.parametrize("family", sorted(SAMPLES))
async def test_a_call_and_its_result_over_two_turns(serve, family):
    running = await serve(family)
    capabilities = (await running.http.get("/v1/models")).json()["data"][0]["capabilities"]
    assert (capabilities["calls"], capabilities["thoughts"]) == (family, SAMPLES[family].thoughts)
    running.engine.script.answer = written(family, [("look_up", ARGUMENTS)])
    first = (await running.chat(messages=ASKED, tools=TOOLS, max_tokens=400)).json()
    (choice,) = first["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look_up", ARGUMENTS)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "No."}
    running.engine.script.answer = "No rain."
    history = [*ASKED, choice["message"], result]
    second = (await running.chat(messages=history, tools=TOOLS, max_tokens=400)).json()
    assert second["choices"][0]["message"]["content"] == "No rain."
    assert second["x_cache"]["session_id"] == first["x_cache"]["session_id"]
    asked, answered = (submit.token_ids for submit in running.engine.submitted)
    generated = running.engine.tokenizer.encode(written(family, [("look_up", ARGUMENTS)])).ids
    assert answered[: len(asked) + len(generated)] == asked + generated  # the very ids


@pytest.mark.parametrize("family", ["qwen-coder", "glm", "harmony", "gemma", "mistral-args", "kimi", "llama", "phi"])
async def test_arguments_are_streamed(serve, family):
    running = await serve(family)
    running.engine.script.answer = written(family, [("look_up", ARGUMENTS)])
    response = await running.chat(messages=ASKED, tools=TOOLS, max_tokens=400, stream=True)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0] for line in lines if json.loads(line)["choices"]]
    calls = [call for choice in deltas for call in choice["delta"].get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "look_up"
    assert len(calls) > 4
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == ARGUMENTS
    assert "".join(choice["delta"].get("content") or "" for choice in deltas) == ""
    assert deltas[-1]["finish_reason"] == "tool_calls"


async def test_a_required_call_has_the_familys_grammar(serve):
    running = await serve("qwen-coder")
    await running.chat(messages=ASKED, tools=TOOLS, tool_choice="required")
    assert "<function=look_up>" in running.engine.submitted[0].grammar


async def test_settings_overrule_what_the_template_shows(serve):
    running = await serve("hermes", calls="glm", thoughts="none")
    capabilities = (await running.http.get("/v1/models")).json()["data"][0]["capabilities"]
    assert (capabilities["calls"], capabilities["thoughts"], capabilities["tools_in"]) == ("glm", "none", "template")
    running.engine.script.answer = "<think>Hm." + written("glm", [("look_up", ARGUMENTS)])
    message = (await running.chat(messages=ASKED, tools=TOOLS, max_tokens=400)).json()["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == ("<think>Hm.", 1)


async def test_ids_of_calls_are_those_that_templates_take(serve):
    for family, expected in (("kimi", "functions.look_up:0"), ("mistral", None)):
        running = await serve(family)
        running.engine.script.answer = written(family, [("look_up", ARGUMENTS)])
        answer = (await running.chat(messages=ASKED, tools=TOOLS, max_tokens=400)).json()
        call_id = answer["choices"][0]["message"]["tool_calls"][0]["id"]
        assert call_id == expected if expected else (len(call_id) == 9 and call_id.isalnum())
