import json
from typing import Any

import httpx
import pytest

from tests.app.fakes import FakeEngine, Running, Script, in_process, make_settings

ANSWER = "Hello there, how are you today?"


async def complete(running: Running, prompt: Any = "The fox", **fields: Any) -> httpx.Response:
    return await running.http.post("/v1/completions", json={"model": "test-model", "prompt": prompt, **fields})


async def test_a_text_goes_on(running: Running):
    answer = (await complete(running, max_tokens=100)).json()
    assert (answer["object"], answer["id"][:5]) == ("text_completion", "cmpl-")
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}
    (submit,) = running.engine.submitted
    assert submit.token_ids == running.engine.tokenizer.encode("The fox").ids
    assert answer["usage"]["prompt_tokens"] == len(submit.token_ids)
    assert answer["x_cache"]["computed_tokens"] > 0
    await complete(running)
    assert running.engine.submitted[-1].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("The fox", [["The fox"]]),
        (["The fox", "A dog"], [["The fox"], ["A dog"]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6, 7], [8]], [[5, 6, 7], [8]]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_are_texts_or_ids_one_or_many(running: Running, prompt, expected, stream):
    response = await complete(running, prompt, n=2, max_tokens=100, stream=stream)
    encode = running.engine.tokenizer.encode
    ids = [encode(one[0]).ids if isinstance(one[0], str) else one for one in expected]
    assert [submit.token_ids for submit in running.engine.submitted] == ids
    assert len({submit.session_id for submit in running.engine.submitted}) == len(ids)
    texts = [""] * 2 * len(ids)
    if stream:
        lines = [line.removeprefix("data: ") for line in response.text.strip().split("\n\n")]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        for choice in (choice for chunk in chunks for choice in chunk["choices"]):
            texts[choice["index"]] += choice["text"]
        assert [chunk for chunk in chunks if "x_cache" in chunk] == chunks[-1:]
    else:
        answer = response.json()
        for choice in answer["choices"]:
            texts[choice["index"]] = choice["text"]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        counted = sum(answer["x_cache"][f"{tier}_tokens"] for tier in ("hbm", "computed"))
        assert counted == sum(map(len, ids))
    assert texts == [ANSWER] * len(texts)


async def test_a_target_of_several_prompts_is_made_if_all_make_it(running: Running):
    for start_s, ttft_ms in ((0.0, 60_000), (0.1, 50)):
        running.engine.script.start_s = start_s
        cache = (await complete(running, ["The fox", "A dog"], ttft_ms=ttft_ms)).json()["x_cache"]
        assert (cache["ttft_target_ms"], cache["ttft_target_made"]) == (ttft_ms, ttft_ms == 60_000)
    assert all(submit.target_s is not None for submit in running.engine.submitted)
    assert (await complete(running)).json()["x_cache"]["ttft_target_made"] is None


async def test_echo_scores_the_prompt(running: Running):
    """Ask for it as lm-evaluation-harness does."""
    ids = running.engine.tokenizer.encode("The fox 🎉").ids
    answer = (await complete(running, ids, max_tokens=1, logprobs=1, echo=True, temperature=0)).json()
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "The fox 🎉Hello"[: len(choice["text"])]
    assert len(logprobs["tokens"]) == len(ids) + 1
    assert logprobs["token_logprobs"] == [None] + [-0.25] * (len(ids) - 1) + [-0.5]
    assert logprobs["top_logprobs"][0] is None
    assert all(logprobs["tokens"][n] in top for n, top in enumerate(logprobs["top_logprobs"]) if top is not None)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith("🎉" if token.startswith("bytes:") else token)
    assert any(token.startswith("bytes:\\x") for token in logprobs["tokens"])
    (submit,) = running.engine.submitted
    assert (submit.prompt_logprobs, submit.truncation) == (1, "disabled")


async def test_offsets_of_a_stream_count_characters(running: Running):
    """They do although the tokens of a character come before it."""
    running.engine.script = Script(answer="Hi 🎉 fox")
    streamed = await complete(running, max_tokens=100, logprobs=0, stream=True)
    choices = [json.loads(line[6:])["choices"][0] for line in streamed.text.strip().split("\n\n")[:-1]]
    text = "".join(choice["text"] for choice in choices)
    shown = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    placed = [pair for one in shown for pair in zip(one["tokens"], one["text_offset"], strict=True)]
    assert any(token.startswith("bytes:") for token, _ in placed)
    assert placed.pop() == ("<|im_end|>", len(text))
    for token, offset in placed:
        assert text[offset:].startswith("🎉" if token.startswith("bytes:") else token)


