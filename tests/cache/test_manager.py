import random
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.policies import POLICIES
from tests.cache.pool_model import PoolModel, make_manager
from tests.example_counts import examples

TENANTS = [("", ""), ("", ""), ("", "salt"), ("other", "")]
WHICH = st.integers(0, 5)  # chooses among the requests that qualify, counted in circles


class Conversations(RuleBasedStateMachine):
    """Requests of a few sessions come, run, stop and come back in any order, in a memory that is too small for them.
    Their prompts are prefixes, extensions and edits of each other."""

    page_size = 32

    @initialize(
        contiguous=st.booleans(),
        policy=st.sampled_from(sorted(POLICIES)),
        reuse=st.integers(0, 9).map(bool),
        num_pages=st.integers(1, 12),
        max_sessions=st.integers(1, 5),
    )
    def start(self, contiguous, policy, reuse, num_pages, max_sessions):
        self.manager = make_manager(
            num_pages=num_pages,
            page_size=self.page_size,
            contiguous=contiguous,
            policy=policy,
            reuse=reuse,
            ttl_s=20.0,
            max_sessions=max_sessions,
        )
        self.model = PoolModel(self.manager)
        self.max_sessions = max_sessions
        self.now = 0.0
        self.opened = 0
        self.reported = set()
        self.texts = [[1]]

    # --- what may happen ----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.model.contexts) < 6)
    @rule(
        base=st.integers(0, 9),
        kept=st.one_of(st.just(1.0), st.floats(0, 1)),
        voice=st.integers(0, 2),
        length=st.integers(1, 200),
        session=st.sampled_from("abc"),
        tenant=st.sampled_from(TENANTS),
        copies=st.sampled_from([1, 1, 1, 2]),
    )
    def open(self, base, kept, voice, length, session, tenant, copies):
        """An earlier text or the head of one, and a piece of one of three streams of few words."""
        before = self.texts[base % len(self.texts)]
        limit = self.manager.tiers.pages.num_pages * self.page_size
        length = length * max(1, self.page_size // 64)
        tokens = (before[: int(len(before) * kept)] + random.Random(voice).choices([0, 1], k=length))[:limit]
        for _ in range(copies):
            self.opened += 1
            self.model.open(f"r{self.opened}", list(tokens), session=session, tenant=tenant[0], salt=tenant[1])
        self.texts = [*self.texts[-9:], tokens]

    @precondition(lambda self: self.waiting)
    @rule(which=WHICH, chunk=st.integers(1, 300), more=st.integers(0, 2))
    def admit(self, which, chunk, more):
        """One to three admissions with no step, and so no move carried out, between them."""
        for request_id in self.chosen(self.waiting, which, 1 + more):
            context = self.model.contexts[request_id]
            resident = self.manager.view.resident_tokens(request_id)
            alone = not self.running
            before = self.snapshot()
            tokens = min(len(context.token_ids) - resident, chunk)
            cached = self.manager.view.admit(request_id, tokens)
            if cached is None:
                assert self.snapshot() == before
                assert not alone, "a request that fits into HBM waits for ever"
                continue
            assert 0 <= cached <= resident < len(context.token_ids)
            assert len(context.rows.pages) * self.page_size >= min(len(context.token_ids), cached + chunk)
            if request_id not in self.reported:
                self.report(request_id, cached)

    def report(self, request_id, cached):
        self.reported.add(request_id)
        context = self.model.contexts[request_id]
        report = self.manager.requests.report(request_id)
        assert report.hbm_tokens == cached
        assert report.prompt_tokens == context.prompt_tokens
        assert sum(report.miss_reasons.values()) == report.computed_tokens
        assert all(tokens > 0 for tokens in report.miss_reasons.values())
        assert cached <= report.history_tokens <= report.prompt_tokens

    @precondition(lambda self: self.running)
    @rule(which=WHICH, chunk=st.integers(1, 300))
    def compute(self, which, chunk):
        """A chunk of a prompt; a step that decodes, once all is computed."""
        request_id = self.chosen(self.running, which)[0]
        context = self.model.contexts[request_id]
        if context.rows.computed == len(context.token_ids):
            if len(context.token_ids) == self.manager.tiers.pages.num_pages * self.page_size:
                return
            context.token_ids.append(self.opened % 2)
        chunk = min(chunk, len(context.token_ids) - context.rows.computed)
        before = self.snapshot()
        if self.manager.view.grow(request_id, chunk):
            self.model.step(request_id, chunk)
        else:
            assert self.snapshot() == before
            assert len(self.running) > 1, "a request that fits into HBM cannot go on"

    @precondition(lambda self: self.running)
    @rule(which=WHICH, chunk=st.integers(1, 64))
    def decode(self, which, chunk):
        for _ in range(chunk):
            self.compute(which, 1)

    @precondition(lambda self: self.running)
    @rule(which=WHICH)
    def preempt(self, which):
        self.manager.view.preempt(self.chosen(self.running, which)[0])

    @precondition(lambda self: self.model.contexts)
    @rule(which=WHICH, kept=st.one_of(st.just(1.0), st.floats(0, 1)))
    def close(self, which, kept):
        """All of it, or what stands before a stop string; waiting, or in the middle of its prompt."""
        request_id = self.chosen(list(self.model.contexts), which)[0]
        tokens = self.model.contexts[request_id].token_ids
        self.texts = [*self.texts[-9:], list(tokens)]
        self.model.close(request_id, int(len(tokens) * kept), self.now)

    @precondition(lambda self: self.running)
    @rule(which=WHICH)
    def fail(self, which):
        """Its result cannot be: nothing it stands on may be found again, now or when others that share it end."""
        request_id = self.chosen(self.running, which)[0]
        chain = list(self.model.contexts[request_id].chain())
        self.manager.requests.distrust(request_id)
        self.model.close(request_id, 0, self.now)
        assert not any(key in self.manager.tiers.table for key in chain)

    @rule(seconds=st.sampled_from([1.0, 5.0, 30.0]))
    def sweep(self, seconds):
        self.now += seconds
        before = len(self.manager.sessions.contexts)
        assert self.manager.sessions.sweep(self.now) == before - len(self.manager.sessions.contexts)

    # --- helpers and invariants ---------------------------------------------------------------------------------------

    @property
    def waiting(self):
        return [name for name, context in self.model.contexts.items() if not context.rows.pages]

    @property
    def running(self):
        return [name for name, context in self.model.contexts.items() if context.rows.pages]

    @staticmethod
    def chosen(names, which, count=1):
        start = which % len(names)
        return (names[start:] + names[:start])[:count]

    def snapshot(self):
        manager, pages = self.manager, self.manager.tiers.pages
        claims = [(pages.pins(p), pages.residents(p), pages.is_free(p)) for p in range(pages.num_pages)]
        contexts = [
            (c.request_id, list(c.rows.pages), c.rows.computed, c.rows.sealed) for c in self.model.contexts.values()
        ]
        order = manager.tiers.hbm.policy.victims(len(manager.tiers.table), ())
        return (
            claims,
            contexts,
            order,
            dict(manager._siblings.coming),
            list(manager.tiers.orders.moves),
            pages.num_free,
            pages.num_pinned,
        )

    @invariant()
    def promises_are_kept(self):
        if hasattr(self, "model"):
            self.model.check()
            assert len(self.manager.sessions.contexts) <= self.max_sessions

    def teardown(self):
        if not hasattr(self, "model"):
            return
        for request_id in list(self.model.contexts):
            self.model.close(request_id, now=self.now)
            self.model.check()
        assert self.manager.num_leases == 0
        assert self.manager._siblings.coming == {}
        assert (
            self.manager.tiers.pages.num_free + self.manager.tiers.pages.num_cached
            == self.manager.tiers.pages.num_pages
        )
        self.manager.sessions.sweep(self.now + 1000)
        assert len(self.manager.sessions.contexts) == 0


@pytest.mark.sweep(2)
@pytest.mark.parametrize("page_size", [32, 64, 128, 256])
def test_rows_always_hold_what_they_are_taken_for(page_size):
    machine = type(f"Pages{page_size}", (Conversations,), {"page_size": page_size})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(120), stateful_step_count=40))


