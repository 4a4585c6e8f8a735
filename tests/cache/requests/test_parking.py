"""Tests which blocks of a context larger than HBM are parked, and that every row of it is where it is said to be."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.rows import PARKED
from reprise.cache.requests.parking import chunk_pages
from tests.cache.pool_model import PoolModel, make_manager
from tests.example_counts import examples

PAGES, MOST = 8, 4


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(50), k=count)


def make(**options: int | bool) -> PoolModel:
    return PoolModel(make_manager(**{"num_pages": PAGES, "most_pages": MOST, "dram_slots": 60, **options}))  # type: ignore[arg-type]


def go_on(model: PoolModel, request_id: str, most: int) -> bool:
    """Compute a chunk of a request, after giving it room. Returns False if it has to wait."""
    view, context = model.manager.view, model.contexts[request_id]
    if context.rows.pages:
        count = min(most, len(context.token_ids) - context.rows.computed)
        if not view.grow(request_id, count):
            return False
    else:
        before = view.resident_tokens(request_id)
        count = min(most, len(context.token_ids) - before)
        cached = view.admit(request_id, count)
        if cached is None:
            return False
        assert cached == before, "the scheduler has made its chunk by that"
    return model.step(request_id, count)


def finish(model: PoolModel, request_id: str, most: int) -> None:
    context = model.contexts[request_id]
    for _ in range(100):
        if context.rows.pages and context.rows.computed == len(context.token_ids):
            return
        if not go_on(model, request_id, most):
            model.settle()
        model.check()
    raise AssertionError("it does not get on")


def beside(model: PoolModel, number: int) -> None:
    """Another request comes and goes."""
    model.open(f"{number}", tokens(100 + number, 50), session=f"{number}")
    cached = model.manager.view.admit(f"{number}", 50)
    if cached is not None:
        model.step(f"{number}", 50 - cached)
        model.check()
    model.close(f"{number}")


@settings(max_examples=examples(15), deadline=None)
@given(data=st.data(), page_size=st.sampled_from([32, 64]), exact=st.booleans())
def test_every_row_is_there_whatever_happens(data: st.DataObject, page_size: int, exact: bool) -> None:
    model = make(page_size=page_size, exact=exact, dram_slots=data.draw(st.integers(32, 60)))
    view, most = model.manager.view, chunk_pages(MOST) * page_size
    text = tokens(1, data.draw(st.integers(PAGES * page_size, 600)))
    model.open("large", text)
    context = model.contexts["large"]
    for number in range(data.draw(st.integers(5, 25))):
        match data.draw(st.sampled_from(["go on"] * 5 + ["settle", "save", "beside", "preempt", "lost", "again"])):
            case "go on" if not context.rows.pages or context.rows.computed < len(context.token_ids):
                if not go_on(model, "large", data.draw(st.integers(1, most))):
                    model.settle()
            case "settle":
                model.settle()
            case "save" if model.saves:
                model.run_save()
                model.hear()
            case "beside":
                beside(model, number)
            case "preempt" if context.rows.pages:
                view.preempt("large")
            case "lost" if PARKED in context.rows.pages:
                where = data.draw(st.sampled_from(list(context.saving.parked.values())))
                model.manager.lost("large", [where.key])
                assert model.void_failed() == ["large"]
            case "again":
                model.close("large")
                model.check()
                model.open("large", text)
                context = model.contexts["large"]
        model.check()
    finish(model, "large", most)
    model.close("large")
    model.settle()
    assert model.manager.num_leases == 0
    assert not any(model.manager.tiers.dram.rows._slots._pins)


def test_the_newest_blocks_have_pages() -> None:
    model = make()
    model.open("large", tokens(1, 400))
    context = model.contexts["large"]
    while context.rows.computed < 400:
        assert go_on(model, "large", BLOCK_TOKENS)
        model.settle()
    assert context.rows.pages[:9] == [PARKED] * 9
    assert PARKED not in context.rows.pages[9:]
    assert len(context.rows.pages[9:]) == MOST


def test_a_returning_context_is_parked_from_the_start() -> None:
    model, text = make(), tokens(1, 400)
    model.open("first", text)
    finish(model, "first", BLOCK_TOKENS)
    model.close("first")
    model.settle()
    model.open("second", [*text, *tokens(2, 20)])
    assert model.manager.view.admit("second", 20) == 400
    assert model.contexts["second"].rows.pages.count(PARKED) == 10, "of 14, the last for what is new"
    model.settle()
    model.check()


def test_what_no_slot_has_needs_pages() -> None:
    """Two of them are free beside a chunk that begins inside of a page."""
    model, text = make(), tokens(1, 400)
    model.open("first", text)
    finish(model, "first", BLOCK_TOKENS)
    model.close("first")
    model.settle()
    model.open("second", [*text, *tokens(2, 20)])
    tiers, rows = model.manager.tiers, model.manager.tiers.table.matched(model.contexts["second"].chain())
    assert len(rows) == 12
    assert rows[-1].page is not None
    in_hbm = [block for block, row in enumerate(rows) if row.page is not None]
    assert len(in_hbm) >= 4
    for block in in_hbm:
        tiers.dram.rows.drop(rows[block])
    assert model.manager.view.resident_tokens("second") == in_hbm[2] * BLOCK_TOKENS
    finish(model, "second", BLOCK_TOKENS)


def test_one_large_context_has_room_at_a_time() -> None:
    model = make()
    for name in ("first", "second"):
        model.open(name, tokens(1 if name == "first" else 2, 300), session=name)
    finish(model, "first", BLOCK_TOKENS)
    assert model.manager.view.admit("second", BLOCK_TOKENS) is None
    assert model.contexts["second"].saving.slots == {}
    model.close("first")
    assert model.manager.view.admit("second", BLOCK_TOKENS) is not None


def test_who_waits_for_slots_for_too_long_is_hopeless() -> None:
    model = make(dram_slots=12)
    model.open("large", tokens(1, 300))
    for slot in iter(model.manager.tiers.dram.rows._slots.take, None):
        model.manager.tiers.dram.rows.pin(slot)  # as if others read them all
    for now in (0.0, 30.0):
        model.manager.plan(model.line, 0, now)
        assert model.manager.view.admit("large", BLOCK_TOKENS) is None
        assert model.manager.parking.take_hopeless() == []
    model.manager.plan(model.line, 0, 31.0)
    assert model.manager.view.admit("large", BLOCK_TOKENS) is None
    assert model.manager.parking.take_hopeless() == ["large"]
    assert model.manager.parking.take_hopeless() == []


@pytest.mark.parametrize(("most", "pages"), [(4, 1), (5, 1), (6, 2), (128, 63)])
def test_chunks_leave_room_for_what_is_being_saved(most: int, pages: int) -> None:
    assert chunk_pages(most) == pages
