from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.app.http.host_names import is_ours
from tests.app.fakes import FakeEngine, in_process, make_settings


@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("localhost:8000", True), ("LOCALHOST", True), ("127.0.0.1:8000", True), ("[::1]:8000", True), ("server", True),
        ("192.168.1.7", True), ("", True), ("app.localhost:80", True), ("llm.example.org:8000", True), ("llm", True),
        ("evil.example:8000", False), ("127.0.0.1.evil.example", False), ("localhost.evil.example", False),
        ("evil.example.", False), ("llm.example.org.evil", False), ("::1", True), ("1.2.3", False),
        ("host.docker.internal:8471", True), ("box.lan", True), ("box.local:80", True), ("nas.home.arpa", True),
        ("x.test", True), ("internal.example", False), ("box.lan.example", False), ("evil.international", False),
    ],
)  # fmt: skip
def test_a_name_of_the_internet_is_not_ours(host: str, ours: bool) -> None:
    assert is_ours(host, {"llm.example.org"}) is ours


@given(st.text())
def test_whatever_is_sent_is_judged(host: str) -> None:
    assert is_ours(host, set()) in (True, False)


async def test_without_keys_another_name_gets_nothing(engine: FakeEngine, tmp_path: Path) -> None:
    evil = {"host": "evil.example:8000"}
    async with in_process(engine, make_settings(tmp_path)) as running:
        refused = await running.http.get("/v1/models", headers=evil)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "unknown_host")
        assert (await running.http.get("/health", headers=evil)).status_code == 200
        assert (await running.http.get("/v1/models", headers={"host": "127.0.0.1:8000"})).status_code == 200
    named = make_settings(tmp_path / "named", server={"hostnames": ("evil.example",)})
    async with in_process(FakeEngine(directory=engine.directory), named) as running:
        assert (await running.http.get("/v1/models", headers=evil)).status_code == 200


async def test_with_keys_the_key_decides(engine: FakeEngine, tmp_path: Path) -> None:
    async with in_process(engine, make_settings(tmp_path, server={"api_keys": ("sk-somebody",)})) as running:
        headers = {"host": "llm.example.org", "authorization": "Bearer sk-somebody"}
        assert (await running.http.get("/v1/models", headers=headers)).status_code == 200
        assert (await running.http.get("/v1/models", headers={"host": "llm.example.org"})).status_code == 401
