"""Tests what a beat says of the load, from what an engine counts."""

from typing import Any

import msgspec
import pytest

from reprise.fleet.load import ROOMY_S, counted, load_of
from tests.app.fakes import STATS, model_info

MODEL_FIELDS = {"kv_bytes_per_token": 1000}


def stats(**changes: Any):
    fields = {
        "tier_capacity": {"dram": 1000, "disk": 0},
        "tier_bytes": {"dram": 500},
        "moved_bytes": {"dram_to_hbm": 4000, "hbm_to_dram": 100},
        "moved_seconds": {"dram_to_hbm": 2.0},
        "step_seconds": 10.0,
    }
    return msgspec.structs.replace(STATS, **{**fields, **changes})


@pytest.fixture
def model(tmp_path):
    return model_info(tmp_path, **MODEL_FIELDS)


def test_rates_are_what_was_measured(model):
    load = load_of(stats(), model, None, 0.0, draining=False)
    assert (load.dram_bytes_per_s, load.disk_bytes_per_s, load.kv_bytes_per_token) == (2000.0, 0.0, 1000.0)
    assert (load.busy, load.draining) == (0.0, False)


def test_a_replica_that_loads_from_redis_or_uploads_to_it_says_how_fast(model):
    moved = {"moved_bytes": {"disk_to_redis": 600, "redis_to_hbm": 800}}
    uploaded = stats(**moved, moved_seconds={"disk_to_redis": 2.0})
    assert load_of(uploaded, model, None, 0.0, draining=False).redis_bytes_per_s == 300.0
    both = stats(**moved, moved_seconds={"disk_to_redis": 2.0, "redis_to_hbm": 1.0})
    assert load_of(both, model, None, 0.0, draining=False).redis_bytes_per_s == 800.0
    assert load_of(stats(), model, None, 0.0, draining=False).redis_bytes_per_s == 0.0


def test_a_tier_with_room_keeps_for_ever_and_none_not_at_all(model):
    load = load_of(stats(), model, None, 0.0, draining=False)
    assert (load.dram_kept_s, load.disk_kept_s) == (ROOMY_S, 0.0)


def test_a_full_tier_keeps_until_as_much_has_come(model):
    full = {"tier_bytes": {"dram": 990}}
    before = counted(stats(**full), 5.0)
    now = stats(**full, moved_bytes={"hbm_to_dram": 200}, step_seconds=10.5)
    load = load_of(now, model, before, 6.0, draining=True)
    assert (load.dram_kept_s, load.busy, load.draining) == (10.0, 0.5, True)
    assert load_of(stats(**full), model, before, 6.0, draining=False).dram_kept_s == ROOMY_S


def test_busy_stays_a_share_after_the_engine_has_started_anew(model):
    before = counted(stats(step_seconds=100.0), 5.0)
    assert load_of(stats(step_seconds=1.0), model, before, 6.0, draining=False).busy == 0.0
    assert load_of(stats(step_seconds=900.0), model, before, 6.0, draining=False).busy == 1.0
