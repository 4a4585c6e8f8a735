"""Tests listing conversations with their titles, and reading their messages."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.api.operation import operations_of
from reprise.app.api.reprise import sessions
from reprise.app.api.reprise.chats import with_titles
from reprise.app.api.reprise.sessions import describe_session
from reprise.app.conversations.message_table import Chat
from reprise.app.conversations.transcripts import KeptChat
from reprise.app.schemas.answers.sessions import PatchedSession, Session, SessionTitle
from reprise.app.turn.domains import domains_of
from tests.app.api.reprise.test_sessions import KEYS, code, headers, keep
from tests.app.fakes import FakeEngine, Running, in_process, make_settings, session_info

TITLED = {"titles": "true"}


async def listed(running: Running, **query: Any) -> list[dict[str, Any]]:
    return (await running.http.get("/v1/sessions", params={**TITLED, **query})).json()["data"]


async def messages(running: Running, name: str, **query: Any) -> list[dict[str, Any]]:
    response = await running.http.get(f"/v1/sessions/{name}/messages", params=query)
    assert response.status_code == 200, response.text
    return response.json()["data"]


async def test_a_conversation_can_be_shown_again(running: Running) -> None:
    question = {"role": "user", "content": "Hello"}
    answer = (await running.chat(session_id="a")).json()["choices"][0]["message"]
    more = [{"role": "system", "content": "Be kind."}, question, answer, {"role": "user", "content": "And now?"}]
    await running.http.post("/v1/chat/completions", json={"model": "test-model", "messages": more, "session_id": "a"})
    found = await messages(running, "a")
    assert [(one["id"], one["role"], one["content"]) for one in found] == [
        ("0", "system", "Be kind."),
        ("1", "user", "Hello"),
        ("2", "assistant", answer["content"]),
        ("3", "user", "And now?"),
        ("4", "assistant", answer["content"]),
    ]
    assert {one["object"] for one in found} == {"session.message"}


async def test_messages_are_read_page_by_page(running: Running) -> None:
    await running.chat(session_id="a")
    first = (await running.http.get("/v1/sessions/a/messages", params={"limit": 1})).json()
    assert (first["first_id"], first["last_id"], first["has_more"]) == ("0", "0", True)
    rest = (await running.http.get("/v1/sessions/a/messages", params={"after": first["last_id"]})).json()
    assert ([one["role"] for one in rest["data"]], rest["has_more"]) == (["assistant"], False)
    end = (await running.http.get("/v1/sessions/a/messages", params={"after": 7})).json()
    assert (end["data"], end["last_id"], end["has_more"]) == ([], None, False)


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "after=x", "after=-2", f"cache_salt={'s' * 257}"])
async def test_a_bad_page_of_messages_is_named(running: Running, query: str) -> None:
    response = await running.http.get(f"/v1/sessions/a/messages?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_only_the_first_answer_and_no_side_call_is_kept(running: Running) -> None:
    await running.chat("Question", session_id="a", n=3)
    await running.chat("A title, please", session_id="a", service_tier="flex")
    assert [one["role"] for one in await messages(running, "a")] == ["user", "assistant"]
    assert (await messages(running, "a"))[0]["content"] == "Question"


async def test_thoughts_and_calls_are_messages_like_any_other(running: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    history = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": "", "reasoning_content": "Where?", "tool_calls": [call]},
        {"role": "tool", "content": "blue", "tool_call_id": "c1"},
    ]
    body = {"model": "test-model", "messages": history, "session_id": "a"}
    assert (await running.http.post("/v1/chat/completions", json=body)).status_code == 200
    found = await messages(running, "a")
    assert [{name: one[name] for name in one if name not in ("id", "object")} for one in found[:3]] == history


async def test_a_session_without_messages_says_so(running: Running) -> None:
    keep(running.engine, "a")
    await running.http.post("/v1/completions", json={"prompt": "Hello", "session_id": "text", "max_tokens": 1})
    for name in ("a", "text", "unknown"):
        assert code(await running.http.get(f"/v1/sessions/{name}/messages")) == (404, "no_transcript")
        assert code(await running.http.patch(f"/v1/sessions/{name}", json={"title": "T"})) == (404, "no_transcript")
    assert code(await running.http.get("/v1/sessions/no%20name/messages")) == (404, "session_not_found")
    (row,) = await listed(running)
    assert (row["id"], row["title"], row["first_text"], row["num_messages"]) == ("a", None, None, None)
    assert "title" not in (await running.http.get("/v1/sessions")).json()["data"][0]


async def test_a_list_has_titles_and_what_would_be_read_anew(running: Running) -> None:
    await running.chat("First\nquestion", session_id="b")
    await running.chat("Another", session_id="a")
    keep(running.engine, "b")
    patched = await running.http.patch("/v1/sessions/b", json={"title": " On\nquestions "})
    assert (patched.status_code, patched.json()) == (200, {"id": "b", "object": "session", "title": "On questions"})
    without_kv, with_kv = await listed(running)
    assert (without_kv["id"], without_kv["first_text"], without_kv["blocks"]) == ("a", "Another", {})
    assert without_kv["expires_at"] > without_kv["last_used_at"]
    assert with_kv.keys() == without_kv.keys()
    assert (with_kv["title"], with_kv["first_text"], with_kv["num_messages"]) == ("On questions", "First question", 2)
    assert with_kv["blocks"] == {"hbm": 2, "disk": 4}
    pinned = (await running.http.patch("/v1/sessions/b", json={"title": "", "pinned": True})).json()
    assert (pinned["title"], pinned["pinned"], pinned["tokens"]) == (None, True, 100)
    assert (await listed(running))[1]["title"] is None


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("get", "", None), ("get", "?titles=true", None), ("get", "/{session_id}", None),
        ("get", "/{session_id}/messages", None), ("post", "/{session_id}/prefetch", {}),
        ("patch", "/{session_id}", {"title": "T"}), ("patch", "/{session_id}", {"title": "", "pinned": None}),
        ("patch", "/{session_id}", {"pinned": True}), ("patch", "/{session_id}", {"title": "T", "ttl_s": 60}),
    ],
)  # fmt: skip
async def test_answers_are_as_the_description_says(
    running: Running, method: str, path: str, body: dict[str, Any] | None
) -> None:
    await running.chat(session_id="a")
    keep(running.engine, "a")
    (operation,) = (
        one
        for one in operations_of(sessions.router)
        if (one.method, one.path) == (method, f"/v1/sessions{path.partition('?')[0]}")
    )
    described = operation.described.answer
    assert described is not None
    response = await running.http.request(method, f"/v1/sessions{path.format(session_id='a')}", json=body)
    assert response.is_success
    found = described.model_validate(response.json())
    if isinstance(found, PatchedSession):
        is_title = body is not None and body.get("pinned") is None and "ttl_s" not in body
        assert type(found.root) is (SessionTitle if is_title else Session)


@pytest.mark.parametrize("title", [7, "t" * 201, ["t"]])
async def test_a_bad_title_is_refused(running: Running, title: Any) -> None:
    await running.chat(session_id="a")
    response = await running.http.patch("/v1/sessions/a", json={"title": title})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "title")


async def test_messages_and_titles_go_with_their_session(running: Running) -> None:
    await running.chat("A secret", session_id="a")
    await running.http.patch("/v1/sessions/a", json={"title": "Secret"})
    assert (await running.http.delete("/v1/sessions/a")).status_code == 204
    assert code(await running.http.get("/v1/sessions/a/messages")) == (404, "no_transcript")
    assert await listed(running) == []
    await running.chat("Another", session_id="a")
    assert (await listed(running))[0]["title"] is None


@pytest.mark.parametrize("quality", ["default", "exact"])
async def test_another_salt_does_not_see_them(running: Running, quality: str) -> None:
    await running.chat("Under a salt", session_id="a", cache_salt="pepper", kv_quality=quality)
    assert code(await running.http.get("/v1/sessions/a/messages")) == (404, "no_transcript")
    assert await listed(running) == []
    assert (await messages(running, "a", cache_salt="pepper"))[0]["content"] == "Under a salt"
    (row,) = await listed(running, cache_salt="pepper")
    assert (row["cache_salt"], row["kv_quality"], row["first_text"]) == ("pepper", quality, "Under a salt")


async def test_another_tenant_does_not_see_or_change_them(engine: FakeEngine, tmp_path: Path) -> None:
    async with in_process(engine, make_settings(tmp_path, server={"api_keys": KEYS})) as running:
        mine, other = headers(KEYS[0]), headers(KEYS[1])
        body = {"model": "test-model", "messages": [{"role": "user", "content": "Mine"}], "session_id": "a"}
        await running.http.post("/v1/chat/completions", json=body, headers=mine)
        for method, path, fields in (
            ("GET", "/v1/sessions/a/messages", None), ("PATCH", "/v1/sessions/a", {"title": "Theirs"}),
        ):  # fmt: skip
            response = await running.http.request(method, path, json=fields, headers=other)
            assert code(response) == (404, "no_transcript")
        assert (await running.http.get("/v1/sessions", params=TITLED, headers=other)).json()["data"] == []
        (row,) = (await running.http.get("/v1/sessions", params=TITLED, headers=mine)).json()["data"]
        assert (row["first_text"], row["title"]) == ("Mine", None)


async def test_they_outlive_the_server(engine: FakeEngine, tmp_path: Path) -> None:
    async with in_process(engine, make_settings(tmp_path)) as running:
        await running.chat("Before", session_id="a")
    async with in_process(FakeEngine(engine.directory), make_settings(tmp_path)) as running:
        assert (await messages(running, "a"))[0]["content"] == "Before"


NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True).map(sorted)


@given(cached=NAMES, kept=NAMES, exact=NAMES, limit=st.integers(1, 4))
def test_pages_of_both_lists_give_every_session_once(
    cached: list[str], kept: list[str], exact: list[str], limit: int
) -> None:
    """Some have KV, some have messages, some have both."""
    chats = sorted(
        [("t", name) for name in kept] + [(domains_of("t", "")[1], name) for name in exact],
        key=lambda one: (one[1], one[0]),
    )
    seen: list[tuple[str, Any]] = []
    after, more = "", True
    while more:
        left = [name for name in cached if name > after]
        page, more = with_titles(
            [describe_session(session_info(name)) for name in left[:limit]],
            [
                KeptChat(Chat(tenant, name, 1.0, 0.0, 1, "", None), 2.0)
                for tenant, name in chats
                if name > after
            ][: limit + 1],
            more=len(left) > limit,
            limit=limit,
        )  # fmt: skip
        assert page or not more
        assert len({row["id"] for row in page}) <= limit
        seen += [(row["id"], row["cache_salt"]) for row in page]
        after = page[-1]["id"] if page else after
    assert [name for name, _ in seen] == sorted([*{*cached, *kept}, *exact])
