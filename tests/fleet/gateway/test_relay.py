"""Tests that a client has its answer whatever becomes of the replica: on real sockets, with replicas that break every
rule."""

import asyncio
import json

import httpx
import pytest

from reprise.app.errors import OVERLOADED_HEADER
from reprise.app.http import event_stream
from reprise.fleet.gateway import relay
from reprise.fleet.gateway.metrics import Resumed
from reprise.fleet.keys import SessionName
from reprise.fleet.protocol import RELAY_HEADER, RESUME_HEADER, Kind, fleet_key, is_relay, unseal
from reprise.fleet.routing import STALE_S
from tests.fleet.gateway.harness import CHAT, FRAMES, WHOLE, Fleet, event, fleet, frame, one_answer, record, until
from tests.fleet.gateway.stub_replica import Asked

KEY = fleet_key(bytes(range(32)))
LAST = b'data: {"x_cache":{"route":{"replica":"%s","why":"%s","epoch":3},"a":1}}\n\ndata: [DONE]\n\n'


def at_home(whole: Fleet, home: str = "a") -> dict[str, str]:
    """Let a session's home be this replica; returns the headers that name the session."""
    whole.directory.records[SessionName("local", "s")] = record(home)
    return {"x-session-id": "s"}


def moves(whole: Fleet) -> dict[str, int]:
    return {why: count for why, count in whole.gateway.parts.metrics.counts()["moves"].items() if count}


def resumes(whole: Fleet, outcome: Resumed) -> float:
    return whole.gateway.parts.metrics._resumes.labels(outcome)._value.get()


async def test_a_stream_comes_without_its_frames():
    async with fleet(a=one_answer) as whole:
        answer, data, is_whole = await whole.stream(**at_home(whole))
        assert (answer.status_code, is_whole) == (200, True)
        assert data == WHOLE + LAST % (b"a", b"home")
        assert answer.headers["x-session-id"] == "s"
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert not [name for name in answer.headers if name.startswith("x-reprise-")]
        asked = whole.replicas["a"].asked[0]
        assert json.loads(asked.body) == CHAT
        request_id = asked.headers[b"x-request-id"].decode()
        assert answer.headers["x-request-id"] == request_id
        token = asked.headers[RELAY_HEADER.encode()].decode()
        assert is_relay(KEY, token, path="/v1/chat/completions", request_id=request_id)


async def test_headers_of_clients_that_only_gateways_may_send_are_dropped():
    async with fleet(a=one_answer) as whole:
        given = {"X-Reprise-Resume": "1:x", "X-Reprise-Relay": "x", "x-other": "kept", "TE": "trailers", "x-hop": "1"}
        await whole.stream(**given, connection="keep-alive, X-Hop")
        headers = whole.replicas["a"].asked[0].headers
        assert RESUME_HEADER.encode() not in headers
        assert headers[RELAY_HEADER.encode()] != b"x"
        assert headers[b"x-other"] == b"kept"
        assert b"te" not in headers
        assert b"x-hop" not in headers, "the client says that it is of its connection"


async def test_a_plain_answer_comes_whole():
    async with fleet(a=one_answer) as whole:
        answer = await whole.client.post("/v1/chat/completions", json={**CHAT, "stream": False}, headers=at_home(whole))
        assert answer.json()["x_cache"] == {
            "route": {"replica": "a", "why": "home", "epoch": 3},
            "session_id": "s",
        }
        assert int(answer.headers["content-length"]) == len(answer.content)


async def refuse(asked: Asked) -> None:
    await asked.plain(b'{"error":{"code":"draining"}}', status=503, headers=b"retry-after: 7\r\n")


async def garbage(asked: Asked) -> None:
    await asked.send(b"garbage\r\n\r\n")
    asked.writer.close()


async def cut_at_once(asked: Asked) -> None:
    asked.cut()


async def half_a_head(asked: Asked) -> None:
    await asked.send(b"HTTP/1.1 200 OK\r\ncontent-", pause_s=0.02)
    asked.cut()