# --- worked by hand ---------------------------------------------------------------------------------------------------


def test_a_lone_request_computes_again_what_there_is_no_room_to_copy():
    # One page. Its block 0 is whole for the prompt's first 32 tokens but for the last, which is always computed: 31
    # rows would have to be copied into a second page.
    model = PoolModel(make_manager(num_pages=1))
    model.run("first", range(32))
    model.open("again", range(32))
    assert model.manager.view.resident_tokens("again") == 31
    assert model.manager.view.admit("again", 1) == 0
    model.step("again", 32)
    model.check()


def test_while_others_run_a_copy_waits_for_its_room():
    # Three pages: one runs, one is cached, one is free. "again" needs the free one for its copy and one for row 32.
    model = PoolModel(make_manager(num_pages=3))
    model.run("first", range(32))
    model.open("other", range(100, 120), session="t")
    assert model.manager.view.admit("other", 20) == 0
    model.step("other", 20)
    model.open("again", [*range(31), 99, 99])
    assert model.manager.view.admit("again", 2) is None
    model.close("other")
    assert model.manager.view.admit("again", 2) == 31
    model.step("again", 2)
    model.check()


def block(number):
    """32 tokens that no other block has."""
    return list(range(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS))


def test_a_context_stays_findable_when_the_block_it_was_copied_from_has_left():
    # Pages of two blocks. "b" shares block 0 with "a", so it copies it and puts block 2 beside the copy. Then "c" takes
    # the page block 0 lived in: its name must not be lost with it, the copy is as good.
    model = PoolModel(make_manager(num_pages=3, page_size=64))
    model.run("a", block(0) + block(1), session="a")
    model.open("b", block(0) + block(2) + [7], session="b")
    assert model.manager.view.admit("b", 33) == 32
    model.step("b", 33)
    model.open("c", [9], session="c")
    assert model.manager.view.admit("c", 1) == 0
    assert model.manager.stats.evicted_blocks == 2
    model.close("c")
    model.close("b")
    model.check()
    assert model.run("b2", block(0) + block(2) + [7, 8], session="b") == 65


