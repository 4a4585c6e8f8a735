"""Tests how much of what is stored is worth loading, and how long an answer holds."""

import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reprise.cache.blocks.truncate import CutRules
from reprise.loadgen.virtual.simulation import Simulation
from reprise.loadgen.virtual.virtual_server import VirtualServer
from reprise.loadgen.workloads.workload import Conversation, Turn
from tests.cache.pool_model import NO_CUTS, PoolModel, make_manager
from tests.example_counts import examples

CUT = CutRules(allowed=True, keep_first=0, message_starts=(200,), important=())


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(50), k=count)


@pytest.mark.parametrize(("rules", "new", "loaded"), [(NO_CUTS, 30, 0), (CUT, 100, 200 % 32)])
def test_behind_a_cut_all_is_loaded_however_slow_the_link_is(rules, new, loaded):
    model = PoolModel(make_manager(num_pages=8, window=256, dram_slots=40, bytes_per_s=1.0))
    text = tokens(1, 200)
    model.run("first", text, answer=[1], session="s")
    model.settle()
    model.run("other", tokens(2, 256 - 1), session="other")  # all that HBM holds
    model.settle()
    model.open("second", [*text, *tokens(3, new)], session="s", rules=rules)
    # Without a cut, what a slow link would bring is computed again, and the text is the same. After one it is not.
    assert model.manager.view.resident_tokens("second") == loaded
    assert model.manager.view.admit("second", len(model.contexts["second"].token_ids) - loaded) == loaded
    model.settle()
    assert model.manager.requests.report("second").dram_tokens == loaded


@pytest.mark.parametrize(("why", "used"), [("io", 7), ("deadline", 7), ("memory", 0)])
def test_what_a_disk_did_not_give_is_used_where_dram_has_it_and_what_cannot_be_decoded_is_not(why, used):
    model = PoolModel(make_manager(num_pages=8, window=256, dram_slots=40))
    text = tokens(1, 200)
    model.run("first", text, answer=[1], session="s")
    model.settle()
    model.run("other", tokens(2, 256 - 1), session="other")  # all that HBM holds
    model.settle()
    model.open("second", [*text, *tokens(3, 30)], session="s", rules=NO_CUTS)
    context, table = model.contexts["second"], model.manager.tiers.table
    assert all(table.get(key).in_dram and table.get(key).page is None for key in context.keys[:6])
    context.reuse.unread = dict.fromkeys(context.keys[:6], why)
    assert len(model.manager.view._matcher.match(context).found.used) == used


@pytest.mark.parametrize(("found", "part"), [(1, 20), (2, 20), (3, 0), (5, 0), (6, 20)])
def test_after_a_kept_block_no_part_is_used_of_one_that_was_computed_on_more(found, part):
    """Six blocks stay after a cut, the last four moved. found: how many of them are left. Each time another block
    shares 20 tokens with what follows them here. After the first two, or after all six, it was computed on what
    precedes it here; after the others, on what was cut too."""
    model = PoolModel(make_manager(num_pages=80, window=512, dram_slots=80))
    text, new = tokens(1, 448), tokens(2, 64)
    rules = CutRules(allowed=True, keep_first=64, message_starts=(320, 448), important=())
    model.run("first", text, session="s")
    model.settle()
    answer(model, "cut", [*text, *new], rules, computed=64)
    beside = {1: text[:52], 2: [*text[:64], *text[320:340]], 3: text[:372], 5: text[:436]}
    if found in beside:
        model.run("beside", [*beside[found], *tokens(3, 44)], session="beside")
        model.settle()
    model.open("second", [*text, *new[:20], *tokens(4, 44)], session="s", rules=rules)
    context, tiers = model.contexts["second"], model.manager.tiers
    kept = context.keys[:6]
    assert (context.lineage.plain, context.lineage.joint) == (2, 6)
    for key in kept[found : found + 1]:  # it leaves all tiers while the turn waits
        tiers.dram.rows.drop(tiers.table.get(key))
        tiers.hbm.evict(key)
    match = model.manager.view._matcher.match(context).found
    assert [row.key for row in match.rows] == kept[:found]
    assert match.num_tokens == found * 32 + part
    answer(model, "second", None, rules, computed=len(context.token_ids) - match.num_tokens)


def answer(model: PoolModel, request_id: str, prompt: list[int] | None, rules: CutRules, *, computed: int) -> None:
    """Run a turn of session `s` that computes so many tokens. prompt: None if it is open."""
    if prompt is not None:
        model.open(request_id, prompt, session="s", rules=rules)
    assert model.manager.view.admit(request_id, computed) == len(model.contexts[request_id].token_ids) - computed
    assert model.step(request_id, computed)
    model.close(request_id)
    model.settle()


@pytest.mark.parametrize("shared", [0, 64])
def test_kv_on_its_way_to_hbm_is_not_in_hbm_until_it_has_come(shared):
    model = PoolModel(make_manager(num_pages=8, window=256, dram_slots=40))
    text = tokens(1, 200)
    model.run("first", text, answer=[1], session="s")
    model.settle()
    if shared:
        model.run("copy", text[:shared], session="copies")
        model.settle()
    model.run("other", tokens(2, 256 - 1), session="other")  # all that HBM holds
    model.settle()
    model.open("second", [*text, *tokens(3, 30)], session="s")
    before = model.manager.view.residency("second")
    assert (before.hbm_tokens, before.lower_tokens, before.is_loading) == (0, {"dram": 200}, False)
    assert before.own_tokens == 200 - shared
    model.manager.view.admit("second", 30)
    on_the_way = model.manager.view.residency("second")
    assert on_the_way == before._replace(is_loading=True), "its pages are given, and its KV is still below"
    model.settle()
    there = model.manager.view.residency("second")
    assert (there.hbm_tokens, there.lower_tokens, there.bytes_to_load, there.load_s) == (200, {}, 0, 0.0)
    assert (there.own_tokens, there.is_loading) == (200 - shared, False)