async def head_alone(asked: Asked) -> None:
    await asked.open_stream(FRAMES)
    asked.cut()


async def half_a_first_frame(asked: Asked) -> None:
    await asked.open_stream(FRAMES)
    await asked.chunk(frame(Kind.OPENING, event("never seen"))[:-5], pause_s=0.02)
    asked.cut()


async def no_frames_at_all(asked: Asked) -> None:
    await asked.open_stream(FRAMES)
    await asked.chunk(b"data: x\n\n")
    await asked.end_stream()


async def half_a_plain_answer(asked: Asked) -> None:
    await asked.send(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 90\r\n\r\nhalf", pause_s=0.02
    )
    asked.cut()


BROKEN_BEFORE = [
    refuse,
    garbage,
    cut_at_once,
    half_a_head,
    head_alone,
    half_a_first_frame,
    no_frames_at_all,
    half_a_plain_answer,
]


@pytest.mark.parametrize("broken", BROKEN_BEFORE)
async def test_a_failure_before_the_first_byte_is_followed_by_another_replica(broken):
    async with fleet(a=broken, b=one_answer) as whole:
        _, data, is_whole = await whole.stream(**at_home(whole))
        assert is_whole
        assert data.startswith(WHOLE)
        assert len(whole.replicas["a"].asked) == 1
        assert whole.replicas["b"].asked[0].body == whole.replicas["a"].asked[0].body
        ids = [whole.replicas[name].asked[0].headers[b"x-request-id"] for name in "ab"]
        assert ids[0] == ids[1]
        assert resumes(whole, Resumed.DONE) == 0, "the client had nothing yet"
        why = "refused" if broken is refuse else "dead"
        assert moves(whole) == {why: 1}
        assert b'"why":"%s"' % why.encode() in data
        assert whole.gateway.parts.metrics.counts()["routes"]["home"] == 1, "there it went first"


async def test_a_replica_that_is_gone_is_not_asked_again():
    async with fleet(a=one_answer, b=one_answer) as whole:
        await whole.replicas["a"].stop()
        whole.hear("a", age_s=2.0)  # its last beat
        for _ in range(3):
            _, data, _ = await whole.stream(**at_home(whole))
            assert data.startswith(WHOLE)
        assert whole.gateway.parts.metrics._failures.labels("before")._value.get() == 1
        assert moves(whole) == {"dead": 3}, "one after it went home first, two at once"


async def test_the_refusal_of_all_reaches_the_client(monkeypatch):
    monkeypatch.setattr(relay, "START_WAIT_S", 0.1)
    async with fleet(a=refuse, b=refuse) as whole:
        answer, data, _ = await whole.stream()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
        assert json.loads(data)["error"]["code"] == "draining"
        assert len(whole.replicas["a"].asked) == len(whole.replicas["b"].asked)


async def test_an_overload_of_all_reaches_the_client_at_once():
    async def overloaded(asked: Asked) -> None:
        headers = b"retry-after: 7\r\n" + OVERLOADED_HEADER.encode() + b": 1\r\n"
        await asked.plain(b'{"error":{"code":"overloaded"}}', status=503, headers=headers)

    async with fleet(a=overloaded, b=overloaded) as whole:
        answer, data, _ = await whole.stream()
        assert (answer.status_code, json.loads(data)["error"]["code"]) == (503, "overloaded")
        assert len(whole.replicas["a"].asked) == len(whole.replicas["b"].asked) == 1


async def test_a_turn_that_all_refuse_waits_for_the_replica_that_follows_one_that_drains():
    async with fleet(a=refuse, b=one_answer) as whole:
        whole.miss("b")
        await whole.refresh()
        streaming = asyncio.create_task(whole.stream())
        await until(lambda: whole.replicas["a"].asked)
        whole.hear("b")
        await whole.refresh()
        answer, data, _ = await streaming
        assert (answer.status_code, data[: len(WHOLE)]) == (200, WHOLE)


