"""Tests that a stream that is cut anywhere and goes on elsewhere reads, byte for byte, as if nothing had happened."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from reprise.app.settings.settings import Settings
from reprise.engine.messages import Progress
from reprise.fleet.protocol import (
    FRAMED,
    RELAY_HEADER,
    RESUME_HEADER,
    Frame,
    FrameReader,
    Journal,
    Kind,
    relay_token,
    seal,
)
from tests.app.fakes import FakeEngine, Running, Script, in_process, make_settings, until, write_tokenizer
from tests.engine.models import save_tiny
from tests.fleet.engine_here import EngineHere

SECRET = bytes(range(32))
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": TOOL}}]
CALLS = (
    'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Zürich 🎉"}}</tool_call>'
)

CUSTOM_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "+a \\"b\\" \\ud83c\\udf89\\n"}}\n</tool_call>'


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def settings_of(directory: Path, **sections: Any) -> Settings:
    """Settings of a member whose directory is away."""
    directory.mkdir(parents=True, exist_ok=True)
    secret = directory / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    fleet = {"redis_url": f"unix://{directory}/no.sock"}
    return make_settings(directory, server={"tenant_secret_file": secret}, fleet=fleet, **sections)


@contextlib.asynccontextmanager
async def replica(directory: Path, engine: Any, **sections: Any) -> AsyncIterator[Running]:
    """Run a server that shares nothing with the others but the fleet's secret."""
    pytest.importorskip("redis")
    async with in_process(engine, settings_of(directory, **sections)) as running:
        running.app.state.readiness.joining = False  # the directory says no more what was deleted meanwhile
        yield running


@pytest.fixture
async def replicas(model_dir: Path, tmp_path: Path) -> AsyncIterator[tuple[Running, Running]]:
    """Two servers whose engines say what the test tells them to."""
    one, other = FakeEngine(directory=model_dir), FakeEngine(directory=model_dir)
    cut = {"cache": {"truncation": "auto"}}  # a prompt with tools is longer than the window of these tests
    async with replica(tmp_path / "a", one, **cut) as first, replica(tmp_path / "b", other, **cut) as second:
        yield first, second


async def relayed(
    replica: Running, path: str, body: dict[str, Any], journal: Journal | None = None, elapsed_s: float = 0.0
) -> httpx.Response:
    """Send a request as a gateway does. journal: of the answer that is resumed."""
    key, data = replica.app.state.hooks.key, json.dumps(body).encode()
    headers = {
        "content-type": "application/json",
        "x-request-id": "req_1",
        RELAY_HEADER: relay_token(key, path=path, request_id="req_1"),
    }
    if journal is not None:
        envelope = journal.envelope(elapsed_s=elapsed_s)
        headers[RESUME_HEADER], data = seal(key, path=path, request_id="req_1", envelope=envelope, body=data)
    return await replica.http.post(path, content=data, headers=headers)


def frames_of(response: httpx.Response) -> list[Frame]:
    assert response.status_code == 200, response.text
    assert response.headers[RELAY_HEADER] == FRAMED
    return FrameReader().feed(response.content)


def said(frames: list[Frame]) -> str:
    """Return what the client reads, without times and the word that it was resumed, and with numbers for the random ids
    of calls."""
    text = b"".join(frame.events for frame in frames).decode().replace('"resumed":true', '"resumed":false')
    for number, call_id in enumerate(dict.fromkeys(re.findall(r"call_[0-9a-f]{24}", text))):
        text = text.replace(call_id, f"call_{number}")
    return re.sub(r'"timings":\{[^}]*\}', '"timings":{}', text)


GROWING = ("content", "text", "reasoning_content", "reasoning", "arguments", "partial_json", "thinking", "delta")


