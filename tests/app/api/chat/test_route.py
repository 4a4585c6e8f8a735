import json

import pytest

from reprise.engine.messages import given_salt, is_exact
from tests.app.fakes import FakeEngine, Running, events, in_process, make_settings, write_tokenizer

ANSWER = "Hello there, how are you today?"


async def test_a_plain_answer(running: Running):
    response = await running.chat(temperature=0)
    answer = response.json()
    assert response.status_code == 200
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": ANSWER, "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    (submitted,) = running.engine.submitted
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert running.engine.tokenizer.decode(submitted.token_ids, skip_special_tokens=False) == prompt
    generated = len(running.engine.tokenizer.encode(ANSWER).ids) + 1  # 1 is the end of the turn
    assert answer["usage"] == {
        "prompt_tokens": len(submitted.token_ids),
        "completion_tokens": generated,
        "total_tokens": len(submitted.token_ids) + generated,
        "prompt_tokens_details": {"cached_tokens": len(submitted.token_ids) // 2},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


@pytest.mark.parametrize("content", ["Hello there.", [{"type": "text", "text": "Hello there."}]])
async def test_a_prediction_reaches_the_engine_and_comes_back_in_usage(running: Running, content):
    running.engine.script.predictions = (7, 3)
    answer = (await running.chat(prediction={"type": "content", "content": content}, n=2)).json()
    (submitted,) = running.engine.submitted
    assert running.engine.tokenizer.decode(submitted.prediction) == "Hello there."
    details = answer["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (14, 6), "of both choices"


@pytest.mark.parametrize("text", ["<|im_end|>", "word " * 100_000])
async def test_no_prediction_harms_the_engine(running: Running, text):
    """Special tokens are spelled out, and what is longer than any answer is cut."""
    response = await running.chat(prediction={"type": "content", "content": text})
    assert response.status_code == 200
    (submitted,) = running.engine.submitted
    end = running.engine.tokenizer.token_to_id("<|im_end|>")
    assert end not in submitted.prediction
    assert len(submitted.prediction) <= running.engine.model.max_context


@pytest.mark.parametrize("prediction", [{}, {"type": "content"}, {"type": "x", "content": "a"}, "a", {"content": "a"}])
async def test_a_prediction_of_another_kind_is_refused(running: Running, prediction):
    response = await running.chat(prediction=prediction)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prediction")


async def test_thoughts_are_told_apart_and_counted(tmp_path):
    directory = write_tokenizer(tmp_path / "model")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] += "{# <think> #}"  # a template of a model that thinks
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    engine = FakeEngine(directory=directory)
    thought, said = "<think>\nHello there\n</think>", "\n\nhow are you today?"
    engine.script.answer = thought + said
    async with in_process(engine, make_settings(tmp_path / "state")) as running:
        answer = (await running.chat()).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hello there", "how are you today?")
        assert message["reasoning"] == "Hello there"  # the name by which other clients look for it
        streamed = events((await running.chat(stream=True)).text)
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
        for name in ("reasoning_content", "reasoning"):
            assert "".join(delta.get(name, "") for delta in deltas) == "Hello there"
        # Words are no tokens across the tag here: it is followed by a newline.
        expected = len(engine.tokenizer.encode(thought).ids)
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == expected
        responded = await running.http.post("/v1/responses", json={"model": "test-model", "input": "Hello"})
        assert responded.json()["usage"]["output_tokens_details"] == {"reasoning_tokens": expected}
        begun = len(engine.tokenizer.encode("<think>\nHello").ids)
        cut = (await running.chat(max_tokens=begun)).json()["usage"]
        assert cut["completion_tokens_details"]["reasoning_tokens"] == begun  # it has not come to an end


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}),
        ("/v1/completions", {"prompt": ["Hello", "there"]}),
    ],
)
async def test_a_plain_answer_says_in_a_header_what_was_cached(running: Running, path, body):
    answer = await running.http.post(path, json={"model": "test-model", **body})
    cache = answer.json()["x_cache"]
    said = dict(part.split("=") for part in answer.headers["x-cache"].split(", "))
    assert {f"{source}_tokens": int(count) for source, count in said.items()} == {
        name: cache[name] for name in ("hbm_tokens", "dram_tokens", "disk_tokens", "redis_tokens", "computed_tokens")
    }
    assert cache["hbm_tokens"] > 0


async def test_the_cache_report_adds_up_and_timings_are_there(running: Running):
    answer = (await running.chat()).json()
    cache, prompt_tokens = answer["x_cache"], answer["usage"]["prompt_tokens"]
    assert sum(cache[f"{tier}_tokens"] for tier in ("hbm", "dram", "disk", "redis", "computed")) == prompt_tokens
    assert sum(cache["miss_reasons"].values()) == cache["computed_tokens"]
    assert {"session_id", "history_tokens", "truncated_tokens", "shifted_tokens"} <= cache.keys()
    assert cache["saved_ms"] == 250.0
    timings = answer["timings"]
    assert (timings["queue_ms"], timings["prefill_ms"], timings["decode_ms"]) == (1.0, 2.0, 30.0)
    assert timings["tokens_per_s"] == pytest.approx((answer["usage"]["completion_tokens"] - 1) / 0.030, abs=0.01)