async def test_other_errors_are_answers():
    async def wrong(asked: Asked) -> None:
        await asked.plain(b'{"error":{"code":"bad"}}', status=400)

    async with fleet(a=wrong, b=one_answer) as whole:
        answer, data, _ = await whole.stream(**at_home(whole))
        assert (answer.status_code, json.loads(data)["error"]["code"]) == (400, "bad")
        assert whole.replicas["b"].asked == []


async def test_a_turn_waits_a_moment_for_replicas_whose_beats_are_late():
    async with fleet(a=one_answer) as whole:
        whole.miss("a")
        await whole.refresh()
        streaming = asyncio.create_task(whole.stream())
        await asyncio.sleep(0.3)
        assert whole.replicas["a"].asked == []
        whole.hear("a")
        await whole.refresh()
        answer, data, _ = await streaming
        assert (answer.status_code, data[: len(WHOLE)]) == (200, WHOLE)


async def test_nobody_is_there(monkeypatch):
    monkeypatch.setattr(relay, "START_WAIT_S", 0.1)
    async with fleet() as whole:
        answer, data, _ = await whole.stream()
        assert (answer.status_code, json.loads(data)["error"]["code"]) == (503, "no_replica")
        assert "retry-after" in answer.headers


# --- after the first byte ---------------------------------------------------------------------------------------------


def breaks_after(*parts: bytes):
    """Return a replica that sends these frames, a part of the next one, and dies."""

    async def answer(asked: Asked) -> None:
        await asked.open_stream(FRAMES)
        for part in parts:
            await asked.chunk(part, pause_s=0.02)
        await asked.send(b"40\r\n: r d 30 [9]\nda", pause_s=0.02)
        asked.cut()

    return answer


async def goes_on(asked: Asked) -> None:
    """Go on with the answer of `one_answer`, from where the envelope says."""
    if RESUME_HEADER.encode() not in asked.headers:
        await one_answer(asked)
        return
    request_id, value = (asked.headers[name].decode() for name in (b"x-request-id", RESUME_HEADER.encode()))
    told, body = unseal(KEY, path="/v1/chat/completions", request_id=request_id, value=value, body=asked.body)
    assert json.loads(body) == CHAT
    assert told.opening == b'{"id":1}'
    await asked.open_stream(FRAMES)
    for ids, text in ((b"[1]", "one "), (b"[2]", "two")):
        if ids not in told.deltas:
            await asked.chunk(frame(Kind.DELTA, event(text), ids))
    await asked.chunk(frame(Kind.CLOSING, b'data: {"x_cache":{"a":1}}\n\ndata: [DONE]\n\n'))
    await asked.end_stream()


OPENING = frame(Kind.OPENING, event(""), b'{"id":1}')
ONE = frame(Kind.DELTA, event("one "), b"[1]")
TWO = frame(Kind.DELTA, event("two"), b"[2]")
BROKEN = frame(Kind.BROKEN, b'data: {"error":1}\n\n')


@pytest.mark.parametrize(
    "parts",
    [
        (frame(Kind.PING, b": ping\n\n"),),
        (OPENING,),
        (OPENING, ONE),
        (OPENING, frame(Kind.PING, b": ping\n\n"), ONE, TWO),
        (OPENING + ONE + TWO,),
        (OPENING + ONE[:12], ONE[12:]),
        (OPENING, ONE, BROKEN),
        (OPENING, ONE, b"data: no frame\n\n"),
    ],
)
async def test_a_stream_whose_replica_dies_goes_on_from_another(parts):
    async with fleet(a=breaks_after(*parts), b=goes_on) as whole:
        answer, data, is_whole = await whole.stream(**at_home(whole))
        assert (answer.status_code, is_whole) == (200, True)
        assert data.replace(b": ping\n\n", b"") == WHOLE + LAST % (b"b", b"dead")
        assert resumes(whole, Resumed.DONE) == 1
        assert moves(whole) == {"dead": 1}


