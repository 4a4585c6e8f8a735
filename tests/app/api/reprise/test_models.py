from pathlib import Path

from tests.app.fakes import FakeEngine, Running, in_process, make_settings


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


async def test_a_model_that_is_not_served_is_not_found(running: Running):
    response = await running.http.get("/v1/models/another")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
