from typing import Any

import httpx
import pytest

from reprise.engine.process.client import EngineLost, EngineTimeout, EngineUnavailable
from tests.app.fakes import FakeEngine, Running, in_process, make_settings, session_info

KEYS = ("sk-first-0001", "sk-second-002")


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def keep(engine: FakeEngine, *names: str, tenant: str = "local", **changes: Any) -> None:
    for name in names:
        engine.kept[tenant, name] = session_info(name, **changes)


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def test_a_session_shows_what_the_cache_holds(running: Running):
    keep(running.engine, "a")
    session = (await running.http.get("/v1/sessions/a")).json()
    assert session.pop("expires_in_s") == 0.0  # its time was long ago
    assert session == {
        "id": "a",
        "object": "session",
        "cache_salt": None,
        "kv_quality": "default",
        "tokens": 100,
        "truncated_tokens": 32,
        "blocks": {"hbm": 2, "disk": 4},
        "bytes": {"hbm": 2048, "disk": 4096},
        "last_used_at": 1000.0,
        "expires_at": 2000.0,
        "pinned": False,
        "running": False,
    }


async def test_a_list_is_read_page_by_page(running: Running):
    keep(running.engine, *(f"s{n}" for n in range(5)))
    seen: list[str] = []
    page = {"has_more": True, "last_id": ""}
    while page["has_more"]:
        page = (await running.http.get("/v1/sessions", params={"limit": 2, "after": page["last_id"]})).json()
        assert page["object"] == "list"
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        seen += [session["id"] for session in page["data"]]
    assert seen == ["s0", "s1", "s2", "s3", "s4"]
    empty = (await running.http.get("/v1/sessions", params={"after": "s4", "order": "asc"})).json()
    assert (empty["data"], empty["has_more"], empty["last_id"]) == ([], False, None)


async def test_sessions_that_leave_between_two_pages_stop_nobody(running: Running):
    keep(running.engine, "a", "b", "c")
    page = (await running.http.get("/v1/sessions", params={"limit": 2})).json()
    assert (await running.http.delete(f"/v1/sessions/{page['last_id']}")).status_code == 204
    rest = (await running.http.get("/v1/sessions", params={"after": page["last_id"]})).json()
    assert [session["id"] for session in rest["data"]] == ["c"]


