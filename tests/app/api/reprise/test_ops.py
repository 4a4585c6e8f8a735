import msgspec
from prometheus_client.parser import text_string_to_metric_families

from reprise.engine.messages import WIRE_VERSION, SchedulerState, WaitingInfo
from tests.app.fakes import FakeEngine, Running, in_process, make_settings


def samples(text: str) -> dict[tuple[str, tuple], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_models_say_what_they_can(running: Running):
    model = (await running.http.get("/v1/models/test-model")).json()
    assert model["max_model_len"] == 256
    assert model["capabilities"]["positions_decoupled"] is True
    assert model["dtype"] == "float32"
    assert "path" not in str(model)


async def test_version(running: Running):
    answer = (await running.http.get("/version")).json()
    assert answer["version"]
    assert answer["wire_version"] == WIRE_VERSION


async def test_metrics_count_what_happened(running: Running):
    await running.chat(n=2)
    await running.chat(stream=True)
    await running.http.get("/nowhere/at/all")
    await running.chat(model="unknown")
    running.engine.script.die_after = 3
    await running.chat(stream=True)
    text = (await running.http.get("/metrics")).text
    values = samples(text)
    chat = ("route", "/v1/chat/completions")
    assert values["reprise_requests_total", (chat, ("status", "200"))] == 3
    assert values["reprise_failed_generations_total", (("code", "engine_lost"),)] == 1
    assert values["reprise_requests_total", (chat, ("status", "404"))] == 1
    assert values["reprise_requests_total", (("route", "unknown"), ("status", "404"))] == 1
    assert values["reprise_ttft_seconds_count", ()] == 4  # choices that began
    for name in ("tpot", "queue", "prefill"):
        assert values[f"reprise_{name}_seconds_count", ()] == 3  # choices that ended
    assert values["reprise_e2e_seconds_count", ()] == 3  # requests
    assert values["reprise_itl_seconds_count", ()] > 3
    assert values["reprise_active_requests", ()] == 0
    pages = {state: values["reprise_hbm_pages", (("state", state),)] for state in ("total", "free", "cached")}
    assert pages["total"] == pages["free"] + pages["cached"]
    assert values["reprise_prompt_tokens_total", (("outcome", "hbm"),)] == 32
    assert values["reprise_miss_tokens_total", (("reason", "new"),)] == 9
    assert values["reprise_leases", ()] == 0
    assert values["reprise_engine_up", ()] == 1
    tiers = {"tier_bytes": 2000, "tier_capacity_bytes": 8000, "refused_blocks_total": 6, "tier_write_failures_total": 4}
    for name, value in tiers.items():
        assert values[f"reprise_{name}", (("tier", "disk"),)] == value
    assert values["reprise_tier_evictions_total", (("tier", "dram"),)] == 5
    assert values["reprise_moved_bytes_total", (("direction", "disk_to_hbm"),)] == 400
    assert values["reprise_moved_seconds_total", (("direction", "dram_to_hbm"),)] == 0.25
    assert values["reprise_load_failures_total", (("reason", "checksum"),)] == 2
    assert values["reprise_kv_load_seconds_total", ()] == 1
    assert values["reprise_kv_load_wait_seconds_total", ()] == 0.25
    assert values["reprise_kv_load_overlap_ratio", ()] == 0.75
    assert values["reprise_truncated_tokens_total", ()] == 64
    assert values["reprise_in_flight_transfers", ()] == 3
    assert values["reprise_verified_loads_total", ()] == 11
    assert values["reprise_verify_mismatches_total", ()] == 1
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    assert all(name.startswith("reprise_") for name in names)
    assert text.count("# HELP") == text.count("# TYPE")


async def test_the_queue_is_shown_to_those_who_may_see_it(engine: FakeEngine, tmp_path):
    waiting = WaitingInfo(
        request_id="r/0",
        tenant="t",
        session_id="s",
        order={"class": 3.0, "overtaken": 1.0},
        hbm_tokens=32,
        lower_tokens={"dram": 64},
        bytes_to_load=4096,
        missing_tokens=10,
        has_pages=True,
        waiting_s=0.5,
        expected_start_s=None,
    )
    state = SchedulerState(
        policy="car",
        front=[waiting],
        preemptions=2,
        fair_preemptions=1,
        loads={"hidden": 5},
        step_cost={"fixed": 0.001},
    )
    engine.stats = msgspec.structs.replace(engine.stats, scheduler=state)
    keys = {"server": {"api_keys": ("key-of-somebody",), "admin_keys": ("key-of-the-admin",)}}
    async with in_process(engine, make_settings(tmp_path, **keys)) as running:

        async def ask(path: str, key: str):
            return await running.http.get(path, headers={"authorization": f"Bearer {key}"})

        shown = (await ask("/v1/scheduler", "key-of-the-admin")).json()
        assert shown["front"][0]["lower_tokens"] == {"dram": 64}
        assert shown["front"][0]["order"] == {"class": 3.0, "overtaken": 1.0}
        assert (shown["object"], shown["policy"], shown["running"]) == ("scheduler", "car", engine.stats.running)
        assert shown["waiting"] == engine.stats.waiting
        refused = await ask("/v1/scheduler", "key-of-somebody")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        found = samples((await ask("/metrics", "key-of-the-admin")).text)
        assert found["reprise_started_loads_total", (("outcome", "hidden"),)] == 5
        assert found["reprise_fair_preemptions_total", ()] == 1
        engine.stats = msgspec.structs.replace(engine.stats, scheduler=None)
        assert (await ask("/v1/scheduler", "key-of-the-admin")).status_code == 503


async def test_without_keys_the_queue_is_open(engine: FakeEngine, tmp_path):
    async with in_process(engine, make_settings(tmp_path)) as running:
        engine.state = "restarting"
        assert (await running.http.get("/v1/scheduler")).status_code == 503


async def test_a_disk_that_does_not_answer_is_told(running: Running):
    """The state needs no key; the reason, which may name a directory, is for those who may see the cache."""
    assert (await running.http.get("/health")).json()["disk"] == "used"
    assert (await running.http.get("/v1/cache/stats")).json()["problems"] == {}
    used = ("reprise_tier_used", (("tier", "disk"),))
    assert samples((await running.http.get("/metrics")).text)[used] == 1
    assert running.engine.stats is not None
    running.engine.stats = msgspec.structs.replace(running.engine.stats, tier_problems={"disk": "no answer for 5 s"})
    assert (await running.http.get("/health")).json() == {"status": "ok", "engine": "ready", "disk": "away"}
    assert (await running.http.get("/v1/cache/stats")).json()["problems"] == {"disk": "no answer for 5 s"}
    assert samples((await running.http.get("/metrics")).text)[used] == 0