def test_of_what_was_copied_the_tail_leaves_first():
    # Pages of four blocks. "b" copies blocks 0 and 1 and half of block 2; the originals are not pinned.
    model = PoolModel(make_manager(num_pages=4, page_size=128))
    model.run("a", block(0) + block(1) + block(2), session="a")
    model.run("z", block(3), session="z")
    model.open("b", block(0) + block(1) + block(2)[:16] + [999], session="b")
    assert model.manager.view.admit("b", 1) == 80
    keys = {key: number for number, key in enumerate(model.contexts["b"].domain.chain(block(0) + block(1) + block(2)))}
    ranked = model.manager.tiers.hbm.policy.victims(4, ())
    assert [keys.get(key, "z") for key in ranked] == ["z", 2, 1, 0]


def reasons(model, request_id, tokens, session="s"):
    """Opens and admits a whole prompt; the reasons for what has to be computed of it."""
    model.open(request_id, tokens, session=session)
    cached = model.manager.view.admit(request_id, len(tokens) - model.manager.view.resident_tokens(request_id))
    report = model.manager.requests.report(request_id)
    assert report.hbm_tokens == cached
    assert sum(report.miss_reasons.values()) == report.computed_tokens
    model.step(request_id, len(tokens) - cached)
    model.close(request_id)
    return report.miss_reasons


