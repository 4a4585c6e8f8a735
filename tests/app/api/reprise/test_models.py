from pathlib import Path

import msgspec
import pytest

from reprise.app.schemas.chat import ChatCompletionRequest
from reprise.engine.messages import CodecChecks
from tests.app.fakes import STATS, FakeEngine, Running, in_process, make_settings, model_info


async def test_a_model_says_what_a_simulation_of_it_needs(engine: FakeEngine, tmp_path: Path):
    """`reprise simulate --server` reads these."""
    settings = make_settings(tmp_path, scheduler={"max_seqs": 5})
    async with in_process(engine, settings) as running:
        (listed,) = (await running.http.get("/v1/models")).json()["data"]
        alone = (await running.http.get("/v1/models/test-model")).json()
    assert listed == alone
    assert (alone["id"], alone["num_layers"], alone["max_seqs"]) == ("test-model", 2, 5)
    assert (alone["cache"]["kv_bytes_per_token"], alone["cache"]["hbm_tokens"]) == (512, 4096)


async def test_a_model_says_how_near_it_is_to_its_own_attention(running: Running):
    (listed,) = (await running.http.get("/v1/models")).json()["data"]
    assert listed["probe"] == {"logit_error": 2e-6, "logit_tolerance": 1e-3}


async def test_a_model_says_what_was_proven_of_its_bits(running: Running):
    (listed,) = (await running.http.get("/v1/models")).json()["data"]
    assert listed["exact"] == {"proven": True, "detail": "the same bits for 1 or 300 rows"}


@pytest.mark.parametrize("is_condemned", [False, True])
async def test_a_model_says_what_its_codec_was_found_to_do(engine: FakeEngine, tmp_path: Path, is_condemned: bool):
    checks = CodecChecks(counts=[4, *[0] * 11], total=0.0002, recent=0.00005, limit=0.002)
    engine.stats = msgspec.structs.replace(STATS, codec_checks=checks, codec_condemned=is_condemned)
    settings = make_settings(tmp_path, cache={"codec": "transform"})
    async with in_process(engine, settings) as running:
        coded = {"codec": "transform-1", "coded_bytes": 0.2, "codec_divergence": 0.0009}
        engine.model = running.app.state.readiness.model = model_info(engine.directory, **coded)
        (listed,) = (await running.http.get("/v1/models")).json()["data"]
        answer = (await running.chat()).json()
    assert listed["cache"]["codec"] == {
        "name": "transform-1", "bytes": 0.2, "budget": 0.001, "divergence": 0.0009,
        "is_on": not is_condemned, "checks": 4, "recent_divergence": 0.00005,
    }  # fmt: skip
    assert answer["x_cache"]["codec"] == ("raw" if is_condemned else "transform-1")


async def test_a_model_says_what_its_pages_change_and_exact_kv_is_refused_then(engine: FakeEngine, tmp_path: Path):
    async with in_process(engine, make_settings(tmp_path)) as running:
        (plain,) = (await running.http.get("/v1/models")).json()["data"]
        packed = {"hbm_dtype": "int8", "hbm_bytes_per_token": 272, "hbm_divergence": 0.0008}
        engine.model = running.app.state.readiness.model = model_info(engine.directory, **packed)
        (listed,) = (await running.http.get("/v1/models")).json()["data"]
        refused = await running.chat(kv_quality="exact")
        answer = (await running.chat(kv_quality="default")).json()
        assert answer["x_cache"]["hbm_dtype"] == "int8"
    assert {name: listed["cache"][name] for name in packed} == packed
    assert listed["cache"]["kv_bytes_per_token"] == 512
    assert {name: plain["cache"][name] for name in packed} == {
        "hbm_dtype": "float32", "hbm_bytes_per_token": 512, "hbm_divergence": None,
    }  # fmt: skip
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "kv_quality"
    assert "cache.hbm_dtype" in refused.json()["error"]["message"]


