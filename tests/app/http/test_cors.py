"""Tests that scripts of other origins are refused unless the settings name the origin."""

from typing import Any

import httpx
import pytest

from reprise.app.settings.sources import SettingsError, load_settings
from tests.app.fakes import FakeEngine, Running, in_process, make_settings

PAGE, OTHER = "https://chat.example.org", "https://evil.example.org"
CHAT: dict[str, Any] = {"model": "test-model", "messages": [{"role": "user", "content": "Hello"}]}
KEY = "sk-of-somebody"


async def preflight(running: Running, origin: str) -> httpx.Response:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    return await running.http.options("/v1/chat/completions", headers={"origin": origin, **asks})


async def test_by_default_no_other_page_may_ask(running: Running):
    assert (await preflight(running, PAGE)).status_code == 405
    answer = await running.http.post("/v1/chat/completions", json=CHAT, headers={"origin": PAGE})
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_a_page_that_is_named_may_and_others_may_not(engine: FakeEngine, tmp_path):
    settings = make_settings(tmp_path, server={"cors_origins": (PAGE,), "api_keys": (KEY,)})
    async with in_process(engine, settings) as running:
        allowed = await preflight(running, PAGE)  # without a key
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        refused = await preflight(running, OTHER)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
        headers = {"origin": PAGE, "authorization": f"Bearer {KEY}"}
        answer = await running.http.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-cache", "x-session-id", "x-request-id"} <= set(exposed) & answer.headers.keys()
        assert "access-control-allow-credentials" not in answer.headers
        unknown = await running.http.post("/v1/chat/completions", json=CHAT, headers={"origin": PAGE})
        assert unknown.status_code == 401  # the page may read this status
        assert unknown.headers["access-control-allow-origin"] == PAGE
        other = await running.http.post("/v1/chat/completions", json=CHAT, headers={**headers, "origin": OTHER})
        assert "access-control-allow-origin" not in other.headers


async def test_a_public_page_that_is_named_may_ask_a_private_address(engine: FakeEngine, tmp_path):
    """Chrome asks before a public page's request to a private address."""
    asks = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
    path, allowed = "/v1/chat/completions", "access-control-allow-private-network"
    settings = make_settings(tmp_path, server={"cors_origins": (PAGE,), "api_keys": (KEY,)})
    async with in_process(engine, settings) as running:
        named = await running.http.options(path, headers={"origin": PAGE, **asks})
        assert (named.status_code, named.headers[allowed]) == (200, "true")
        other = await running.http.options(path, headers={"origin": OTHER, **asks})
        assert (other.status_code, "access-control-allow-origin" in other.headers) == (400, False)
        plain = await preflight(running, PAGE)
        assert allowed not in plain.headers


async def test_without_named_pages_no_page_may_ask_a_private_address(running: Running):
    asks = {"access-control-request-method": "POST", "access-control-request-private-network": "true"}
    answer = await running.http.options("/v1/chat/completions", headers={"origin": PAGE, **asks})
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origins", ["*", f"{PAGE},*", "chat.example.org", f"{PAGE}/", "https://a b"])
def test_what_would_let_everybody_in_or_nobody_is_refused(origins: str):
    with pytest.raises(SettingsError, match=r"server\.cors_origins"):
        load_settings(flags={"server.cors_origins": origins}, environ={}, config=None)
    assert load_settings(
        flags={"server.cors_origins": f"*,{PAGE}", "server.api_keys": KEY}, environ={}, config=None
    ).server.cors_origins == ("*", PAGE)