async def test_an_answer_goes_on_over_many_deaths():
    async def one_at_a_time(asked: Asked) -> None:
        """Say the next of ten words and die."""
        await asked.open_stream(FRAMES)
        said = 0
        if value := asked.headers.get(RESUME_HEADER.encode()):
            request_id = asked.headers[b"x-request-id"].decode()
            told, _ = unseal(
                KEY, path="/v1/chat/completions", request_id=request_id, value=value.decode(), body=asked.body
            )
            said = len(told.deltas)
        else:
            await asked.chunk(OPENING)
        if said < 10:
            await asked.chunk(frame(Kind.DELTA, event(f"{said} "), b"[%d]" % said), pause_s=0.01)
            asked.cut()
        else:
            await asked.chunk(frame(Kind.CLOSING, b"data: [DONE]\n\n"))
            await asked.end_stream()

    async with fleet(a=one_at_a_time, b=one_at_a_time) as whole:
        _, data, is_whole = await whole.stream()
        assert is_whole
        assert data == event("") + b"".join(event(f"{n} ") for n in range(10)) + b"data: [DONE]\n\n"
        assert resumes(whole, Resumed.DONE) == 10


async def test_a_turn_that_kills_every_replica_ends():
    async with fleet(**{name: breaks_after(OPENING) for name in "abcde"}) as whole:
        _, data, is_whole = await whole.stream()
        assert is_whole
        assert b'"code":"replica_lost"' in data
        assert b"[DONE]" not in data
        assert sum(len(replica.asked) for replica in whole.replicas.values()) == relay.MAX_TRIES
        assert resumes(whole, Resumed.LOST) == 1


async def test_the_events_of_a_broken_engine_reach_the_client_if_nobody_can_go_on(monkeypatch):
    monkeypatch.setattr(relay, "RESUME_WAIT_S", 0.1)

    async def cannot(asked: Asked) -> None:
        if RESUME_HEADER.encode() in asked.headers:
            await asked.plain(b'{"error":{"code":"cannot_resume"}}', status=409)
        else:
            await breaks_after(OPENING, ONE, BROKEN)(asked)

    async with fleet(a=cannot, b=cannot) as whole:
        _, data, is_whole = await whole.stream(**at_home(whole))
        assert is_whole
        assert data == event("") + event("one ") + b'data: {"error":1}\n\n'


async def test_an_answer_waits_for_the_only_replica_to_return():
    async with fleet(a=breaks_after(OPENING, ONE)) as whole:
        streaming = asyncio.create_task(whole.stream(**at_home(whole)))
        replica = whole.replicas["a"]
        await until(lambda: replica.asked)
        replica.answer = goes_on
        port = int(replica.url.rpartition(":")[2])
        del whole.directory.beats["a"]
        await replica.stop()
        await asyncio.sleep(0.6)
        assert not streaming.done()
        await replica.start(port)
        whole.hear("a")
        await whole.refresh()
        _, data, is_whole = await streaming
        assert is_whole
        assert data.startswith(WHOLE)


async def test_a_stopped_replica_is_left_when_its_beats_stop():
    async def hangs(asked: Asked) -> None:
        await asked.open_stream(FRAMES)
        await asked.chunk(OPENING + ONE)
        await asyncio.sleep(60)

    async with fleet(a=hangs, b=goes_on) as whole:
        streaming = asyncio.create_task(whole.stream(**at_home(whole)))
        await until(lambda: whole.replicas["a"].asked)
        whole.hear("a", age_s=STALE_S + 0.5)
        _, data, is_whole = await streaming
        assert is_whole
        assert data == WHOLE + LAST % (b"b", b"dead")


async def test_a_replica_whose_beats_are_late_goes_on_with_its_answer():
    async def takes_its_time(asked: Asked) -> None:
        await asked.open_stream(FRAMES)
        await asked.chunk(OPENING + ONE)
        for _ in range(8):
            await asked.chunk(frame(Kind.DELTA, event("and "), b"[3]"), pause_s=STALE_S / 6)
        await asked.chunk(frame(Kind.CLOSING, b"data: [DONE]\n\n"))
        await asked.end_stream()

    async with fleet(a=takes_its_time, b=goes_on) as whole:
        streaming = asyncio.create_task(whole.stream(**at_home(whole)))
        await until(lambda: whole.replicas["a"].asked)
        whole.hear("a", age_s=STALE_S + 0.5)
        _, data, is_whole = await streaming
        assert is_whole
        assert data.count(b"and ") == 8
        assert whole.replicas["b"].asked == []


