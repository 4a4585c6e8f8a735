"""Tests that a conversation with pictures goes on: each becomes the same text in every turn, so the prompt of a turn
begins with the whole turn before it."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.app.fakes import FakeEngine, in_process, make_settings

SHOWN = "[image: not shown, this model reads text]"


def picture(turn: int) -> dict[str, Any]:
    """A picture that its client encodes anew for every request."""
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA" * (turn + 1)}}


def result(turn: int) -> dict[str, Any]:
    content = [{"type": "text", "text": "a chart"}, picture(turn)]
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": content}]}


CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}}]}


@pytest.mark.parametrize("is_from_tool", [True, False])
async def test_ten_turns_with_a_picture_begin_with_the_turn_before(
    engine: FakeEngine, tmp_path: Path, is_from_tool: bool
) -> None:
    engine.facts = {"max_context": 4096}
    texts: list[dict[str, Any]] = []

    def messages(turn: int) -> list[dict[str, Any]]:
        if is_from_tool:
            return [{"role": "user", "content": "Read the chart."}, CALL, result(turn), *texts]
        return [{"role": "user", "content": [picture(turn)]}, {"role": "user", "content": "What is it?"}, *texts]

    async with in_process(engine, make_settings(tmp_path)) as running:
        sessions = set()
        for turn in range(10):
            body = {"model": "test-model", "max_tokens": 200, "messages": messages(turn)}
            response = await running.http.post("/v1/messages", json=body)
            assert response.status_code == 200, response.text
            sessions.add(response.headers["x-session-id"])
            texts += [
                {"role": "assistant", "content": response.json()["content"]},
                {"role": "user", "content": f"And number {turn}?"},
            ]
        assert len(sessions) == 1
        prompts = [submit.token_ids for submit in engine.submitted]
        for before, after in pairwise(prompts):
            assert after[: len(before)] == before
        assert engine.tokenizer.decode(prompts[-1], skip_special_tokens=False).count(SHOWN) == 1