def assembled(frames: list[Frame]) -> dict[str, Any]:
    """Return what a client makes of the events. Left out are how tokens are grouped into events, which is
    nobody's promise, and whose KV each server had."""
    found: dict[str, Any] = {}

    def add(place: str, value: Any) -> None:
        if isinstance(value, dict):
            at = f"{place}[{value['index']}]" if "index" in value else place
            for name, inner in value.items():
                if name not in ("sequence_number", "x_cache"):
                    add(f"{at}.{name}", inner)
        elif isinstance(value, list) and place.endswith(("logprobs.content", "logprobs")):
            found.setdefault(place, []).extend(value)
        elif isinstance(value, list):
            for inner in value:
                add(place, inner)
        elif isinstance(value, str) and place.endswith(GROWING):
            found[place] = found.get(place, "") + value
        elif value is not None:
            found[place] = value

    for line in said(frames).split("\n"):
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            add(str(event.get("type", "")), event)
        elif line.startswith("data: "):
            found["last"] = line
    return found


async def assert_resumable(replicas: tuple[Running, Running], path: str, body: dict[str, Any]) -> list[Frame]:
    """Cut the answer after every frame, and have the other server go on. Returns the whole answer's frames."""
    first, second = replicas
    body = {"model": "test-model", "stream": True, **body}
    whole = frames_of(await relayed(first, path, body))
    assert whole[0].kind == Kind.OPENING
    assert whole[-1].kind == Kind.CLOSING
    for cut in range(1, len(whole)):
        journal = Journal()
        for frame in whole[:cut]:
            journal.add(frame)
        assert journal.can_resume
        rest = frames_of(await relayed(second, path, body, journal))
        assert assembled(whole[:cut] + rest) == assembled(whole), cut
        for frame in rest:
            journal.add(frame)
        assert journal.is_over
    return whole


REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": (CHAT, "Hello there, how are you today? 🎉", {"messages": USER}),
    "usage": (CHAT, "Hello there, how", {"messages": USER, "stream_options": {"include_usage": True}, "max_tokens": 9}),
    "choices": (CHAT, "Hello there", {"messages": USER, "n": 3}),
    "logprobs": (CHAT, "Hello there, STOP", {"messages": USER, "logprobs": True, "top_logprobs": 2, "stop": ["OP"]}),
    "stop strings": (CHAT, "aaab aaaac STOP here", {"messages": USER, "stop": ["aaaaa", "STOP h"], "min_tokens": 2}),
    "thoughts": (CHAT, "<think>\nHm. So 🎉\n</think>\n\nHello", {"messages": USER}),
    "tools": (CHAT, CALLS, {"messages": USER, "tools": CHAT_TOOLS}),
    "custom tools": (CHAT, CUSTOM_CALL, {"messages": USER, "tools": [{"type": "custom", "custom": {"name": "patch"}}]}),
    "continued": (
        CHAT,
        " there, you",
        {"messages": [*USER, {"role": "assistant", "content": "Hello"}], "continue_final_message": True},
    ),
    "completion": (COMPLETIONS, "Hello there", {"prompt": "Hi", "echo": True, "n": 2}),
    "scored completion": (COMPLETIONS, "Hello there", {"prompt": "Hi", "logprobs": 2}),
    "prompts": (COMPLETIONS, "Hello there", {"prompt": ["Hi", "Ho", "Hu"], "n": 2}),
    "scored": (COMPLETIONS, "Hello", {"prompt": "Hi", "max_tokens": 0, "echo": True}),
    "messages": (
        MESSAGES,
        CALLS,
        {"messages": USER, "max_tokens": 200, "tools": [{"name": "weather", "input_schema": TOOL}]},
    ),
    "messages with thoughts": (
        MESSAGES,
        "<think>\nHm. So\n</think>\n\nHello",
        {"messages": USER, "max_tokens": 200},
    ),
    "responses with thoughts": (
        RESPONSES,
        "<think>\nHm. So\n</think>\n\nHello",
        {"input": "Hi", "include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}},
    ),
    "custom tools of responses": (
        RESPONSES,
        CUSTOM_CALL,
        {"input": "Hi", "max_output_tokens": 200, "tools": [{"type": "custom", "name": "patch"}]},
    ),
    "responses": (
        RESPONSES,
        CALLS,
        {"input": "Hi", "tools": [{"type": "function", "name": "weather", "parameters": TOOL}]},
    ),
    "responses with logprobs": (
        RESPONSES,
        "Hello there",
        {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "store": False},
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("tokens_per_output", [1, 3])
@pytest.mark.parametrize("name", REQUESTS)
async def test_a_stream_that_is_cut_anywhere_goes_on_elsewhere(replicas, name, tokens_per_output):
    path, answer, body = REQUESTS[name]
    for replica in replicas:
        replica.engine.script = Script(answer=answer, tokens_per_output=tokens_per_output)
    whole = await assert_resumable(replicas, path, body)
    assert len(whole) > 2


@pytest.mark.parametrize("name", [name for name, (_, _, body) in REQUESTS.items() if "n" not in body])
async def test_one_choice_goes_on_byte_for_byte(replicas, name):
    """Even the numbers of events are the same, and what is said about the cache: that is what the first server found.
    (Which of several choices has its tokens first is not promised.)"""
    first, second = replicas
    path, answer, body = REQUESTS[name]
    body = {"model": "test-model", "stream": True, **body}
    first.engine.script = Script(answer=answer)
    second.engine.script = Script(answer=answer, report={"hbm_tokens": 1, "history_tokens": 1})
    whole = [frame for frame in frames_of(await relayed(first, path, body)) if frame.kind != Kind.PING]
    for cut in range(2, len(whole)):  # with the second frame the report has come
        journal = Journal()
        for frame in whole[:cut]:
            journal.add(frame)
        rest = [frame for frame in frames_of(await relayed(second, path, body, journal)) if frame.kind != Kind.PING]
        assert said(whole[:cut] + rest) == said(whole), cut
        assert [frame.kind for frame in rest] == [frame.kind for frame in whole[cut:]]


async def test_an_answer_survives_several_servers(replicas):
    """Each of them says one more piece, and the next one begins with all that came before."""
    first, _ = replicas
    body = {"model": "test-model", "stream": True, "messages": USER, "n": 2, "stop": ["today"]}
    whole = frames_of(await relayed(first, CHAT, body))
    journal, told = Journal(), [whole[0]]
    journal.add(whole[0])
    for turn in range(100):
        if journal.is_over:
            break
        frame = frames_of(await relayed(replicas[turn % 2], CHAT, body, journal))[0]
        journal.add(frame)
        told.append(frame)
    assert {frame.kind for frame in told[1:-1]} == {Kind.DELTA}
    client = [json.loads(line[6:]) for line in said(told).split("\n\n") if line.startswith("data: {")]
    for index in range(2):
        mine = [chunk["choices"][0] for chunk in client if chunk["choices"][0]["index"] == index]
        assert "".join(part["delta"].get("content", "") for part in mine) == "Hello there, how are you "
        assert mine[-1]["finish_reason"] == "stop"


async def cut_after(replica: Running, path: str, body: dict[str, Any], count: int) -> Journal:
    """Return what a gateway has of an answer whose server dies after so many frames."""
    journal = Journal()
    for frame in frames_of(await relayed(replica, path, body))[:count]:
        journal.add(frame)
    return journal


BODY = {"model": "test-model", "stream": True, "messages": USER}


async def test_what_is_resumed_is_remembered_as_one_answer(replicas):
    """The next turn goes on from the exact tokens, on the server that ended the answer."""
    first, second = replicas
    journal = await cut_after(first, CHAT, BODY, 4)
    resumed = await relayed(second, CHAT, BODY, journal)
    session = resumed.headers["x-session-id"]
    told = b"".join(frame.events for frame in frames_of(resumed))
    assert b'"resumed":true' in told
    whole = b"".join(frame.events for frame in frames_of(await relayed(first, CHAT, BODY)))
    assert b'"resumed":false' in whole
    text = first.engine.script.answer
    messages = [*USER, {"role": "assistant", "content": text}, {"role": "user", "content": "And now?"}]
    answer = await second.chat("", messages=messages)
    assert answer.headers["x-session-id"] == session
    prompt = second.engine.submitted[-1].token_ids
    ids = [*second.engine.tokenizer.encode(text).ids]
    assert any(prompt[n : n + len(ids)] == ids for n in range(len(prompt)))


async def test_an_answer_that_was_over_is_remembered_too(replicas):
    """The first server died before it could say that the stream ends: nothing is left to say, and only its KV is
    computed."""
    first, second = replicas
    whole = frames_of(await relayed(first, CHAT, BODY))
    journal = await cut_after(first, CHAT, BODY, len(whole) - 1)
    rest = await relayed(second, CHAT, BODY, journal)
    assert frames_of(rest)[0].kind == Kind.CLOSING
    (asked,) = second.engine.submitted
    ids = [*first.engine.tokenizer.encode(first.engine.script.answer).ids, 2]
    assert (asked.resume, asked.over, asked.token_ids) == ([None], ids, first.engine.submitted[0].token_ids)
    assert second.engine.aborted == []
    said_before = {"role": "assistant", "content": first.engine.script.answer}
    answer = await second.chat("", messages=[*USER, said_before, {"role": "user", "content": "And now?"}])
    assert answer.headers["x-session-id"] == rest.headers["x-session-id"]


async def test_the_engine_is_asked_for_the_rest_alone(replicas):
    first, second = replicas
    body = {**BODY, "n": 2, "temperature": 0.7, "max_tokens": 20}
    journal = await cut_after(first, CHAT, body, 6)
    await relayed(second, CHAT, body, journal)
    (begun,), (asked,) = first.engine.submitted, second.engine.submitted
    assert asked.sampling == begun.sampling  # the seed that was drawn is part of it
    assert asked.token_ids == begun.token_ids
    assert asked.session_id == begun.session_id
    ids = [*first.engine.tokenizer.encode(first.engine.script.answer).ids, 2]
    assert [ids[: len(said)] for said in asked.resume] == asked.resume
    assert sum(map(len, asked.resume)) == 5


async def test_times_go_on_from_the_first_server(replicas):
    first, second = replicas
    journal = await cut_after(first, CHAT, BODY, 4)
    rest = frames_of(await relayed(second, CHAT, BODY, journal, elapsed_s=100.0))
    timings = json.loads(rest[-2].events.removeprefix(b"data: "))["timings"]
    assert timings["queue_ms"] == 1.0
    assert 0 <= timings["ttft_ms"] < 10_000
    assert timings["decode_ms"] > 90_000


async def test_the_deadline_goes_on_too(replicas):
    first, second = replicas
    body = {**BODY, "timeout": 30}
    journal = await cut_after(first, CHAT, body, 4)
    late = await relayed(second, CHAT, body, journal, elapsed_s=31.0)
    assert (late.status_code, late.json()["error"]["code"]) == (408, "request_timeout")


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ({"die_after": 3}, Kind.BROKEN),
        ({"refuse": "internal_error", "refuse_after": 3}, Kind.BROKEN),
        ({"refuse": "context_length_exceeded", "refuse_after": 3}, Kind.FAILED),
    ],
)
async def test_an_error_says_whether_another_server_may_do_better(replicas, script, kind):
    first, second = replicas
    first.engine.script = Script(**script)
    frames = frames_of(await relayed(first, CHAT, BODY))
    assert frames[-1].kind == kind
    assert b'"error"' in frames[-1].events
    journal = Journal()
    for frame in frames:
        journal.add(frame)
    assert journal.can_resume == (kind == Kind.BROKEN)
    if kind == Kind.BROKEN:
        rest = frames_of(await relayed(second, CHAT, BODY, journal))
        assert b'"finish_reason":"stop"' in said(rest).encode()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_stops_hands_its_answers_over(replicas, stream):
    """A client without a gateway before it gets what there is; one behind a gateway gets all of it, from elsewhere."""
    first, second = replicas
    first.engine.script = Script(step_s=0.05)
    body = {**BODY, "stream": stream}
    answering = asyncio.create_task(relayed(first, CHAT, body))
    direct = asyncio.create_task(first.chat("Hi"))
    begun = first.app.state.service.generations
    await until(lambda: len(begun) == 2 and all(choice.token_ids for g in begun for choice in g.choices))
    await first.app.state.service.hand_over()
    first.engine.finish_all()
    answer = await answering
    assert (await direct).json()["choices"][0]["finish_reason"] == "length"
    if not stream:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        return
    frames, journal = frames_of(answer), Journal()
    assert frames[-1].kind == Kind.BROKEN
    for frame in frames:
        journal.add(frame)
    rest = frames_of(await relayed(second, CHAT, body, journal))
    assert assembled(frames[:-1] + rest)[".choices[0].delta.content"] == first.engine.script.answer


