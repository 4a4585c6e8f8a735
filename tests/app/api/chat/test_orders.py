"""Tests the messages of coding agents with templates that do not take them as they come, from the request to the
engine."""

from pathlib import Path
from typing import Any

import pytest

from tests.app.fakes import FakeEngine, Running, in_process, make_settings, model_info, write_tokenizer
from tests.app.text.order_templates import ALTERNATES, CHATML, FIRST_ONLY, NO_SYSTEM, PARTS, SILENT, STRIPS_THOUGHTS

CODEX = [
    {"role": "developer", "content": "Be brief."},
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "The folder is /work."},
    {"role": "user", "content": "Hello"},
]
REMINDER = {"role": "system", "content": "Plan mode."}


class LargeEngine(FakeEngine):
    def loaded(self) -> None:
        self.model, self.state = model_info(self.directory, max_context=2048), "ready"
        self._loaded.set()


def serve(tmp_path: Path, template: str) -> Any:
    engine = LargeEngine(directory=write_tokenizer(tmp_path / "model", template=template))
    return in_process(engine, make_settings(tmp_path / "state"))


def prompt_of(running: Running) -> str:
    ids = running.engine.submitted[-1].token_ids
    return running.engine.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("template", [CHATML, FIRST_ONLY, SILENT, ALTERNATES, NO_SYSTEM, PARTS])
async def test_no_message_is_refused_or_lost_and_the_past_stays(tmp_path: Path, template: str):
    async with serve(tmp_path, template) as running:
        first = await running.chat(messages=CODEX)
        assert first.status_code == 200, first.text
        answer = first.json()["choices"][0]["message"]
        # The next request has a reminder before what the user asks, and the one after it a second one at its end.
        history = [*CODEX, answer, REMINDER, {"role": "user", "content": "And you?"}]
        for messages in (history, [*history, answer, REMINDER]):
            before = running.engine.submitted[-1].token_ids
            response = await running.chat(messages=messages)
            assert response.status_code == 200, response.text
            assert response.headers["x-session-id"] == first.headers["x-session-id"]
            generated = running.engine.tokenizer.encode(running.engine.script.answer).ids
            after = running.engine.submitted[-1].token_ids
            assert after[: len(before) + len(generated)] == before + generated  # the very ids
        prompt = prompt_of(running)
    said = ["Be brief.", "Be kind.", "/work", "Hello", answer["content"], "Plan mode.", "And you?", answer["content"]]
    at = 0
    for text in said:
        at = prompt.index(text, at)
    assert prompt.count("Plan mode.") == 2
    assert ("<system-reminder>" in prompt) == (template not in (CHATML, PARTS))


async def test_a_reminder_keeps_thoughts_that_another_server_generated(tmp_path: Path):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    thinks = {"role": "assistant", "content": "", "reasoning_content": "The fox.", "tool_calls": [call]}
    history = [CODEX[0], CODEX[3], thinks, {"role": "tool", "tool_call_id": "call_1", "content": "A dog."}]
    async with serve(tmp_path, STRIPS_THOUGHTS) as running:
        prompts = []
        for messages in (history, [*history, REMINDER]):
            response = await running.chat(messages=messages, tools=tools)
            assert response.status_code == 200, response.text
            prompts.append(prompt_of(running))
        kept = prompts[0].partition("A dog.")[0]
        assert "The fox." in kept
        assert prompts[1].startswith(kept)
        assert "Plan mode." in prompts[1]


async def test_what_was_found_is_told(tmp_path: Path):
    async with serve(tmp_path, ALTERNATES) as running:
        told = (await running.http.get("/v1/models/test-model")).json()["template"]
    assert (told["system"], told["systems"], told["user_after_user"]) == ("kept", "refused", "refused")
    assert told.keys() >= {"later_system", "tools", "calls", "results", "thoughts", "parts"}


async def test_marks_follow_their_messages(tmp_path: Path):
    marked = [*CODEX[:3], {**CODEX[3], "x_cache": {"important": True}}]
    async with serve(tmp_path, ALTERNATES) as running:
        await running.chat(messages=marked)
        (submit,) = running.engine.submitted
        ((start, end),) = submit.important
        kept = running.engine.tokenizer.decode(submit.token_ids[start:end])
        assert "The folder is /work.\n\nHello" in kept  # both are one message now
        # The system prompt is kept too, though it came as two messages.
        lead = running.engine.tokenizer.decode(submit.token_ids[: submit.keep_first_tokens])
        assert ("Be kind." in lead, "folder" in lead) == (True, False)


async def test_tools_reach_the_prompt_of_a_template_without_a_system_message(tmp_path: Path):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    async with serve(tmp_path, NO_SYSTEM) as running:
        assert (await running.chat(tools=tools)).status_code == 200
        assert '"name": "add"' in prompt_of(running)