def change(model: PoolModel, what: str, number: int, before: list[int]) -> None:
    """One change of what is stored, where it lies, or what a load would take."""
    manager, tiers = model.manager, model.manager.tiers
    rows = [row for row in tiers.table if row.is_saved]
    row = rows[number % len(rows)] if rows else None
    match what:
        case "leave HBM" if row is not None and row.page is not None and not tiers.pages.pins(row.page):
            tiers.hbm.evict(row.key)
        case "leave DRAM" if row is not None and (row.page is not None or "disk" in row.copies):
            tiers.dram.rows.drop(row)
        case "leave the disk" if row is not None and "disk" in row.copies:
            tiers.disk.drop(row)
            if row.is_nowhere:
                tiers.table.forget(row)
        case "lose a file" if row is not None and "disk" in row.copies:
            del model.disk[row.copies["disk"][0]], model.extents[row.copies["disk"][0]]
            tiers.disk.lost([row.copies["disk"][0]])
        case "fetch":
            tiers.fetches.fetch([row for row in rows if "dram" not in row.copies][: 1 + number % 3], ("", "", "s"))
            model.move()
            while model.io:
                model.run_io()
            model.hear()
        case "turn":  # loads what is not in HBM, and goes on from there
            model.run(f"turn {number}", [*before, *tokens(number, 1 + number % 40)], session=f"s{number % 3}")
        case "settle":
            model.settle()
        case "computed":
            manager.rates.computed(64, 10.0 ** -(number % 6))
        case "moved" | "late":
            direction = ("dram_to_hbm", "disk_to_hbm")[number % 2]
            (manager.rates.moved if what == "moved" else manager.rates.late)(direction, 1 << 14, 10.0 ** -(number % 6))
        case "passed over":
            manager.rates.passed_over(("dram_to_hbm", "disk_to_hbm")[number % 2])
        case "guess":
            manager.rates.expect_steps(1e-3, 10.0 ** -(number % 6))


CHANGES = ["leave HBM", "leave DRAM", "leave the disk", "lose a file", "fetch", "turn", "settle"]
NEW_RATES = ["computed", "moved", "late", "passed over", "guess"]


@settings(max_examples=examples(60))
@example(changes=[("settle", 0), ("leave DRAM", 1), ("fetch", 0)], bytes_per_s=1e12, out_of_hbm=True, disk_s=100.0)
@example(
    changes=[("settle", 0), ("leave DRAM", 1), ("leave the disk", 1)], bytes_per_s=1e12, out_of_hbm=True, disk_s=100.0
)
@example(
    changes=[("settle", 0), ("leave DRAM", 1), ("lose a file", 0)], bytes_per_s=1e12, out_of_hbm=True, disk_s=100.0
)
@given(
    changes=st.lists(st.tuples(st.sampled_from([*CHANGES, *NEW_RATES]), st.integers(0, 1 << 12)), max_size=30),
    bytes_per_s=st.sampled_from([1e4, 1e5, 1e12]),
    out_of_hbm=st.booleans(),
    disk_s=st.sampled_from([0.0, 1.0, 100.0]),
)
def test_what_is_remembered_is_what_would_be_found_anew_whatever_has_changed(changes, bytes_per_s, out_of_hbm, disk_s):
    """`PoolModel.check` compares the two, for everybody who waits; here, in the state machines, everywhere."""
    model = PoolModel(
        make_manager(num_pages=24, dram_slots=24, staging_slots=4, disk_bytes=1 << 17, bytes_per_s=bytes_per_s)
    )
    text = tokens(1, 150)
    model.run("first", text, session="s0")
    model.settle()
    for number, length in enumerate((40, 130, 150)):
        model.open(f"waits {number}", [*text[:length], *tokens(number, 20)], session=f"s{number}")
    for row in list(model.manager.tiers.table) if out_of_hbm else ():
        model.manager.tiers.hbm.evict(row.key)
    model.manager.rates.late("disk_to_hbm", 1 << 14, disk_s)  # slower than DRAM, or as fast
    for number, (what, which) in enumerate(changes):
        change(model, what, which + (number << 12 if what == "turn" else 0), text)
        for context in model.contexts.values():
            model.check_match(context)
    model.check()


def test_a_prompt_is_walked_along_the_table_twice_at_most_before_its_first_token(monkeypatch):
    machine = VirtualServer(hbm_blocks=40, dram_blocks=60, disk_blocks=100, policy="car", window=4, max_seqs=2)
    turns = tuple(Turn(prompt_tokens=100, answer_tokens=10, think_s=1.0) for _ in range(4))
    simulation = Simulation(machine=machine, conversations=[Conversation("c", "", 1.0, turns)], rng=random.Random(0))
    walks, asked = Counter(), Counter()
    matcher = simulation.cache.view._matcher
    find, match = matcher._find, matcher.match
    monkeypatch.setattr(matcher, "_find", lambda context: walks.update([context.request_id]) or find(context))
    monkeypatch.setattr(matcher, "match", lambda context: asked.update([context.request_id]) or match(context))
    simulation.run()
    assert len(walks) == 4
    assert max(walks.values()) <= 2 < min(asked.values())