async def test_a_resumed_answer_is_not_paid_for_twice(model_dir, tmp_path):
    limits = {"key_requests_per_minute": 1}
    engine = FakeEngine(directory=model_dir)
    async with replica(tmp_path, engine, limits=limits) as server:
        journal = await cut_after(server, CHAT, BODY, 4)
        assert (await relayed(server, CHAT, BODY)).status_code == 429
        assert frames_of(await relayed(server, CHAT, BODY, journal))[-1].kind == Kind.CLOSING


# --- what is refused --------------------------------------------------------------------------------------------------


async def test_a_forged_resume_is_refused(replicas):
    first, second = replicas
    journal = await cut_after(first, CHAT, BODY, 4)
    envelope, data = journal.envelope(elapsed_s=0.0), json.dumps(BODY).encode()
    key, wrong = second.app.state.hooks.key, bytes(32)

    async def post(relay_key: bytes, seal_key: bytes, body: bytes = data) -> httpx.Response:
        headers = {"content-type": "application/json", "x-request-id": "req_1"}
        if relay_key:
            headers[RELAY_HEADER] = relay_token(relay_key, path=CHAT, request_id="req_1")
        value, sealed = seal(seal_key, path=CHAT, request_id="req_1", envelope=envelope, body=data)
        headers[RESUME_HEADER] = value
        return await second.http.post(CHAT, content=sealed[: len(envelope)] + body, headers=headers)

    for answer in (
        await post(b"", key),
        await post(wrong, wrong),
        await post(key, wrong),
        await post(key, key, data.replace(b"Hi", b"Ho")),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forged_resume")
    assert second.engine.submitted == []


async def test_a_relay_that_is_none_gets_a_plain_stream(replicas):
    first, _ = replicas
    for value in ("1", relay_token(bytes(32), path=CHAT, request_id="req_1")):
        headers = {RELAY_HEADER: value, "x-request-id": "req_1"}
        answer = await first.http.post(CHAT, json=BODY, headers=headers)
        assert RELAY_HEADER not in answer.headers
        assert answer.text.startswith("data: ")


async def test_another_models_answer_is_not_resumed(replicas):
    first, second = replicas
    journal = await cut_after(first, CHAT, BODY, 4)
    second.app.state.readiness.model = msgspec.structs.replace(second.app.state.readiness.model, fingerprint="f" * 32)
    answer = await relayed(second, CHAT, BODY, journal)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "cannot_resume")


