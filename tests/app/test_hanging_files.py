"""Tests a server on a disk that hangs in service, under its transcripts, stored responses and secret: no request waits
beyond the disk's deadline, what was asked for by name is told, and all is there again when the disk answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from reprise.app import state_dir, state_disk
from tests.app.fakes import FakeEngine, Running, in_process, make_settings, until
from tests.app.hanging_files import HangingFiles

DEADLINE_S = 0.4
SLACK_S = 2.0  # for a busy machine


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingFiles]:
    monkeypatch.setattr(state_disk, "DEADLINE_S", DEADLINE_S)
    monkeypatch.setattr(state_disk, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(state_dir, "LOOK_S", 3600.0)
    files = HangingFiles(monkeypatch)
    yield files
    files.mend()


@pytest.fixture
async def here(engine: FakeEngine, tmp_path: Path, files: HangingFiles) -> AsyncIterator[Running]:
    async with in_process(engine, make_settings(tmp_path)) as running:
        yield running


def ask(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": "test-model", "input": text, **fields}


async def answers_in_time(running: Running, path: str, body: dict[str, Any], most_s: float) -> dict[str, Any]:
    started = time.monotonic()
    answer = await running.http.post(path, json=body)
    assert time.monotonic() - started < most_s
    assert answer.status_code == 200, answer.text
    return answer.json()


async def recorded(running: Running) -> None:
    """Wait until what was said is in the file."""
    assert (await running.http.get("/v1/sessions/a/messages")).status_code == 200


async def mended(running: Running, files: HangingFiles) -> None:
    files.mend()
    await until(lambda: not running.app.state.state_disk.is_away)


async def test_turns_go_on_without_their_transcripts(here: Running, files: HangingFiles) -> None:
    first = (await here.chat("Hello", session_id="a")).json()["choices"][0]["message"]
    await recorded(here)
    files.hang()
    messages = [{"role": "user", "content": "Hello"}, first, {"role": "user", "content": "And now?"}]
    chat = {"model": "test-model", "messages": messages}
    first_answer = await answers_in_time(here, "/v1/chat/completions", chat, DEADLINE_S + SLACK_S)
    assert first_answer["choices"][0]["message"]["content"] == first["content"]
    for _ in range(3):  # these do not ask the disk at all
        await answers_in_time(here, "/v1/chat/completions", chat, DEADLINE_S)
    assert (await here.http.get("/health")).json()["disk"] == "away"
    metrics = (await here.http.get("/metrics")).text
    assert "reprise_state_disk_used 0.0" in metrics
    assert "reprise_state_disk_failures_total 0.0" not in metrics
    await mended(here, files)
    assert "reprise_state_disk_used 1.0" in (await here.http.get("/metrics")).text
    again = (await here.chat("", messages=messages)).json()
    assert again["x_cache"]["session_id"] == "a", "what was recorded before is found again"


async def test_what_is_asked_for_by_name_is_told_and_there_when_the_disk_answers(
    here: Running, files: HangingFiles
) -> None:
    await here.chat("Hello", session_id="a")
    stored = (await here.http.post("/v1/responses", json=ask())).json()
    conversation = (await here.http.post("/v1/conversations", json={})).json()
    await recorded(here)
    files.hang()
    started = time.monotonic()
    asked = [
        ("GET", "/v1/sessions?titles=true", None),
        ("GET", "/v1/sessions/a/messages", None),
        ("PATCH", "/v1/sessions/a", {"title": "T"}),
        ("GET", f"/v1/responses/{stored['id']}", None),
        ("GET", f"/v1/responses/{stored['id']}/input_items", None),
        ("DELETE", f"/v1/responses/{stored['id']}", None),
        ("POST", "/v1/responses", ask(previous_response_id=stored["id"])),
        ("POST", "/v1/responses", ask(conversation=conversation["id"])),
        ("POST", "/v1/conversations", {}),
        ("GET", f"/v1/conversations/{conversation['id']}", None),
        ("GET", f"/v1/conversations/{conversation['id']}/items", None),
        ("DELETE", f"/v1/conversations/{conversation['id']}", None),
        ("DELETE", "/v1/sessions/a", None),
    ]
    for method, path, body in asked:
        answer = await here.http.request(method, path, json=body)
        code = "not_deleted" if (method, path) == ("DELETE", "/v1/sessions/a") else "unavailable"
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, code), (method, path, answer.text)
        assert answer.headers["retry-after"]
    assert time.monotonic() - started < DEADLINE_S + SLACK_S, "one of them waited"
    await mended(here, files)
    assert (await here.http.get(f"/v1/responses/{stored['id']}")).json()["id"] == stored["id"]
    assert (await here.http.get("/v1/sessions/a/messages")).status_code == 200
    on = (await here.http.post("/v1/responses", json=ask(previous_response_id=stored["id"]))).json()
    assert (await here.http.get(f"/v1/responses/{on['id']}/input_items")).json()["data"][-1]["content"]
    assert (await here.http.delete("/v1/sessions/a")).status_code == 204


async def test_a_response_that_cannot_be_stored_is_answered_and_there(here: Running, files: HangingFiles) -> None:
    files.hang()
    answer = await answers_in_time(here, "/v1/responses", ask(), DEADLINE_S + SLACK_S)
    assert answer["status"] == "completed"
    assert (await here.http.get(f"/v1/responses/{answer['id']}")).status_code == 200  # it is kept in memory
    await mended(here, files)
    kept = (await here.http.post("/v1/responses", json=ask())).json()
    assert (await here.http.get(f"/v1/responses/{kept['id']}")).status_code == 200


async def test_what_was_refused_is_not_added_late(here: Running, files: HangingFiles) -> None:
    """Clients send again what was answered 503."""
    conversation = (await here.http.post("/v1/conversations", json={})).json()
    path = f"/v1/conversations/{conversation['id']}/items"
    body = {"items": [{"type": "message", "role": "user", "content": "Once"}]}
    files.hang()
    assert (await here.http.post(path, json=body)).status_code == 503
    await mended(here, files)
    assert (await here.http.post(path, json=body)).status_code == 200
    assert len((await here.http.get(path)).json()["data"]) == 1
    files.hang()
    assert (await here.http.post("/v1/conversations", json={})).status_code == 503
    await mended(here, files)
    store = here.app.state.responses.store
    assert await store._run(lambda: store._db.execute("SELECT count(*) FROM conversations").fetchone()) == (1,)


async def test_a_shutdown_does_not_wait_for_the_disk(engine: FakeEngine, tmp_path: Path, files: HangingFiles) -> None:
    async with in_process(engine, make_settings(tmp_path)) as running:
        await running.chat("Hello", session_id="a")
        files.hang()
        await running.chat("Hello", session_id="a")
        started = time.monotonic()
    assert time.monotonic() - started < 2 * DEADLINE_S + SLACK_S
    # Threads that asyncio waits for at the end of the program.
    await asyncio.wait_for(asyncio.get_running_loop().shutdown_default_executor(), 5)


async def test_a_server_that_starts_while_the_disk_hangs_opens_its_files_when_that_answers(
    engine: FakeEngine, tmp_path: Path, files: HangingFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of a start may have passed a moment before."""
    async with in_process(engine, make_settings(tmp_path)) as running:
        stored = (await running.http.post("/v1/responses", json=ask())).json()
    monkeypatch.setattr("reprise.app.main.open_state_dir", _open_then(files))
    async with in_process(FakeEngine(directory=engine.directory), make_settings(tmp_path)) as running:
        await answers_in_time(running, "/v1/responses", ask(), DEADLINE_S + SLACK_S)
        await mended(running, files)
        assert (await running.http.get(f"/v1/responses/{stored['id']}")).json()["id"] == stored["id"]


def _open_then(files: HangingFiles) -> Any:
    def open_and_hang(*args: Any) -> state_dir.StateDir:
        opened = state_dir.open_state_dir(*args)
        files.hang()
        return opened

    return open_and_hang