async def test_a_silent_stream_is_left(monkeypatch):
    async def hangs(asked: Asked) -> None:
        await asked.open_stream(FRAMES)
        await asked.chunk(OPENING + ONE)
        await asyncio.sleep(60)

    monkeypatch.setattr(event_stream, "PING_S", 0.2)
    async with fleet(a=hangs, b=goes_on) as whole:
        _, data, is_whole = await whole.stream(**at_home(whole))
        assert is_whole
        assert data.startswith(WHOLE)


MESSAGE = b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n'
PIECE = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n'
# path, an event of its streams, the end of a whole stream
APIS = [
    ("/v1/chat/completions", event("one "), b"data: [DONE]\n\n"),
    ("/v1/responses", PIECE, b'event: response.completed\ndata: {"type":"response.completed"}\n\n'),
    ("/v1/messages", MESSAGE, b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
]


async def cut_off(asked: Asked) -> None:
    asked.cut()


async def ended_early(asked: Asked) -> None:
    await asked.end_stream()


def check_error_event(path: str, data: bytes) -> None:
    """Check that these bytes are one error event, in the form of the API at `path`."""
    *named, told = data.removesuffix(b"\n\n").split(b"\n")
    said = json.loads(told.removeprefix(b"data: "))
    if path == "/v1/chat/completions":
        assert (named, said["error"]["code"]) == ([], "replica_lost")
    elif path == "/v1/responses":
        assert (named, said["type"], said["code"]) == ([b"event: error"], "error", "replica_lost")
    else:
        assert (named, said["type"], said["error"]["type"]) == ([b"event: error"], "error", "overloaded_error")


@pytest.mark.parametrize("end", [cut_off, ended_early])
@pytest.mark.parametrize(("path", "piece", "last"), APIS)
async def test_a_stream_that_is_none_of_ours_ends_with_an_error_where_its_replica_breaks(path, piece, last, end):
    async def plain_stream(asked: Asked) -> None:
        await asked.open_stream()
        await asked.chunk(piece, pause_s=0.02)
        await asked.chunk(piece[:-9], pause_s=0.02)  # the client gets no part of an event
        await end(asked)

    async with fleet(a=plain_stream, b=one_answer) as whole:
        _, data, is_whole = await whole.stream(path=path, **at_home(whole))
        assert is_whole
        assert data.startswith(piece)
        check_error_event(path, data[len(piece) :])
        assert last not in data
        assert whole.replicas["b"].asked == []


@pytest.mark.parametrize(("path", "piece", "last"), APIS)
async def test_a_whole_stream_that_is_none_of_ours_comes_as_it_is(path, piece, last):
    async def plain_stream(asked: Asked) -> None:
        await asked.open_stream()
        for at in range(0, len(piece + last), 7):
            await asked.chunk((piece + last)[at : at + 7])
        await asked.end_stream()

    async with fleet(a=plain_stream) as whole:
        _, data, is_whole = await whole.stream(path=path, **at_home(whole))
        assert (data, is_whole) == (piece + last, True)


@pytest.mark.parametrize("end", [cut_off, ended_early])
async def test_a_stream_without_an_event_is_tried_elsewhere(end):
    async def no_event(asked: Asked) -> None:
        await asked.open_stream()
        await asked.chunk(b"data: {")
        await end(asked)

    async with fleet(a=no_event, b=one_answer) as whole:
        _, data, is_whole = await whole.stream(**at_home(whole))
        assert is_whole
        assert data.startswith(WHOLE)


async def test_a_stream_that_breaks_in_an_event_too_long_to_hold_breaks():
    async def long_event(asked: Asked) -> None:
        await asked.open_stream()
        for _ in range(3):
            await asked.chunk(b"x" * (1 << 19), pause_s=0.01)
        asked.cut()

    async with fleet(a=long_event, b=one_answer) as whole:
        _, _, is_whole = await whole.stream(**at_home(whole))
        assert not is_whole


async def test_the_end_of_a_whole_answer_may_be_lost():
    async def no_last_chunk(asked: Asked) -> None:
        await asked.open_stream(FRAMES)
        await asked.chunk(OPENING + ONE + TWO + frame(Kind.CLOSING, b"data: [DONE]\n\n"))
        asked.cut()

    async with fleet(a=no_last_chunk, b=one_answer) as whole:
        _, data, is_whole = await whole.stream(**at_home(whole))
        assert is_whole
        assert data == WHOLE + b"data: [DONE]\n\n"
        assert whole.replicas["b"].asked == []


async def test_a_client_that_leaves_ends_its_turn():
    async def endless(asked: Asked) -> None:
        await asked.open_stream(FRAMES)
        await asked.chunk(OPENING)
        while not asked.was_left.is_set():
            await asked.chunk(ONE, pause_s=0.02)

    async with fleet(a=endless) as whole:
        async with whole.client.stream("POST", "/v1/chat/completions", json=CHAT) as answer:
            assert await anext(answer.aiter_raw())
        await asyncio.wait_for(whole.replicas["a"].asked[0].was_left.wait(), 30)
        await until(lambda: not whole.gateway.under_way)
        assert whole.gateway.parts.held.held == 0


async def test_without_memory_for_its_journal_an_answer_is_not_resumed():
    async def long_notes(asked: Asked) -> None:
        await asked.open_stream(FRAMES)
        await asked.chunk(OPENING)
        for _ in range(3):
            await asked.chunk(frame(Kind.DELTA, event("x"), b"[" + b"1" * 500_000 + b"]"), pause_s=0.01)
        asked.cut()

    async with fleet({"fleet": {"held_mib": 1}}, a=long_notes, b=goes_on) as whole:
        _, data, is_whole = await whole.stream(**at_home(whole))
        assert is_whole
        assert data.count(event("x")) == 3
        assert b"replica_lost" in data
        assert whole.replicas["b"].asked == []


async def test_a_body_without_memory_for_it_is_refused():
    async with fleet({"fleet": {"held_mib": 1}}, a=one_answer) as whole:
        answer = await whole.client.post("/v1/chat/completions", json={**CHAT, "user": "x" * (2 << 20)})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        assert whole.gateway.parts.held.held == 0


@pytest.mark.parametrize("size", [1 << 19, 9 << 20])
async def test_a_long_plain_answer_comes_too(size):
    async def long_answer(asked: Asked) -> None:
        await asked.plain(b'"' + b"x" * size + b'"')

    async with fleet(a=long_answer) as whole:
        answer = await whole.client.post("/v1/chat/completions", json={**CHAT, "stream": False})
        assert len(answer.json()) == size


async def test_a_slow_client_holds_up_nobody_else():
    async def many(asked: Asked) -> None:
        await asked.open_stream(FRAMES)
        await asked.chunk(OPENING)
        for _ in range(200):
            await asked.chunk(frame(Kind.DELTA, event("x" * 50_000), b"[1]"))
        await asked.chunk(frame(Kind.CLOSING, b"data: [DONE]\n\n"))
        await asked.end_stream()

    async with fleet(a=many, b=one_answer) as whole:
        slow_client = httpx.AsyncClient(base_url=str(whole.client.base_url), timeout=60)
        async with (
            slow_client,
            slow_client.stream("POST", "/v1/chat/completions", json=CHAT, headers=at_home(whole)) as slow,
        ):
            chunks = slow.aiter_raw()
            await anext(chunks)
            whole.directory.records[SessionName("local", "other")] = record("b")
            _, data, _ = await whole.stream(**{"x-session-id": "other"})
            assert data.startswith(WHOLE)
            rest = b"".join([chunk async for chunk in chunks])
            assert rest.endswith(b"data: [DONE]\n\n")