def test_why_the_rest_of_a_prompt_was_not_there():
    model = PoolModel(make_manager(num_pages=8))
    history = block(0) + block(1) + block(2)[:20]  # 84 tokens
    assert reasons(model, "first", history) == {"new": 84}
    assert reasons(model, "again", history) == {"last_token": 1}
    assert reasons(model, "next", [*history, 7, 7]) == {"new": 2}
    # Now the session has 86. Cut in the middle of block 1 and regenerated: only the last token's logits are missing.
    assert reasons(model, "regenerated", history[:50]) == {"last_token": 1}
    # Now 50. Edited at token 40: 10 known tokens lie after the edit, 5 more were never there.
    assert reasons(model, "edited", [*history[:40], *[9] * 15]) == {"diverged": 10, "new": 5}
    # What another session finds is a sibling's, the last token too.
    assert reasons(model, "stranger", history[:64], session="t") == {"last_token": 1}
    assert reasons(model, "long", list(range(1000, 1256)), session="u") == {"new": 256}  # takes all eight pages
    # The session has 55: the head of "late" up to its last token, which is another.
    assert reasons(model, "late", [*history[:40], 9, 9, 8]) == {"evicted": 42, "diverged": 1}


def test_a_request_that_ends_while_it_is_preempted_is_remembered():
    model = PoolModel(make_manager())
    model.open("r", block(0) + block(1))
    assert model.manager.view.admit("r", 64) == 0
    model.step("r", 64)
    model.manager.view.preempt("r")
    model.check()
    model.close("r", 50)  # a stop string was found in what it had said before
    model.check()
    assert len(model.manager.sessions.contexts) == 1
    assert reasons(model, "next", block(0) + block(1)[:18] + [999]) == {"new": 1}


def test_a_request_that_ends_before_it_computed_anything_leaves_its_session_as_it_was():
    model = PoolModel(make_manager())
    model.run("first", range(40))
    model.open("failed", range(100, 150))
    assert model.manager.view.admit("failed", 50) == 0
    model.close("failed", 0)
    model.open("waiting", range(45))
    model.close("waiting")
    assert reasons(model, "next", list(range(41))) == {"new": 1}


@pytest.mark.parametrize("page_size", [32, 64, 128, 256])
def test_the_second_turn_computes_only_what_is_new(page_size):
    # Prompt 50, answer 21 of which the last was sampled and never fed: 70 rows. The next prompt has 80 tokens, 10 new.
    model = PoolModel(make_manager(page_size=page_size, num_pages=16))
    assert model.run("turn1", range(50), answer=range(100, 121)) == 0
    assert model.run("turn2", [*range(50), *range(100, 121), *range(9)]) == 70
    assert model.manager.stats.copied_rows == 0, "an open block that nobody else can see is taken over where it lies"


def test_the_turn_after_a_stop_string_goes_on_in_place():
    # 60 rows were computed, the stop string begins at row 55: the rows after it are written again.
    model = PoolModel(make_manager())
    model.open("turn1", range(60))
    model.manager.view.admit("turn1", 60)
    model.step("turn1", 60)
    model.close("turn1", 55)
    model.check()
    assert model.run("turn2", [*range(55), 7, 7, 7]) == 55
    assert model.manager.stats.copied_rows == 0


def test_two_requests_of_a_session_do_not_take_over_the_same_open_block():
    model = PoolModel(make_manager())
    model.run("turn1", range(50))
    for request_id, last in (("left", 7), ("right", 8)):
        model.open(request_id, [*range(50), last, last])
    assert model.manager.view.admit("left", 2) == 50
    assert (
        model.manager.view.admit("right", 20) == 32
    )  # rows 32..49 are being written in the background; no other request can have them
    model.step("left", 2)
    model.step("right", 20)
    model.check()


def test_a_prompt_sent_again_leaves_the_open_block_to_others():
    model = PoolModel(make_manager())
    model.run("turn1", range(50))
    for request_id in ("again", "once more"):  # the last token is computed again, so 17 of 18 rows are used
        model.open(request_id, range(50))
        assert model.manager.view.admit(request_id, 1) == 49
        model.step(request_id, 1)
        model.check()
    assert model.manager.stats.copied_rows == 2 * 17


def test_a_regenerated_answer_copies_the_head_of_a_full_block():
    model = PoolModel(make_manager())
    model.run("turn1", range(100))
    assert model.run("again", [*range(45), *range(500, 520)]) == 45
    assert model.manager.stats.copied_rows == 13
    assert model.run("as before", range(101)) == 96  # the full blocks; the open one belonged to the end that was left


