"""Tests keys and their limits through the whole app."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial

import httpx
import pytest

from reprise.app.tenancy.key_file import follow_keys, remove_key
from reprise.app.tenancy.keyring import digest_of
from tests.app.fakes import FakeEngine, Running, in_process, make_settings, until

SLOW, FREE, ADMIN = "sk-of-the-slow-one", "sk-of-the-free-one", "sk-of-the-admin"
FILE = f"""
[slow]
sha256 = "{digest_of(SLOW).hex()}"
requests = 2
requests_per_minute = 3
tokens_per_minute = 200
[free]
sha256 = "{digest_of(FREE).hex()}"
ttft_ms = 30000
[root]
sha256 = "{digest_of(ADMIN).hex()}"
admin = true
"""


@pytest.fixture
async def keyed(engine: FakeEngine, tmp_path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    monkeypatch.setattr("reprise.app.tenancy.configured_keys.follow_keys", partial(follow_keys, look_s=0.02))
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    path.chmod(0o600)
    async with in_process(engine, make_settings(tmp_path, server={"keys_file": str(path)})) as running:
        yield running


async def chat(running: Running, key: str, **fields: object) -> httpx.Response:
    running.http.headers["authorization"] = f"Bearer {key}"
    return await running.chat(**fields)


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def test_a_keys_requests_a_minute_are_its_own(keyed: Running):
    for left in ("2", "1", "0"):
        answer = await chat(keyed, SLOW, max_tokens=1)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == left
    refused = await chat(keyed, SLOW, max_tokens=1)
    assert refusal(refused) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 20  # three a minute
    assert len(keyed.engine.submitted) == 3
    assert (await keyed.http.get("/v1/sessions")).status_code == 200  # what has no body is not counted
    assert [(await chat(keyed, FREE)).status_code for _ in range(5)] == [200] * 5


async def test_a_keys_tokens_are_counted_both_ways(keyed: Running):
    first = await chat(keyed, SLOW, content="fox " * 40, max_tokens=4)
    used = first.json()["usage"]["total_tokens"]
    left = int((await chat(keyed, SLOW, max_tokens=1)).headers["x-ratelimit-remaining-tokens"])
    assert 200 - used - 40 < left <= 200 - used + 5  # a second's worth has come back, the second prompt is spent
    assert (await chat(keyed, FREE, content="fox " * 40)).headers.get("x-ratelimit-limit-tokens") is None


async def test_who_has_overdrawn_waits(keyed: Running):
    assert (await chat(keyed, SLOW, content="fox " * 100, truncation="auto")).status_code == 200
    refused = await chat(keyed, SLOW)
    assert refusal(refused) == (429, "rate_limit_exceeded")
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert "tokens a minute" in refused.json()["error"]["message"]


async def test_a_keys_places_are_its_own(keyed: Running):
    assert refusal(await chat(keyed, SLOW, n=3)) == (400, None)
    assert (await chat(keyed, FREE, n=3)).status_code == 200


async def test_a_keys_target_is_that_of_its_requests_that_name_none(keyed: Running):
    targets = []
    for key, fields in ((FREE, {}), (FREE, {"ttft_ms": 60_000}), (FREE, {"service_tier": "flex"}), (SLOW, {})):
        targets.append((await chat(keyed, key, max_tokens=1, **fields)).json()["x_cache"]["ttft_target_ms"])
    assert targets == [30_000, 60_000, None, None]
    assert [submit.target_s is None for submit in keyed.engine.submitted] == [False, False, True, True]


async def test_only_an_admins_key_opens_the_scheduler(keyed: Running):
    statuses = {}
    for key in (SLOW, FREE, ADMIN, "sk-of-nobody"):
        answer = await keyed.http.get("/v1/scheduler", headers={"authorization": f"Bearer {key}"})
        statuses[key] = answer.status_code
    assert statuses == {SLOW: 403, FREE: 403, ADMIN: 503, "sk-of-nobody": 401}  # 503: the engine has not reported yet


async def test_a_key_that_is_taken_away_opens_nothing_any_more(keyed: Running, tmp_path):
    path = tmp_path / "keys.toml"
    assert (await chat(keyed, SLOW, max_tokens=1)).headers["x-ratelimit-limit-requests"] == "3"
    write_anew(path, FILE.replace("requests_per_minute = 3", "requests_per_minute = 5"))
    await until_answered(keyed, SLOW, lambda answer: answer.headers["x-ratelimit-limit-requests"] == "5")
    keyed.http.headers["authorization"] = f"Bearer {ADMIN}"
    assert (await keyed.http.get("/v1/scheduler")).status_code != 403
    remove_key(path, "free")
    await until_answered(keyed, FREE, lambda answer: answer.status_code == 401)
    assert (await chat(keyed, SLOW, max_tokens=1)).status_code == 200
    write_anew(path, "")  # nobody is left: that must not mean that everybody may
    await until_answered(keyed, ADMIN, lambda answer: answer.status_code == 401)
    del keyed.http.headers["authorization"]
    assert (await keyed.chat()).status_code == 401


async def test_who_watches_with_a_key_that_is_taken_away_is_told_no_more(keyed: Running, tmp_path):
    live = keyed.app.state.live
    keyed.http.headers["authorization"] = f"Bearer {ADMIN}"
    watching = asyncio.create_task(keyed.http.get("/v1/events"))
    await until(lambda: live.watchers == 1)
    write_anew(tmp_path / "keys.toml", FILE.replace("admin = true", ""))  # a key still, but of its own requests alone
    ended = await asyncio.wait_for(watching, 10)
    assert '"scope":"all"' in ended.text
    await until(lambda: live.watchers == 0)


def write_anew(path, text: str) -> None:
    """Replace the file as editors do."""
    other = path.with_name("new")
    other.write_text(text)
    other.chmod(0o600)
    other.replace(path)


async def until_answered(running: Running, key: str, wanted) -> None:
    end = time.monotonic() + 10
    while not wanted(await chat(running, key, max_tokens=1)):
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