async def test_what_fits_no_request_is_not_resumed(replicas):
    first, second = replicas
    journal = await cut_after(first, CHAT, {**BODY, "n": 3}, 12)
    for body in ({**BODY, "n": 1}, {**BODY, "stream": False}):
        answer = await relayed(second, CHAT, body, journal)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "cannot_resume")
    odd = Journal()
    odd.add(Frame(Kind.OPENING, b"", b'{"of":"another version"}'))
    answer = await relayed(second, CHAT, BODY, odd)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "cannot_resume")


async def test_plain_answers_are_relayed_as_they_are(replicas):
    first, _ = replicas
    answer = await relayed(first, CHAT, {**BODY, "stream": False})
    assert RELAY_HEADER not in answer.headers
    assert answer.json()["choices"][0]["message"]["content"] == first.engine.script.answer


# --- a real engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in fp32 that says anything, with a tokenizer of as many tokens."""
    return write_tokenizer(
        save_tiny(tmp_path_factory.mktemp("models") / "tiny", vocab_size=300, max_position_embeddings=1024)
    )


SEEDED = {"messages": USER, "seed": 5, "max_tokens": 24, "temperature": 1.0}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": USER, "temperature": 0, "max_tokens": 24}),
        (CHAT, {**SEEDED, "n": 2, "stream_options": {"include_usage": True}}),
        (CHAT, {**SEEDED, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}),
        (CHAT, {**SEEDED, "min_tokens": 20, "logit_bias": {"2": 8}, "stop": ["e", "qu"]}),
        (CHAT, {**SEEDED, "max_tokens": 60, "response_format": {"type": "json_schema", "json_schema": {
            "name": "person", "schema": PERSON}}}),
        (CHAT, {**SEEDED, "max_tokens": 60, "tools": CHAT_TOOLS, "tool_choice": "required"}),
        (COMPLETIONS, {"prompt": ["Hello", "The fox"], "seed": 3, "max_tokens": 12}),
    ],
    ids=["greedy", "choices", "penalties", "stops", "schema", "tools", "prompts"],
)  # fmt: skip
async def test_a_real_engine_goes_on_with_the_same_text(tiny, tmp_path, path, body):
    name = EngineHere(tiny).model.name
    one, other = EngineHere(tiny, max_context=800), EngineHere(tiny, max_context=800)
    async with replica(tmp_path / "a", one) as first, replica(tmp_path / "b", other) as second:
        await assert_resumable((first, second), path, {**body, "model": name})


