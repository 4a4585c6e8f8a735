"""Tests when requests are accepted, from the start of the engine to the drain."""

import asyncio

import pytest

from reprise.engine.process.client import EngineFailed
from tests.app.fakes import FakeEngine, in_process, make_settings


async def test_ready_follows_the_engine_and_health_is_patient(engine: FakeEngine, tmp_path):
    engine.load_s = 0.05
    async with in_process(engine, make_settings(tmp_path), wait=False) as running:
        for path in ("/ready", "/v1/models"):
            response = await running.http.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "loading")
            assert int(response.headers["retry-after"]) >= 1
        assert (await running.chat()).status_code == 503
        assert (await running.http.get("/health")).json() == {"status": "ok", "engine": "loading", "disk": "used"}
        await running.app.state.readiness.wait_loaded()
        assert (await running.http.get("/ready")).json() == {"status": "ready", "model": "test-model"}
        engine.state = "restarting"
        response = await running.http.get("/ready")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "restarting")
        assert (await running.http.get("/health")).status_code == 200
        assert (await running.http.get("/v1/models")).status_code == 200  # it is known what will be back
        engine.state = "ready"
        running.app.state.readiness.draining = True
        response = await running.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")


async def test_a_model_that_cannot_be_served_is_no_health(engine: FakeEngine, tmp_path):
    engine.failure = "it has learned positions"
    async with in_process(engine, make_settings(tmp_path), wait=False) as running:
        await asyncio.sleep(0.01)
        for path in ("/health", "/v1/health", "/ready"):
            response = await running.http.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (503, "failed")


async def test_a_missing_tokenizer_is_a_failure(engine: FakeEngine, tmp_path):
    (engine.directory / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    try:
        async with in_process(engine, make_settings(tmp_path / "state"), wait=False) as running:
            with pytest.raises(EngineFailed, match=r"tokenizer\.json"):
                await running.app.state.readiness.wait_loaded()
            assert (await running.http.get("/health")).status_code == 503
    finally:
        (tmp_path / "tokenizer.json").rename(engine.directory / "tokenizer.json")