def test_a_whole_page_is_shared_not_copied():
    model = PoolModel(make_manager(num_pages=2, page_size=64))
    for request_id in ("a", "b"):
        model.open(request_id, [*range(64), ord(request_id)], session=request_id)
    assert model.manager.view.admit("a", 64) == 0
    model.step("a", 64)
    assert model.manager.view.admit("b", 1) == 64
    assert model.contexts["b"].rows.pages[0] == model.contexts["a"].rows.pages[0]
    assert model.manager.tiers.pages.num_pinned == 2
    model.check()


@pytest.mark.parametrize("stranger", [("other", ""), ("", "salt")])
def test_tenants_and_salts_never_share(stranger):
    model = PoolModel(make_manager())
    model.run("mine", range(100))
    model.open("theirs", range(100), tenant=stranger[0], salt=stranger[1])
    assert model.manager.view.resident_tokens("theirs") == 0
    assert model.manager.view.admit("theirs", 100) == 0
    assert not model.manager.view.waits_for_sibling("theirs", is_due=True)
    assert model.manager.requests.report("theirs").miss_reasons == {"new": 100}


@pytest.mark.parametrize(("prompt", "why"), [
    (64, {"last_token": 1}), (50, {"last_token": 1}), (33, {"last_token": 1}), (65, {"new": 1}),
])  # fmt: skip
def test_a_prompt_that_another_session_asked_is_all_there_but_for_its_last_token(prompt, why):
    model = PoolModel(make_manager())
    model.run("theirs", range(64))
    assert reasons(model, "mine", list(range(prompt)), session="t") == why


def test_sessions_of_a_tenant_share_full_blocks_but_not_the_open_one():
    model = PoolModel(make_manager())
    model.run("mine", range(60))
    model.open("yours", range(60), session="t")
    assert model.manager.view.resident_tokens("yours") == 32


def test_recompute_mode_finds_nothing_and_keeps_nothing():
    model = PoolModel(make_manager(reuse=False))
    assert reasons(model, "first", list(range(50))) == {"new": 50}
    assert model.manager.tiers.pages.num_free == 16
    assert reasons(model, "second", list(range(60))) == {"disabled": 50, "new": 10}


def test_what_had_expired_is_said():
    model = PoolModel(make_manager(ttl_s=10.0, max_sessions=2))
    assert reasons(model, "first", list(range(70))) == {"new": 70}
    assert model.manager.sessions.sweep(10.0) == 1
    assert reasons(model, "again", list(range(80))) == {"expired": 64, "new": 16}
    assert reasons(model, "and again", list(range(80))) == {"last_token": 1}
    assert model.manager.sessions.sweep(10.0) == 1
    assert reasons(model, "other", [7] * 80) == {"new": 80}, "this is not what had expired"
    assert model.manager.sessions.deletions.delete("", "s", "waiter") is None
    assert reasons(model, "deleted", list(range(80))) == {"new": 80}, "nothing is known of what was deleted"


def test_of_what_has_expired_no_more_is_known_than_of_sessions():
    model = PoolModel(make_manager(ttl_s=10.0, max_sessions=3))
    for number in range(9):
        reasons(model, f"r{number}", [number] * 40, session=f"s{number}")
        model.manager.sessions.sweep(10.0)
    assert [reasons(model, f"again {number}", [number] * 40, session=f"s{number}") for number in (5, 6)] == [
        {"new": 40}, {"expired": 32, "new": 8},
    ]  # fmt: skip


def test_copies_of_a_prompt_wait_for_the_first_to_compute_it():
    model = PoolModel(make_manager())
    for request_id in ("r/0", "r/1"):
        model.open(request_id, range(70))
    assert not model.manager.view.waits_for_sibling("r/1", is_due=True), "nobody computes it yet"
    model.manager.view.admit("r/0", 40)
    assert model.manager.view.waits_for_sibling("r/1", is_due=True)
    assert not model.manager.view.waits_for_sibling("r/0", is_due=True)
    model.step("r/0", 40)
    assert model.manager.view.waits_for_sibling("r/1", is_due=True), "the second block is still to come"
    assert model.manager.view.grow("r/0", 30)
    model.step("r/0", 30)
    assert not model.manager.view.waits_for_sibling("r/1", is_due=True), "the rest is no full block"
    assert model.manager.view.admit("r/1", 6) == 64


