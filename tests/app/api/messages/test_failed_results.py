"""Tests that a model is told of a tool call that failed."""

from pathlib import Path
from typing import Any

import pytest

from tests.app.fakes import FakeEngine, in_process, make_settings

CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}}]}


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("no such file", "Error: no such file"),
        ([{"type": "text", "text": "no such file"}], "Error: no such file"),
        ("error 5: gone", "error 5: gone"),
        (None, "Error: "),
    ],
)
async def test_the_result_of_a_failed_call_says_so(
    engine: FakeEngine, tmp_path: Path, content: Any, shown: str
) -> None:
    prompts = []
    async with in_process(engine, make_settings(tmp_path)) as running:
        for failed in ({"is_error": True}, {"is_error": False}, {"is_error": None}, {}):
            block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **failed}
            body = {
                "model": "test-model",
                "max_tokens": 4,
                "messages": [{"role": "user", "content": "Read it."}, CALL, {"role": "user", "content": [block]}],
            }
            answer = await running.http.post("/v1/messages", json=body)
            assert answer.status_code == 200, answer.text
            prompts.append(running.engine.tokenizer.decode(running.engine.submitted[-1].token_ids))
    assert shown in prompts[0]
    assert prompts[1] == prompts[2] == prompts[3]
    assert "Error: " not in prompts[1]