async def test_logprobs_of_a_real_engine_go_on(tiny, tmp_path):
    """Logprobs that were told are kept to the bit; later ones are equal but for rounding."""
    one, other = EngineHere(tiny), EngineHere(tiny)
    body = {**SEEDED, "model": one.model.name, "stream": True, "logprobs": True, "top_logprobs": 3, "stop": ["qu"]}
    async with replica(tmp_path / "a", one) as first, replica(tmp_path / "b", other) as second:
        whole = frames_of(await relayed(first, CHAT, body))
        journal = Journal()
        for frame in whole[:8]:
            journal.add(frame)
        rest = frames_of(await relayed(second, CHAT, body, journal))

    def entries(frames: list[Frame]) -> list[dict[str, Any]]:
        lines = [line for frame in frames for line in frame.events.decode().split("\n") if line.startswith("data: {")]
        choices = [json.loads(line[6:])["choices"][0] for line in lines]
        return [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]

    expected, found = entries(whole), entries(whole[:8] + rest)
    assert [entry["token"] for entry in found] == [entry["token"] for entry in expected]
    assert [entry["logprob"] for entry in found] == pytest.approx([e["logprob"] for e in expected], abs=1e-4)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(("n", "over"), [(1, 1), (2, 1), (2, 2)])
async def test_the_next_turn_finds_the_kv_of_an_answer_that_was_over(tiny, tmp_path, n, over, temperature):
    """The server that generated it is gone, and has left no KV. over: so many of its choices were."""
    one, other = EngineHere(tiny), EngineHere(tiny)
    model = {"model": one.model.name}
    body = {**SEEDED, **model, "stream": True, "n": n, "temperature": temperature, "ignore_eos": True}
    async with replica(tmp_path / "a", one) as first, replica(tmp_path / "b", other) as second:
        whole = frames_of(await relayed(first, CHAT, body))
        ends = [count for count, frame in enumerate(whole, 1) if b'"finish_reason":"length"' in frame.events]
        journal = Journal()
        for frame in whole[: ends[over - 1]]:
            journal.add(frame)
        rest = await relayed(second, CHAT, body, journal)
        assert frames_of(rest)[-1].kind == Kind.CLOSING
        await until(lambda: not other.engine.has_work())
        said = {"role": "assistant", "content": assembled(whole)[".choices[0].delta.content"]}
        messages = [*USER, said, {"role": "user", "content": "And now?"}]
        answer = (await second.chat(messages=messages, max_tokens=1, **model)).json()
        known = len(one.submitted[0].token_ids) + body["max_tokens"] - 1
        prompt = len(other.submitted[-1].token_ids)
        assert answer["x_cache"]["history_tokens"] == known
        assert answer["x_cache"]["miss_reasons"] == {"new": prompt - known}


async def test_progress_is_passed_on_and_nothing_goes_on_from_it(replicas: tuple[Running, Running]):
    told = [Progress(prompt_tokens=9, read_tokens=n, cached_tokens=0, ahead=0, left_ms=None) for n in (0, 5)]
    for replica in replicas:
        replica.engine.script = Script(answer="Hello there", progress=told)
    body = {"messages": USER, "stream_options": {"include_progress": True}}
    whole = await assert_resumable(replicas, CHAT, body)
    passed = [frame for frame in whole if b"x_progress" in frame.events]
    assert [(frame.kind, frame.note) for frame in passed] == [(Kind.PING, b"")] * 2
    assert b"x_progress" not in b"".join(frame.events for frame in whole if frame.kind is not Kind.PING)