async def test_a_model_says_what_it_reads_of_long_contexts(engine: FakeEngine, tmp_path: Path):
    settings = make_settings(tmp_path, selector={"name": "pairs", "share": 0.2})
    async with in_process(engine, settings) as running:
        engine.model = running.app.state.readiness.model = model_info(engine.directory, selector="pairs")
        (listed,) = (await running.http.get("/v1/models")).json()["data"]
        answer = (await running.chat()).json()
        exact = (await running.chat(kv_quality="exact")).json()
    assert listed["selector"] == {"name": "pairs", "min_context": 2048, "share": 0.2}
    assert (answer["x_cache"]["selector"], answer["x_cache"]["selected_tokens"]) == ("pairs", 0)
    assert exact["x_cache"]["selector"] == "none"


async def test_a_model_without_a_codec_says_so(running: Running):
    (listed,) = (await running.http.get("/v1/models")).json()["data"]
    assert (listed["cache"]["codec"]["name"], listed["cache"]["codec"]["is_on"]) == ("raw", False)


async def test_a_model_that_is_not_served_is_not_found(running: Running):
    response = await running.http.get("/v1/models/another")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert "'another' does not exist; this server has 'test-model'." in response.json()["error"]["message"]


async def test_the_window_has_every_name_that_clients_look_for(running: Running):
    (listed,) = (await running.http.get("/v1/models")).json()["data"]
    named = {listed[name] for name in ("max_model_len", "context_length", "context_window")}
    assert named == {listed["meta"]["n_ctx"]} == {256}
    assert listed["max_output_tokens"] == 64
    props = (await running.http.get("/props")).json()
    assert (props["default_generation_settings"]["n_ctx"], props["model_alias"]) == (256, "test-model")


async def test_a_model_says_what_its_requests_may_have(running: Running):
    (listed,) = (await running.http.get("/v1/models")).json()["data"]
    assert set(listed["supported_parameters"]) <= ChatCompletionRequest.model_fields.keys()
    assert {"tools", "tool_choice"} <= set(listed["supported_parameters"])
    told = listed["capabilities"]
    assert (told["tools"], told["reasoning"], told["vision"]) == (True, False, False)


async def test_a_model_that_thinks_says_so(engine: FakeEngine, tmp_path: Path):
    async with in_process(engine, make_settings(tmp_path, model={"thoughts": "think"})) as running:
        (listed,) = (await running.http.get("/v1/models")).json()["data"]
    assert listed["capabilities"]["reasoning"] is True


async def test_codex_finds_the_list_that_it_insists_on(running: Running):
    told = (await running.http.get("/v1/models?client_version=0.171.0")).json()
    assert (told["models"], len(told["data"])) == ([], 1)
    assert "models" not in (await running.http.get("/v1/models")).json()


async def test_any_name_may_be_an_alias(engine: FakeEngine, tmp_path: Path):
    async with in_process(engine, make_settings(tmp_path, model={"aliases": "small, *"})) as running:
        assert (await running.chat(model="whatever/they-ask")).status_code == 200
        assert (await running.http.get("/v1/models/whatever")).json()["root"] == "test-model"
        listed = (await running.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["test-model", "small"]


async def test_a_refusal_lists_the_names_there_are(engine: FakeEngine, tmp_path: Path):
    aliases = ", ".join(f"alias-{number}" for number in range(20))
    async with in_process(engine, make_settings(tmp_path, model={"aliases": aliases})) as running:
        message = (await running.chat(model="x" * 500)).json()["error"]["message"]
    assert message.endswith("this server has 'test-model', 'alias-0', 'alias-1', 'alias-2', 'alias-3', 'alias-4', "
                            "'alias-5', 'alias-6' and 13 more.")  # fmt: skip
    assert len(message) < 500


async def test_a_codec_that_was_not_measured_has_no_budget(engine: FakeEngine, tmp_path: Path):
    async with in_process(engine, make_settings(tmp_path)) as running:
        coded = {"codec": "one-of-my-own", "coded_bytes": 0.5, "codec_divergence": None}
        engine.model = running.app.state.readiness.model = model_info(engine.directory, **coded)
        (listed,) = (await running.http.get("/v1/models")).json()["data"]
    codec = listed["cache"]["codec"]
    assert (codec["name"], codec["divergence"], "budget" in codec) == ("one-of-my-own", None, False)