async def test_an_answer_that_a_stop_string_ends_says_how_long_it_decoded(running: Running):
    """The engine, which tells times with the first token and with the last, does not get to the last."""
    running.engine.script.step_s = 0.01
    timings = (await running.chat(stop=["today"])).json()["timings"]
    assert 10 < timings["decode_ms"] < 30_000
    assert timings["tokens_per_s"] > 0
    assert timings["prefill_ms"] == 2.0


async def test_n_choices_pay_for_one_prompt(running: Running):
    answer = (await running.chat(n=3)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    one = (await running.chat()).json()["usage"]
    assert answer["usage"]["completion_tokens"] == 3 * one["completion_tokens"]
    assert answer["usage"]["prompt_tokens"] == one["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"] == one["prompt_tokens_details"]


async def test_a_stop_string_ends_the_engines_work_too(running: Running):
    answer = (await running.chat(stop=["ow are", "never"])).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello there, h", "stop")
    ((request_id, index, keep_tokens),) = running.engine.finished
    assert (request_id, index) == (answer["id"], 0)
    kept = running.engine.tokenizer.encode(ANSWER).ids[:keep_tokens]
    assert "Hello there, h".startswith(running.engine.tokenizer.decode(kept))
    assert keep_tokens < answer["usage"]["completion_tokens"]
    assert answer["timings"]["queue_ms"] == 1.0


async def test_an_answer_that_the_engine_ends_with_the_stop_string_needs_no_second_end(running: Running):
    ids = running.engine.tokenizer.encode(ANSWER).ids
    most = next(n for n in range(1, len(ids)) if "today" in running.engine.tokenizer.decode(ids[:n]))
    answer = (await running.chat(stop=["today"], max_tokens=most)).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == most
    assert running.engine.finished == []


async def test_the_limit_of_tokens_is_kept(running: Running):
    answer = (await running.chat(max_tokens=3)).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3
    room = 256 - answer["usage"]["prompt_tokens"]
    await running.chat(max_tokens=10_000, truncation="disabled")
    assert running.engine.submitted[-1].sampling.max_tokens == room
    await running.chat(max_tokens=10_000)
    assert running.engine.submitted[-1].sampling.max_tokens == 10_000  # the earliest history makes room
    await running.chat(max_tokens=1_000_000)
    assert running.engine.submitted[-1].sampling.max_tokens == 65_536
    await running.chat()
    assert running.engine.submitted[-1].sampling.max_tokens == room


async def test_logprobs_have_openais_shape(running: Running):
    answer = (await running.chat(logprobs=True, top_logprobs=2)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert content[0].keys() == {"token", "logprob", "bytes", "top_logprobs"}
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == ANSWER
    without = (await running.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert without[0]["top_logprobs"] == []


@pytest.mark.parametrize(
    ("fields", "header", "expected"),
    [
        ({"session_id": "body-1", "prompt_cache_key": "key"}, "header-1", "body-1"),
        ({"prompt_cache_key": "key"}, "header-1", "header-1"),
        ({"prompt_cache_key": "key"}, None, "key"),
    ],
)
async def test_the_session_is_what_the_client_calls_it(running: Running, fields, header, expected):
    if header is not None:
        running.http.headers["x-session-id"] = header
    response = await running.chat(**fields)
    assert response.headers["x-session-id"] == response.json()["x_cache"]["session_id"] == expected
    assert running.engine.submitted[0].session_id == expected


async def test_free_text_keys_become_ids_and_bad_headers_are_refused(running: Running):
    session_id = (await running.chat(prompt_cache_key="Grüße, Welt\n")).headers["x-session-id"]
    assert session_id.startswith("key_")
    assert (await running.chat(prompt_cache_key="Grüße, Welt\n")).headers["x-session-id"] == session_id
    running.http.headers["x-session-id"] = "not an id"
    response = await running.chat()
    assert (response.status_code, response.json()["error"]["param"]) == (400, "X-Session-ID")


async def test_a_conversation_keeps_its_session_without_naming_it(running: Running):
    first = await running.chat("Hello")
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first.json()["choices"][0]["message"]["content"]},
        {"role": "user", "content": "And you?"},
    ]
    second = await running.chat(messages=messages)
    other = await running.chat("Something else")
    assert second.headers["x-session-id"] == first.headers["x-session-id"] != other.headers["x-session-id"]
    before, after = (submit.token_ids for submit in running.engine.submitted[:2])
    generated = [*running.engine.tokenizer.encode(ANSWER).ids, 2]
    assert after[: len(before) + len(generated)] == before + generated  # the very ids, not a new tokenization


async def test_another_salt_is_another_conversation(running: Running):
    first = await running.chat("Hello", cache_salt="ann")
    answer = {"role": "assistant", "content": first.json()["choices"][0]["message"]["content"]}
    messages = [{"role": "user", "content": "Hello"}, answer, {"role": "user", "content": "More"}]
    same = await running.chat(messages=messages, cache_salt="ann")
    other = await running.chat(messages=messages, cache_salt="bob")
    assert same.headers["x-session-id"] == first.headers["x-session-id"] != other.headers["x-session-id"]
    assert [submit.cache_salt for submit in running.engine.submitted] == ["ann", "ann", "bob"]


async def test_exact_requests_have_conversations_of_their_own(running: Running):
    first = await running.chat("Hello", kv_quality="exact")
    assert first.json()["x_cache"]["codec"] == "raw"
    answer = {"role": "assistant", "content": first.json()["choices"][0]["message"]["content"]}
    messages = [{"role": "user", "content": "Hello"}, answer, {"role": "user", "content": "More"}]
    same = await running.chat(messages=messages, kv_quality="exact")
    other = await running.chat(messages=messages, kv_quality="default")
    assert same.headers["x-session-id"] == first.headers["x-session-id"] != other.headers["x-session-id"]
    salts = [submit.cache_salt for submit in running.engine.submitted]
    assert [is_exact(salt) for salt in salts] == [True, True, False]
    assert [given_salt(salt) for salt in salts] == [""] * 3
    assert (await running.chat("Hello", kv_quality="some")).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("start_s", "is_made"), [(0.0, True), (0.15, False)])