async def test_all_methods_of_a_path_are_named(running: Running):
    response = await running.http.put("/v1/sessions/a")
    assert code(response) == (405, "method_not_allowed")
    assert response.headers["allow"] == "DELETE, GET, HEAD, OPTIONS, PATCH"


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", f"after={'a' * 129}", "order=sideways"])
async def test_a_bad_page_is_named(running: Running, query: str):
    response = await running.http.get(f"/v1/sessions?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_pin_and_ttl(running: Running):
    keep(running.engine, "a")
    pinned = await running.http.patch("/v1/sessions/a", json={"pinned": True})
    assert (pinned.status_code, pinned.json()["pinned"], pinned.json()["expires_at"]) == (200, True, None)
    both = (await running.http.patch("/v1/sessions/a", json={"pinned": False, "ttl_s": 60, "colour": "red"})).json()
    assert (both["pinned"], both["expires_at"]) == (False, 1060.0)
    question = running.engine.questions[-1]
    assert (question.action, question.pinned, question.ttl_s) == ("patch", False, 60.0)


@pytest.mark.parametrize(
    "body", [{}, {"pinned": None}, {"pinned": "yes"}, {"ttl_s": 0}, {"ttl_s": "1"}, {"ttl_s": 2e9}]
)
async def test_a_patch_that_says_nothing_or_nonsense(running: Running, body: dict):
    keep(running.engine, "a")
    response = await running.http.patch("/v1/sessions/a", json=body)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    assert running.engine.questions == []


async def test_prefetch_is_accepted(running: Running):
    keep(running.engine, "a")
    response = await running.http.post("/v1/sessions/a/prefetch")
    assert (response.status_code, response.json()["id"]) == (202, "a")
    assert running.engine.questions[-1].action == "prefetch"


async def ask_again(running: Running, messages: list[dict], **fields: Any) -> httpx.Response:
    body = {"model": "test-model", "messages": messages, **fields}
    return await running.http.post("/v1/chat/completions", json=body)


async def spliced(running: Running, messages: list[dict]) -> bool:
    """Whether the conversation is known: then the ids of the answer are the generated ones."""
    await ask_again(running, messages)
    ids = running.engine.submitted[-1].token_ids
    text = running.engine.tokenizer.decode(ids, skip_special_tokens=False)
    return ids != running.engine.tokenizer.encode(text).ids


@pytest.mark.parametrize("salt", [None, "pepper"])
async def test_delete_takes_the_transcript_along(running: Running, salt: str | None):
    # Generated letter by letter, as encoding never would: a later prompt shows whether it is remembered.
    running.engine.script.token_ids = [running.engine.tokenizer.encode(letter).ids[0] for letter in "Hello"] + [2]
    question = {"role": "user", "content": "Hi"}
    fields = {} if salt is None else {"cache_salt": salt}
    answer = (await ask_again(running, [question], session_id="a", **fields)).json()
    history = [question, answer["choices"][0]["message"], question]
    keep(running.engine, "a", cache_salt=salt or "")
    if salt is None:
        assert await spliced(running, history)
        keep(running.engine, "a")
    response = await running.http.delete("/v1/sessions/a")
    assert (response.status_code, response.content) == (204, b"")
    assert running.engine.kept == {}
    await ask_again(running, history, **fields)
    ids = running.engine.submitted[-1].token_ids
    assert ids == running.engine.tokenizer.encode(running.engine.tokenizer.decode(ids, skip_special_tokens=False)).ids
    await running.http.delete("/v1/sessions/a")


async def test_a_session_without_kv_is_deleted_all_the_same(running: Running):
    await running.chat(session_id="a")
    assert (await running.http.delete("/v1/sessions/a")).status_code == 204
    assert code(await running.http.delete("/v1/sessions/a")) == (404, "session_not_found")


async def test_another_tenants_session_is_not_there(engine: FakeEngine, tmp_path):
    settings = make_settings(tmp_path, server={"api_keys": KEYS})
    async with in_process(engine, settings) as running:
        mine, other = headers(KEYS[0]), headers(KEYS[1])
        await running.http.get("/v1/sessions", headers=mine)
        keep(engine, "a", tenant=engine.questions[-1].tenant)
        assert (await running.http.get("/v1/sessions", headers=other)).json()["data"] == []
        for method, path in [("GET", ""), ("DELETE", ""), ("POST", "/prefetch")]:
            response = await running.http.request(method, f"/v1/sessions/a{path}", headers=other)
            assert code(response) == (404, "session_not_found")
        response = await running.http.patch("/v1/sessions/a", headers=other, json={"pinned": True})
        assert code(response) == (404, "session_not_found")
        assert (await running.http.get("/v1/sessions/a", headers=mine)).status_code == 200
        assert (await running.http.get("/v1/sessions")).status_code == 401


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        ("busy", 409, "session_busy"),
        ("pin_quota", 409, "pin_quota_exceeded"),
        ("not_found", 404, "session_not_found"),
        ("undeleted", 503, "not_deleted"),
        ("unavailable", 503, "unavailable"),
        (EngineTimeout("slow"), 504, "timeout"),
        (EngineLost("died"), 503, "engine_lost"),
        (EngineUnavailable("restarting", retry_after_s=3.0), 503, "unavailable"),
    ],
)
@pytest.mark.parametrize("method", ["DELETE", "GET", "PATCH"])
async def test_what_the_engine_refuses_is_a_status(running: Running, error, status: int, expected: str, method: str):
    running.engine.session_error = error
    json = {"pinned": True} if method == "PATCH" else None
    response = await running.http.request(method, "/v1/sessions/a", json=json)
    assert code(response) == (status, expected)
    assert ("retry-after" in response.headers) == (status == 503)


async def test_a_delete_that_failed_leaves_the_transcript(running: Running):
    await running.chat(session_id="a")
    running.engine.session_error = "busy"
    assert code(await running.http.delete("/v1/sessions/a")) == (409, "session_busy")
    running.engine.session_error = "not_found"
    assert (await running.http.delete("/v1/sessions/a")).status_code == 204  # it was still there to delete


@pytest.mark.parametrize("name", ["a%20b", "%00", "x" * 200, "a%2Fb"])
async def test_what_is_no_session_id_is_no_session(running: Running, name: str):
    assert (await running.http.get(f"/v1/sessions/{name}")).status_code == 404
    assert running.engine.questions == []


async def test_no_sessions_while_nothing_is_loaded(engine: FakeEngine, tmp_path):
    engine.load_s = 60.0
    async with in_process(engine, make_settings(tmp_path), wait=False) as running:
        assert code(await running.http.get("/v1/sessions")) == (503, "loading")
