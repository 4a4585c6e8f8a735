"""Tests what becomes of a request that is no turn when replicas leave, hang or break off: on real sockets."""

import json

import pytest

from reprise.fleet.gateway import passing
from reprise.fleet.gateway.passing import MAX_TRIES
from tests.fleet.gateway.harness import Fleet, fleet
from tests.fleet.gateway.stub_replica import Asked
from tests.fleet.gateway.test_gateway import listing

GOOD = listing(("s1", 1.0))


async def cut(asked: Asked) -> None:
    asked.cut()


async def cut_in_the_middle(asked: Asked) -> None:
    await asked.open_stream()
    await asked.chunk(b'{"object":"list",')
    asked.cut()


async def hang(asked: Asked) -> None:
    await asked.was_left.wait()


async def long(asked: Asked) -> None:
    session = b'{"id":"s9","cache_salt":null,"last_used_at":1.0}'
    await asked.plain(b'{"object":"list","data":[' + session + b" " * 2000 + b'],"has_more":false}')


async def no_json(asked: Asked) -> None:
    await asked.plain(b"\xff<html>")


async def no_json_refuses(asked: Asked) -> None:
    await asked.plain(b"<html>", status=500)


async def nothing_refuses(asked: Asked) -> None:
    await asked.plain(b'{"error":"no"}', status=400)


async def sessions_of(whole: Fleet) -> tuple[int, object]:
    """Return the status of a list of all sessions, and the ids or the code of the error."""
    answer = await whole.client.get("/v1/sessions")
    told = answer.json()
    return answer.status_code, told["error"]["code"] if "error" in told else [one["id"] for one in told["data"]]


@pytest.mark.parametrize("bad", [cut, cut_in_the_middle, hang, long, no_json, no_json_refuses, nothing_refuses])
async def test_a_list_does_without_a_replica_that_fails(monkeypatch, bad):
    monkeypatch.setattr(passing, "ASK_S", 0.3)
    monkeypatch.setattr(passing, "MAX_ANSWER_BYTES", 1000)
    async with fleet(a=bad, b=GOOD) as whole:
        assert await sessions_of(whole) == (200, ["s1"])
        assert len(whole.replicas["a"].asked) >= 1


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (cut, (503, "no_replica")),
        (hang, (503, "no_replica")),
        (no_json, (502, "bad_answer")),
        (no_json_refuses, (502, "bad_answer")),
        (nothing_refuses, (502, "bad_answer")),
    ],
)
async def test_where_all_replicas_fail_the_client_is_told(monkeypatch, bad, told):
    monkeypatch.setattr(passing, "ASK_S", 0.3)
    async with fleet(a=bad, b=bad) as whole:
        assert await sessions_of(whole) == told


async def test_lists_are_read_as_they_are_whatever_the_client_takes():
    async with fleet(a=GOOD) as whole:
        answer = await whole.client.get("/v1/sessions", headers={"accept-encoding": "gzip"})
        assert answer.json()["data"] != []
        assert [b"accept-encoding" in asked.headers for asked in whole.replicas["a"].asked] == [False]
        await whole.client.get("/v1/conversations", headers={"accept-encoding": "gzip"})
        assert whole.replicas["a"].asked[-1].headers[b"accept-encoding"] == b"gzip", "what is passed on may be small"


async def test_a_replica_that_refuses_connections_gets_no_turns_until_it_beats(monkeypatch):
    async with fleet(a=GOOD, b=GOOD) as whole:
        await whole.replicas["a"].stop()
        assert await sessions_of(whole) == (200, ["s1"])
        assert (await whole.client.get("/health")).json()["replicas"] == 1


async def test_where_one_of_a_model_fails_another_one_of_it_is_asked():
    async def models(asked: Asked) -> None:
        await asked.plain(b'{"object":"list","data":[{"id":"m"}]}')

    async with fleet(**dict.fromkeys("abcd", cut), e=models) as whole:
        whole.hear("e", fingerprint="aa")
        await whole.refresh()
        assert [one["id"] for one in (await whole.client.get("/v1/models")).json()["data"]] == ["m"]
        assert sum(len(whole.replicas[name].asked) for name in "abcd") == MAX_TRIES


async def test_a_request_is_tried_so_often():
    async with fleet(**dict.fromkeys("abcd", cut)) as whole:
        answer = await whole.client.get("/v1/conversations")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert sum(len(replica.asked) for replica in whole.replicas.values()) == MAX_TRIES


async def test_a_replica_that_was_not_reached_may_be_followed_by_another_also_where_it_changes_something():
    async with fleet(a=GOOD, b=GOOD) as whole:
        first = await whole.client.post("/v1/conversations", json={})
        assert first.status_code == 200
        (served,) = (name for name, replica in whole.replicas.items() if replica.asked)
        await whole.replicas[served].stop()
        assert (await whole.client.post("/v1/conversations", json={})).status_code == 200
        (other,) = {"a", "b"} - {served}
        assert len(whole.replicas[other].asked) == 1


async def test_an_answer_that_breaks_off_does_so_for_the_client():
    async with fleet(a=cut_in_the_middle) as whole:
        answer, data, is_whole = await whole.stream({}, path="/v1/conversations")
        assert (answer.status_code, data, is_whole) == (200, b'{"object":"list",', False)


PIECE = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n'
COMPLETED = b'event: response.completed\ndata: {"type":"response.completed"}\n\n'


@pytest.mark.parametrize("end", ["it breaks", "it ends early", "it is whole"])
async def test_the_events_of_a_background_response_end_with_an_error_where_they_break(end):
    async def events(asked: Asked) -> None:
        await asked.open_stream()
        await asked.chunk(PIECE, pause_s=0.02)
        if end == "it breaks":
            await asked.chunk(PIECE[:-9], pause_s=0.02)
            asked.cut()
            return
        if end == "it is whole":
            await asked.chunk(COMPLETED)
        await asked.end_stream()

    async with (
        fleet(a=events) as whole,
        whole.client.stream("GET", "/v1/responses/resp_1", params={"stream": "true"}) as answer,
    ):
        data = b"".join([chunk async for chunk in answer.aiter_raw()])
    assert data.startswith(PIECE)
    rest = data[len(PIECE) :]
    if end == "it is whole":
        assert rest == COMPLETED
    else:
        name, told = rest.removesuffix(b"\n\n").split(b"\n")
        assert name == b"event: error"
        assert json.loads(told.removeprefix(b"data: "))["code"] == "replica_lost"