def test_of_two_that_compute_the_same_the_first_is_waited_for():
    model = PoolModel(make_manager())
    for request_id in ("r/0", "r/1", "r/2"):
        model.open(request_id, range(40))
    for request_id in ("r/0", "r/1"):
        assert model.manager.view.admit(request_id, 40) == 0
    assert model.manager.view.waits_for_sibling("r/2", is_due=True)
    model.step("r/0", 40)
    assert not model.manager.view.waits_for_sibling("r/2", is_due=True)
    model.step("r/1", 40)
    model.check()


@pytest.mark.parametrize("ending", ["close", "preempt"])
def test_nobody_waits_for_a_sibling_that_is_gone(ending):
    model = PoolModel(make_manager())
    for request_id in ("r/0", "r/1"):
        model.open(request_id, range(70))
    model.manager.view.admit("r/0", 70)
    assert model.manager.view.waits_for_sibling("r/1", is_due=True)
    if ending == "close":
        model.close("r/0", 0)
    else:
        model.manager.view.preempt("r/0")
    assert not model.manager.view.waits_for_sibling("r/1", is_due=True)


def test_a_preempted_request_resumes_where_it_stopped_while_there_is_space():
    model = PoolModel(make_manager())
    model.open("r", range(50))
    model.manager.view.admit("r", 50)
    model.step("r", 50)
    model.contexts["r"].token_ids.append(7)
    model.manager.view.preempt("r")
    assert model.manager.num_leases == 0
    assert model.manager.view.admit("r", 1) == 50
    assert model.manager.stats.copied_rows == 0


def test_residency_of_a_waiting_and_of_a_running_request():
    model = PoolModel(make_manager())
    model.run("turn1", range(50))
    model.open("turn2", range(60))
    residency = model.manager.view.residency("turn2")
    assert (residency.hbm_tokens, residency.missing_tokens, residency.bytes_to_load) == (50, 10, 0)
    assert residency.lower_tokens == {}
    model.manager.view.admit("turn2", 10)
    model.step("turn2", 4)
    assert model.manager.view.residency("turn2").hbm_tokens == 54


def test_what_another_session_has_left_is_not_a_request_s_own():
    model = PoolModel(make_manager())
    model.run("turn1", range(50), session="mine")
    model.open("turn2", range(60), session="mine")
    model.open("other", [*range(20), 7, 7, 7], session="other")
    found = {name: model.manager.view.residency(name) for name in ("turn2", "other")}
    assert {name: (r.hbm_tokens, r.own_tokens) for name, r in found.items()} == {"turn2": (50, 50), "other": (20, 0)}


def one_turn(model: PoolModel, session: str, tokens: Iterable[int], now: float) -> None:
    model.open("r", tokens, session=session)
    missing = len(model.contexts["r"].token_ids) - model.manager.view.resident_tokens("r")
    model.manager.view.admit("r", missing)
    model.step("r", missing)
    model.close("r", now=now)


def test_what_has_expired_is_found_no_more_but_for_what_others_have():
    model = PoolModel(make_manager(ttl_s=100.0))
    one_turn(model, "long", [*range(64), *[7] * 70], 0.0)
    one_turn(model, "short", [*range(64), *[8] * 70], 1.0)
    model.manager.sessions.configure(("", "", "short"), pinned=None, ttl_s=5.0)
    assert model.manager.sessions.sweep(5.9) == 0
    assert model.manager.sessions.sweep(6.0) == 1, "an older session with more time does not stand before it"
    for session, tail, hit in (("new", 8, 64), ("new", 7, 134)):
        model.open("again", [*range(64), *[tail] * 70, 9], session=session)
        assert model.manager.view.residency("again").hbm_tokens == hit // 32 * 32
        model.close("again", 0)
    model.check()


