"""Tests that what a message of the history cannot have by its role, and ids that are no texts, end no conversation."""

from typing import Any

import pytest

from tests.app.fakes import Running

ASKED = {"role": "user", "content": "Who?"}
CALL = {"id": 5, "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": None, "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "Sun."}
PAST: list[tuple[str, list[Any], str]] = [
    ("/v1/chat/completions", [{**ASKED, "tool_calls": [CALL], "tool_call_id": "a"}, ASKED], "messages.tool_calls"),
    ("/v1/chat/completions", [{**ASKED, "refusal": "No.", "audio": {"id": "a"}}, ASKED], "messages.refusal"),
    ("/v1/chat/completions", [{"role": "tool", "content": "a", "function_call": {}}, ASKED], "messages.function_call"),
    ("/v1/chat/completions",
     [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": 5, "content": "a"}, ASKED], ""),
    ("/v1/messages", [{"role": "user", "content": [USE]}, {"role": "assistant", "content": "Yes."}, ASKED], ""),
    ("/v1/messages", [ASKED, {"role": "assistant", "content": [{**RESULT, "tool_use_id": {}}]}, ASKED], ""),
    ("/v1/messages", [ASKED, {"role": "assistant", "content": [{**USE, "id": 5}]},
                      {"role": "user", "content": [{**RESULT, "tool_use_id": 5}]}], ""),
    *(
        ("/v1/messages", [{"role": role, "content": [{"type": "thinking", "thinking": "Hm."}, RESULT]}, ASKED],
         "messages.thinking")
        for role in ("user", "system")
    ),
    ("/v1/messages", [{"role": "user", "content": [{"type": "redacted_thinking", "data": "x"}]}, ASKED],
     "messages.redacted_thinking"),
    ("/v1/messages", [{"role": "system", "content": [USE]}, ASKED], ""),
    ("/v1/messages", [{"role": "user", "content": [{"type": ["text"], "text": "a"}]}, ASKED], "messages.part"),
    ("/v1/responses", [{"type": "function_call", "call_id": None, "id": 5, "name": "f", "arguments": "{}"},
                       {"type": "function_call_output", "call_id": None, "output": "a"}, ASKED], ""),
    ("/v1/responses", [{**ASKED, "id": {"a": 1}}, {"role": "assistant", "content": "Yes", "id": "x" * 300}, ASKED], ""),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(PAST)))
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_role_cannot_have_is_left_out_or_told(running: Running, number: int, stream: bool) -> None:
    path, said, lost = PAST[number]
    field, limit = ("input", "max_output_tokens") if "responses" in path else ("messages", "max_tokens")
    body = {field: said, limit: 5, "stream": stream, "truncation": "auto"}
    if path == "/v1/messages":
        del body["truncation"]
    readiness = running.app.state.readiness
    answer = await running.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert lost in answer.headers.get("warning", "")
    _, tokenizer = readiness.require()
    prompt = tokenizer.decode(running.engine.submitted[-1].token_ids, skip_special_tokens=False)
    assert "Sun." in prompt or "Sun." not in str(said)


async def test_in_the_newest_message_it_is_refused(running: Running) -> None:
    for path, said in (
        ("/v1/chat/completions", [{**ASKED, "tool_calls": [{**CALL, "id": "a"}]}]),
        ("/v1/chat/completions", [{**ASKED, "refusal": "No."}]),
        ("/v1/messages", [{"role": "user", "content": [{**USE, "id": "a"}]}]),
    ):
        answer = await running.http.post(path, json={"messages": said, "max_tokens": 5})
        assert answer.status_code == 400, answer.text