async def test_a_target_goes_to_the_engine_and_the_report_says_whether_it_was_made(
    running: Running, stream: bool, start_s: float, is_made: bool
):
    running.engine.script.start_s = start_s
    response = await running.chat(ttft_ms=60_000 if is_made else 100, stream=stream)
    answer = json.loads(response.text.split("data: ")[-2]) if stream else response.json()
    cache = answer["x_cache"]
    assert (cache["ttft_target_ms"], cache["ttft_target_made"]) == (60_000 if is_made else 100, is_made)
    (submit,) = running.engine.submitted
    assert 0 <= submit.target_s < cache["ttft_target_ms"] / 1e3, "what is left of it"
    assert (answer["timings"]["ttft_ms"] <= cache["ttft_target_ms"]) == is_made


async def test_a_request_without_a_target_has_none_and_weighs_what_it_did(running: Running):
    cache = (await running.chat()).json()["x_cache"]
    assert (cache["ttft_target_ms"], cache["ttft_target_made"]) == (None, None)
    (submit,) = running.engine.submitted
    assert (submit.target_s, submit.weight) == (None, 1.0)


async def test_ignored_fields_are_named(running: Running):
    fields = {"frobnicate": 1, 'evil"\r\nx: y': 2, "store": True, "tools": None, **{f"extra{n}": n for n in range(20)}}
    response = await running.chat(**fields)
    assert response.status_code == 200
    warning = response.headers["warning"]
    assert warning.startswith('299 - "ignored request fields: frobnicate, evil???x??y, store, extra0')
    assert warning.endswith('and 13 more"')
    assert "warning" not in (await running.chat()).headers


async def test_aliases_and_template_arguments(engine: FakeEngine, tmp_path):
    async with in_process(engine, make_settings(tmp_path, model={"aliases": "gpt-4o-mini, default"})) as running:
        answer = (await running.chat(model="gpt-4o-mini", chat_template_kwargs={"enable_thinking": False})).json()
        assert answer["model"] == "test-model"
        listed = (await running.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["test-model", "gpt-4o-mini", "default"]
        assert (await running.http.get("/v1/models/default")).json()["root"] == "test-model"


async def test_ids_outside_the_vocabulary_and_too_many_choices_are_refused(engine: FakeEngine, tmp_path):
    async with in_process(engine, make_settings(tmp_path, scheduler={"max_seqs": 1, "max_queued": 3})) as running:
        for fields, param in (
            ({"logit_bias": {"300": 1}}, "logit_bias"),
            ({"stop_token_ids": [300]}, "stop_token_ids"),
            ({"n": 5}, "n"),
        ):
            response = await running.chat(**fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert (await running.chat(n=4, logit_bias={"299": 1}, stop_token_ids=[299])).status_code == 200


async def test_request_ids_come_back(running: Running):
    given = await running.http.get("/version", headers={"x-request-id": "abc.1-2_3"})
    assert given.headers["x-request-id"] == "abc.1-2_3"
    made = await running.http.get("/version", headers={"x-request-id": "not ok"})
    assert made.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_request_without_a_model_is_served_by_the_one_that_is_there(running: Running, path):
    said = {"prompt": "Hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hello"}]}
    answer = await running.http.post(path, json={**said, "stream_options": {"include_usage": True}})
    assert (answer.status_code, answer.json()["model"]) == (200, "test-model")