def test_many_that_expire_together_go_a_batch_at_a_time():
    model = PoolModel(make_manager(ttl_s=100.0, max_sessions=1000))
    for number in range(250):
        one_turn(model, f"s{number}", [number, 1, 2], float(number) / 1000)
        if number >= 200:
            model.manager.sessions.configure(("", "", f"s{number}"), pinned=None, ttl_s=50.0)
    model.open("r", [0, 1, 2, 3], session="s0")
    assert [model.manager.sessions.sweep(now) for now in (49.0, 60.0, 60.0, 200.0, 200.0, 200.0)] == [
        0,
        50,
        0,
        100,
        99,
        0,
    ]
    model.close("r", 0, now=200.0)
    assert model.manager.sessions.sweep(201.0) == 1
    model.check()


def test_what_runs_does_not_expire():
    model = PoolModel(make_manager(ttl_s=10.0))
    one_turn(model, "a", range(64), 0.0)
    model.open("r", range(90), session="a")
    assert model.manager.sessions.sweep(50.0) == 0
    model.close("r", 0, now=50.0)
    assert model.manager.sessions.sweep(51.0) == 1
    model.check()


def test_sessions_are_forgotten_after_their_time_and_beyond_their_number():
    model = PoolModel(make_manager(ttl_s=10.0, max_sessions=2))
    for now, session in ((0.0, "a"), (1.0, "b"), (5.0, "a"), (6.0, "c")):
        model.open("r", range(40), session=session)
        model.manager.view.admit("r", 40 - model.manager.view.resident_tokens("r"))
        model.step("r", 40 - model.contexts["r"].rows.computed)
        model.close("r", now=now)
    assert len(model.manager.sessions.contexts) == 2  # "b" was used longest ago
    assert model.manager.sessions.sweep(14.9) == 0
    assert model.manager.sessions.sweep(15.0) == 1
    assert model.manager.sessions.sweep(16.0) == 1
    assert all(not row.is_open for row in model.manager.tiers.table), "nobody can ask for their open blocks any more"
    model.check()


def test_a_page_that_is_no_multiple_of_the_block_is_refused():
    with pytest.raises(ValueError, match="page size 48"):
        make_manager(page_size=48)


def test_a_thousand_copies_of_a_long_prompt_do_not_walk_it_in_every_step(monkeypatch):
    model = PoolModel(make_manager(num_pages=12))
    for request_id in ("r/0", "r/1"):
        model.open(request_id, range(320))
    model.manager.view.admit("r/0", 320)
    model.step("r/0", 160)
    walks = []
    walk = model.manager.tiers.table.get
    monkeypatch.setattr(model.manager.tiers.table, "get", lambda key: walks.append(key) or walk(key))
    assert all(model.manager.view.waits_for_sibling("r/1", is_due=True) for _ in range(100))
    assert len(walks) <= 2 * 10, "once, block by block"
    model.step("r/0", 32)
    assert model.manager.view.waits_for_sibling("r/1", is_due=True)
    model.step("r/0", 128)
    assert not model.manager.view.waits_for_sibling("r/1", is_due=True)


def test_who_shares_what_is_not_trusted_does_not_publish_it_again():
    model = PoolModel(make_manager())
    model.run("before", range(64))
    for request_id, last in (("bad", 7), ("other", 8)):
        model.open(request_id, [*range(64), *[last] * 10], session=request_id)
        assert model.manager.view.admit(request_id, 10) == 64
        model.step(request_id, 10)
    model.manager.requests.distrust("bad")
    model.close("bad", 0)
    model.check()
    model.contexts["other"].token_ids.extend([8] * 40)
    assert model.manager.view.grow("other", 40)
    model.step("other", 40)
    model.manager.view.preempt("other")
    model.check()
    assert len(model.manager.tiers.table) == 0
    assert model.manager.view.admit("other", 114) == 0
    model.step("other", 114)
    model.close("other")
    assert model.run("after", range(65)) == 64, "computed anew, it is trusted again"
