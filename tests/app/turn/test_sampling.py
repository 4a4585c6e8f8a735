"""Tests the default sampling parameters, which are the model's own recommendation, at every endpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from reprise.app.turn.sampling import OPENAI, SamplingDefaults, read_defaults
from tests.app.fakes import FakeEngine, Running, in_process, make_settings

RECOMMENDED = {"temperature": 0.2, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
ENDPOINTS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {**CHAT, "max_tokens": 5},
}


@pytest.fixture
async def recommending(model_dir, tmp_path):
    """An app whose model recommends something."""
    shutil.copytree(model_dir, tmp_path / "model")
    write(tmp_path / "model", {"eos_token_id": 2, "do_sample": True, **RECOMMENDED})
    async with in_process(FakeEngine(directory=tmp_path / "model"), make_settings(tmp_path / "state")) as running:
        yield running


def write(directory: Path, said: Any) -> None:
    (directory / "generation_config.json").write_text(said if isinstance(said, str) else json.dumps(said))


async def drawn_with(running: Running, path: str, **fields: Any) -> dict[str, Any]:
    answer = await running.http.post(path, json={"model": "test-model", **ENDPOINTS[path], **fields})
    assert answer.status_code == 200, answer.text
    asked = msgspec.structs.asdict(running.engine.submitted[-1].sampling)
    return {name: asked[name] for name in RECOMMENDED}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_the_model_recommends_and_the_request_decides(recommending, path):
    assert await drawn_with(recommending, path) == RECOMMENDED
    said = {"temperature": 0.0, "top_p": 1.0, "top_k": 3}
    assert await drawn_with(recommending, path, **said) == {**RECOMMENDED, **said}
    if path not in ("/v1/messages",):  # where null is no value
        assert await drawn_with(recommending, path, temperature=None) == RECOMMENDED


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_without_a_recommendation_openais_defaults_hold(running, path):
    assert await drawn_with(running, path) == msgspec.structs.asdict(OPENAI)


async def test_the_request_can_turn_a_recommendation_off(recommending):
    assert (await drawn_with(recommending, "/v1/chat/completions", top_k=-1))["top_k"] == 0
    assert (await drawn_with(recommending, "/v1/chat/completions", top_k=0))["top_k"] == 0


async def test_what_holds_is_told(recommending):
    models = (await recommending.http.get("/v1/models")).json()["data"]
    assert models[0]["default_sampling"] == RECOMMENDED
    assert models[0]["warnings"] == []
    answer = await recommending.http.post("/v1/responses", json={"model": "test-model", "input": "Hi"})
    assert (answer.json()["temperature"], answer.json()["top_p"]) == (0.2, 0.9)


async def test_a_value_that_cannot_be_used_is_a_warning(model_dir, tmp_path):
    shutil.copytree(model_dir, tmp_path / "model")
    write(tmp_path / "model", {"temperature": 99, "top_p": 0.5})
    async with in_process(FakeEngine(directory=tmp_path / "model"), make_settings(tmp_path / "state")) as running:
        assert await drawn_with(running, "/v1/completions") == {**msgspec.structs.asdict(OPENAI), "top_p": 0.5}
        described = (await running.http.get("/v1/models/test-model")).json()
        assert described["warnings"] == ["generation_config.json: temperature 99 is not used"]


@pytest.mark.parametrize(
    ("said", "used", "problems"),
    [
        ({}, {}, 0),
        ({"temperature": None, "top_k": None}, {}, 0),
        ({"temperature": 0, "top_p": 1, "top_k": -1}, {"temperature": 0, "top_k": 0}, 0),
        ({"top_k": 50.0}, {"top_k": 50}, 0),
        ({"temperature": True, "top_p": "0.5", "top_k": 1.5, "min_p": [0.1], "repetition_penalty": 0}, {}, 5),
        ({"temperature": 2.5, "top_p": -1, "min_p": 1.1, "top_k": 1e300, "repetition_penalty": 11}, {}, 5),
        ('{"temperature": NaN, "top_p": Infinity, "min_p": 1e999, "repetition_penalty": -Infinity}', {}, 4),
        ("[1]", {}, 1),
        ("{", {}, 1),
        ("[" * 100_000, {}, 1),
        ("\xff", {}, 1),
        (" " * (1 << 20) + "{}", {}, 1),
    ],
)
def test_a_file_from_anywhere_is_read(tmp_path, said, used, problems):
    if said == "\xff":
        (tmp_path / "generation_config.json").write_bytes(b"\xff")
    else:
        write(tmp_path, said)
    defaults, told = read_defaults(tmp_path)
    assert defaults == SamplingDefaults(**used)
    assert len(told) == problems


def test_no_file_and_no_directory_recommend_nothing(tmp_path):
    assert read_defaults(tmp_path) == read_defaults(tmp_path / "none") == (OPENAI, [])
    (tmp_path / "generation_config.json").mkdir()
    assert read_defaults(tmp_path) == (OPENAI, [])