async def test_echo_alone_and_answers_of_no_token(running: Running):
    echoed = (await complete(running, echo=True, max_tokens=100, n=2)).json()
    assert [choice["text"] for choice in echoed["choices"]] == [f"The fox{ANSWER}"] * 2
    assert running.engine.submitted[-1].prompt_logprobs is None
    scored = (await complete(running, echo=True, max_tokens=0, logprobs=0, n=2)).json()
    ids = running.engine.tokenizer.encode("The fox").ids
    for choice in scored["choices"]:
        assert (choice["text"], choice["finish_reason"]) == ("The fox", "length")
        assert len(choice["logprobs"]["token_logprobs"]) == len(ids)
    assert scored["usage"]["completion_tokens"] == 0
    streamed = await complete(running, echo=True, max_tokens=100, stream=True)
    chunks = [json.loads(line[6:]) for line in streamed.text.strip().split("\n\n")[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == f"The fox{ANSWER}"


async def test_logprobs_of_the_answer_alone(running: Running):
    logprobs = (await complete(running, max_tokens=3, logprobs=2)).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"][0] == 0
    assert "".join(logprobs["tokens"]) == ANSWER[: len("".join(logprobs["tokens"]))]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["ok", ""]}, "prompt"),
        ({"prompt": [300]}, "prompt"),
        ({"prompt": [["x"]]}, None),
        ({"prompt": [1, "x"]}, None),
        ({"prompt": [-1]}, None),
        ({"prompt": {"x": 1}}, None),
        ({"max_tokens": 0}, None),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "stream": True, "logprobs": 1}, None),
        ({"prompt": ["x"] * 257}, None),
        ({"prompt": "x" * 300, "truncation": "disabled"}, "prompt"),
        ({"prompt": "x" * 300, "echo": True, "logprobs": 1}, "prompt"),
    ],
)
async def test_what_cannot_be_done_is_refused(running: Running, fields, param):
    response = await complete(running, **fields)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert param is None or error["param"] == param
    assert running.engine.submitted == []


@pytest.mark.parametrize("prompt", [[5, 300], [[5], [300]], "a<|endoftext|>", ["a", "b<|endoftext|>c"]])
async def test_a_prompt_with_a_token_of_an_image_is_refused(engine: FakeEngine, tmp_path, prompt):
    """Its model would read the token as a word. In chats such a token's text is spelled out."""
    engine.facts = {"vocab_size": 301, "media_token_ids": (0, 5, 300)}  # 5 is a word
    async with in_process(engine, make_settings(tmp_path)) as running:
        response = await complete(running, prompt)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "prompt", "image_not_supported")
        assert "stands for an image, a video or a sound" in error["message"]
        assert running.engine.submitted == []
        assert (await complete(running, [5, 6])).status_code == 200
        chat = {"model": "test-model", "messages": [{"role": "user", "content": "<|endoftext|>"}]}
        assert (await running.http.post("/v1/chat/completions", json=chat)).status_code == 200
        assert 0 not in running.engine.submitted[-1].token_ids


async def test_a_batch_that_has_no_place_takes_none(engine: FakeEngine, tmp_path):
    async with in_process(engine, make_settings(tmp_path, scheduler={"max_seqs": 1, "max_queued": 3})) as running:
        too_many = await complete(running, ["a"] * 5)
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "prompt")
        engine.script.step_s = 0.01
        service = running.app.state.service
        held = service.places.enter("local", 2)
        refused = await complete(running, ["a", "b", "c"])
        assert refused.status_code == 503
        assert service.places.taken == 2
        assert not service.generations
        held.leave()
        engine.script.refuse, engine.script.refuse_after = "overloaded", 2
        broken = await complete(running, ["a", "b", "c"])
        assert broken.status_code == 503
        assert (service.places.taken, len(service.generations)) == (0, 0)
