"""Tests loads that fail: which copies leave the disk for it, and what their request does then."""

import pytest

from reprise.cache.moves import LoadBlocks
from tests.cache.pool_model import PoolModel, make_manager
from tests.cache.requests.test_matching import CUT, tokens

TEXT = tokens(1, 200)


def on_disk(**options: float) -> PoolModel:
    """A history of three extents on disk alone: six full blocks, then one of 8 rows."""
    manager = make_manager(num_pages=16, dram_slots=4, staging_slots=16, disk_bytes=1 << 20, window=256, **options)
    model = PoolModel(manager)
    for end in (64, 128, 200):
        model.run(f"to {end}", TEXT[:end])
        model.settle()
    leave_it_to_the_disk(model)
    assert len(model.disk) == 3
    return model


def leave_it_to_the_disk(model: PoolModel) -> None:
    for row in list(model.manager.tiers.table):
        model.manager.tiers.dram.rows.drop(row)
        model.manager.tiers.hbm.leave(row)


def addresses(model: PoolModel) -> dict:
    """Return the places of the full blocks on disk."""
    return {row.key: row.copies.get("disk") for row in model.manager.tiers.table if not row.is_open}


def load(model: PoolModel, request_id: str, reason: str | None) -> bool:
    """Admit a request, whose load fails at its first block for that reason. Whether its step stands."""
    model.fails = lambda order: reason if isinstance(order, LoadBlocks) else None
    pending = len(model.contexts[request_id].token_ids) - model.manager.view.resident_tokens(request_id)
    assert model.manager.view.admit(request_id, pending) is not None
    return model.step(request_id, pending)


@pytest.mark.parametrize(("reason", "num_bad"), [("checksum", 1), ("missing", 1), ("io", 0), ("deadline", 0)])
def test_only_a_copy_that_is_bad_leaves_the_disk(reason, num_bad):
    model = on_disk()
    before = addresses(model)
    model.open("r", [*TEXT, 7])
    assert not load(model, "r", reason)
    assert before.items() >= addresses(model).items()
    assert len(before) - len(addresses(model)) == num_bad
    model.settle()
    assert len(model.disk) == 3
    model.close("r", 0)


@pytest.mark.parametrize("reason", ["io", "deadline"])
def test_what_could_not_be_read_is_computed_and_not_asked_for_again_by_the_same_request(reason):
    model = on_disk()
    before = addresses(model)
    model.open("r", [*TEXT, 7])
    assert not load(model, "r", reason)
    assert model.manager.view.resident_tokens("r") == 0
    assert load(model, "r", reason), "it loads nothing"
    model.close("r")
    model.settle()
    leave_it_to_the_disk(model)
    # A late read says nothing of its copy. One that met an error would meet it again, so the copy is replaced.
    kept = before.items() & addresses(model).items()
    assert len(before) - len(kept) == (reason == "io")
    assert before.keys() <= addresses(model).keys()
    model.open("next", [*TEXT, 7, 8])
    assert model.manager.view.resident_tokens("next") == 201
    assert load(model, "next", None)
    model.close("next")


def test_behind_a_cut_a_copy_that_could_not_be_read_is_not_asked_for_again_either():
    model = on_disk()
    model.open("r", [*TEXT, *tokens(2, 100)], rules=CUT)
    assert model.contexts["r"].lineage.joint is not None
    assert model.manager.view.resident_tokens("r") > 0
    before = addresses(model)
    assert not load(model, "r", "deadline")
    assert model.manager.view.resident_tokens("r") == 0
    assert load(model, "r", "deadline")
    assert model.contexts["r"].reuse.lost_lineage
    assert before.items() <= addresses(model).items()
    model.close("r")


@pytest.mark.parametrize("reason", ["checksum", "io"])
def test_a_request_that_ends_right_after_its_load_has_failed_publishes_nothing_of_it(reason):
    model = on_disk()
    model.open("r", [*TEXT, 7])
    model.fails = lambda order: reason if isinstance(order, LoadBlocks) else None
    assert model.manager.view.admit("r", 1) is not None
    model.forward("r", 1)
    model.hear()  # nobody has asked which loads have failed
    model.close("r")
    assert not [row for row in model.manager.tiers.table if row.page is not None]


@pytest.mark.parametrize(
    ("known", "said"), [(None, "cheaper_to_recompute"), ("load_failed", "load_failed"), ("load_late", "load_late")]
)
def test_why_a_load_failed_is_not_forgotten_because_the_rest_is_cheaper_to_compute(known, said):
    model = on_disk(bytes_per_s=1.0)
    model.open("r", [*TEXT, 7])
    context = model.contexts["r"]
    context.reuse.miss_reason = known
    assert model.manager.view.resident_tokens("r") == 0
    assert context.reuse.miss_reason == said
