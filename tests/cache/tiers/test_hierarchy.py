"""Tests the cache manager with tiers below HBM, in a model where transfers run, and fail, at any time."""

import random

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
from reprise.cache.blocks.truncate import CutRules, DoesNotFit
from reprise.cache.moves import EncodeBlocks, FetchBlocks, FillFromPage, FillFromSlot, LoadBlocks, WriteExtent
from reprise.cache.policies import POLICIES
from reprise.cache.policies.keep import BLOCK_SCORERS
from reprise.cache.requests.opening import ClientCut
from tests.cache.pool_model import PoolModel, make_manager
from tests.example_counts import examples

TENANTS = [("", ""), ("", ""), ("", "salt"), ("other", "")]
WHICH = st.integers(0, 5)  # chooses among those that qualify, counted in circles
SLOT_BYTES = BLOCK_TOKENS * 4
WORDS = range(42), [18, 18, *[0.1] * 40]  # tokens and how often they come: rare ones are what a text is about


class Hierarchy(RuleBasedStateMachine):
    """Requests of a few sessions in a memory that is too small for them; saves, loads and disk run later, each in its
    own order and at its own pace; contexts outgrow the window."""

    page_size = 32

    @initialize(
        contiguous=st.booleans(),
        policy=st.sampled_from(sorted(POLICIES)),
        num_pages=st.integers(4, 14),
        dram_slots=st.integers(0, 12),
        staging_slots=st.integers(1, 10),
        disk=st.sampled_from([0, 0, 10, 40, 400]),
        window_pages=st.integers(2, 12),
        mode=st.sampled_from(["decoupled", "decoupled", "recompute"]),
        ratio=st.sampled_from([0.1, 0.5, 0.9]),
        scorer=st.sampled_from(["oldest", *BLOCK_SCORERS]),
        recall=st.booleans(),
        fast=st.sampled_from([True, True, False]),
        failing=st.sampled_from([0.0, 0.0, 0.3]),
        exact=st.booleans(),
        coded=st.sampled_from([None, None, 0, 4, 20]),
        seed=st.integers(0, 2**16),
    )
    def start(
        self,
        contiguous,
        policy,
        num_pages,
        dram_slots,
        staging_slots,
        disk,
        window_pages,
        mode,
        ratio,
        scorer,
        recall,
        fast,
        failing,
        exact,
        coded,
        seed,
    ):
        spare = self.page_size // BLOCK_TOKENS
        self.window = min(window_pages, max(1, num_pages - spare)) * self.page_size
        if window_pages < 2:
            self.window = 2 * self.page_size
        self.options = {
            "num_pages": num_pages,
            "page_size": self.page_size,
            "contiguous": contiguous,
            "policy": policy,
            "ttl_s": 200.0,
            "max_sessions": 6,
            "window": self.window,
            "truncation_mode": mode,
            "ratio": ratio,
            "block_scorer": scorer,
            "recall": recall,
            "dram_slots": dram_slots,
            "staging_slots": staging_slots,
            "disk_bytes": disk * SLOT_BYTES,
            "bytes_per_s": 1e12 if fast else 3e5,
            "exact": exact and coded is None,
            "coded_slots": coded,
        }
        self.manager = make_manager(**self.options)
        self.model = PoolModel(self.manager)
        self.rng = random.Random(seed)
        self.failing = failing
        self.model.fails = self.fails
        self.now = 0.0
        self.opened = 0
        self.reported = set()
        self.deletions = 0
        self.texts = {name: [[1]] for name in "abc"}

    def fails(self, order):
        if self.rng.random() >= self.failing:
            return None
        if isinstance(order, WriteExtent | EncodeBlocks):
            return "no space"
        assert isinstance(order, LoadBlocks | FetchBlocks)
        return self.rng.choice(["checksum", "deadline", "io"])

    # --- what may happen ----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.model.contexts) < 6)
    @rule(
        base=st.integers(0, 9),
        kept=st.one_of(st.just(1.0), st.just(1.0), st.floats(0, 1)),
        voice=st.integers(0, 2),
        length=st.integers(1, 150),
        session=st.sampled_from("abc"),
        tenant=st.sampled_from(TENANTS),
        keep_first=st.sampled_from([0, 0, 20, 40]),
        cuts=st.sampled_from([True, True, False]),
        marked=st.booleans(),
    )
    def open(self, base, kept, voice, length, session, tenant, keep_first, cuts, marked):
        """An earlier text or the head of one, and a piece of one of three streams of few common words."""
        texts = self.texts[session]
        before = texts[-1 - base % len(texts)]
        before = before[: int(len(before) * kept)]
        tokens = before + random.Random(voice).choices(*WORDS, k=length)
        rules = CutRules(
            allowed=cuts,
            keep_first=min(keep_first, len(tokens)),
            message_starts=tuple(sorted({0, len(before) // 2, len(before)})),
            important=((40, 70),) if marked else (),
        )
        self.opened += 1
        request_id = f"r{self.opened}"
        context = self.attempt_open(request_id, tokens, session, tenant, rules)
        if context is not None:
            assert len(context) < self.window
            assert cuts or context == tokens
            self.texts[session] = [*texts[-9:], tokens]

    @precondition(lambda self: len(self.model.contexts) < 6)
    @rule(
        voice=st.integers(0, 2),
        length=st.integers(1, 60),
        session=st.sampled_from("abc"),
        tenant=st.sampled_from(TENANTS),
        keep=st.sampled_from([0, 1, 40]),
        dropped=st.floats(0, 1),
    )
    def shorten(self, voice, length, session, tenant, keep, dropped):
        """The last text of a session without some of its beginning, which the client dropped."""
        stream = self.texts[session][-1] + random.Random(voice).choices(*WORDS, k=length)
        keep = min(keep, len(stream) - 1)
        resume = keep + max(1, int((len(stream) - keep - 1) * dropped))
        if resume >= len(stream):
            return
        rules = CutRules(allowed=True, keep_first=keep, message_starts=(0, keep), important=())
        self.opened += 1
        cut = ClientCut(stream, keep, resume)
        context = self.attempt_open(f"r{self.opened}", stream[:keep] + stream[resume:], session, tenant, rules, cut)
        if context is not None:
            self.texts[session] = [*self.texts[session][-9:], stream]

    def attempt_open(self, request_id, tokens, session, tenant, rules, client_cut=None):
        try:
            return self.model.open(
                request_id,
                tokens,
                session=session,
                tenant=tenant[0],
                salt=tenant[1],
                rules=rules,
                client_cut=client_cut,
                now=self.now,
            )
        except DoesNotFit:
            assert len(tokens) >= self.window or rules.allowed
            assert request_id not in self.manager._running
            return None

    @precondition(lambda self: self.waiting)
    @rule(which=WHICH, chunk=st.integers(1, 300))
    def admit(self, which, chunk):
        request_id = self.chosen(self.waiting, which)
        context = self.model.contexts[request_id]
        resident = self.manager.view.resident_tokens(request_id)
        residency = self.manager.view.residency(request_id)
        assert residency.hbm_tokens + sum(residency.lower_tokens.values()) == resident
        alone = not self.running and not self.manager.num_leases
        cached = self.manager.view.admit(request_id, min(len(context.token_ids) - resident, chunk))
        if cached is None:
            assert not context.rows.pages
            assert not alone, "a request that fits into HBM waits for ever"
            return
        assert 0 <= cached <= resident < len(context.token_ids)
        if request_id not in self.reported:
            self.reported.add(request_id)
            report = self.manager.requests.report(request_id)
            assert report.cached_tokens == cached
            assert report.prompt_tokens == context.prompt_tokens
            assert sum(report.miss_reasons.values()) == report.computed_tokens
            assert all(tokens > 0 for tokens in report.miss_reasons.values())
            assert cached <= report.history_tokens <= report.prompt_tokens

    @precondition(lambda self: self.running)
    @rule(which=WHICH, chunk=st.integers(1, 300), times=st.sampled_from([1, 1, 40]))
    def compute(self, which, chunk, times):
        """A chunk of a prompt; steps that decode, once all is computed."""
        request_id = self.chosen(self.running, which)
        context = self.model.contexts[request_id]
        for _ in range(times):
            if context.rows.computed == len(context.token_ids):
                context.token_ids.append(self.opened % 2)
            if len(context.token_ids) >= self.window:
                self.overflow(request_id)
                return
            num_tokens = min(chunk, len(context.token_ids) - context.rows.computed)
            if not self.manager.view.grow(request_id, num_tokens):
                assert self.manager.num_leases > len(context.rows.pages), "a request that fits into HBM cannot go on"
                return
            if not self.model.step(request_id, num_tokens):
                return
            seen = [self.rng.random() for _ in range(-(-context.rows.computed // BLOCK_TOKENS))]
            self.manager.requests.attended(request_id, [share / sum(seen) for share in seen])

    def overflow(self, request_id):
        """Cut as the engine does when a sampled token fills the window."""
        context = self.model.contexts[request_id]
        before = list(context.token_ids)
        if not context.cuts.rules.allowed:
            return self.model.close(request_id, now=self.now)
        try:
            dropped = self.manager.requests.truncate(request_id)
        except DoesNotFit:
            assert context.token_ids == before
            return self.model.close(request_id, now=self.now)
        assert dropped > 0
        assert len(context.token_ids) == len(before) - dropped
        assert context.token_ids[-1] == before[-1]
        return None

    @precondition(lambda self: self.running)
    @rule(which=WHICH)
    def preempt(self, which):
        self.manager.view.preempt(self.chosen(self.running, which))

    @precondition(lambda self: self.model.contexts)
    @rule(which=WHICH, kept=st.one_of(st.just(1.0), st.floats(0, 1)))
    def close(self, which, kept):
        """All of it, or what stands before a stop string; waiting, or in the middle of its prompt."""
        request_id = self.chosen(list(self.model.contexts), which)
        context = self.model.contexts[request_id]
        self.remember(context)
        prompt = min(context.prompt_tokens, len(context.token_ids))
        self.model.close(request_id, prompt + int((len(context.token_ids) - prompt) * kept), self.now)

    def remember(self, context):
        """The conversation as its client has it: what was cut is still there."""
        generated = len(context.token_ids) + sum(b - a for a, b in context.cuts.ranges) - len(context.cuts.stream)
        full = context.cuts.stream + (context.token_ids[-generated:] if generated > 0 else [])
        texts = self.texts[context.session_id]
        self.texts[context.session_id] = [*texts[-9:], full]

    @precondition(lambda self: self.running)
    @rule(which=WHICH)
    def distrust(self, which):
        request_id = self.chosen(self.running, which)
        chain = list(self.model.contexts[request_id].chain())
        self.manager.requests.distrust(request_id)
        self.model.close(request_id, 0, self.now)
        assert not any(key in self.manager.tiers.table for key in chain)

    @rule(queue=st.sampled_from(["saves", "loads", "io", "encodes"]), count=st.integers(1, 9), heard=st.booleans())
    def transfer(self, queue, count, heard):
        self.model.move()
        run = {
            "saves": self.model.run_save,
            "loads": self.model.run_load,
            "io": self.model.run_io,
            "encodes": self.model.run_encode,
        }[queue]
        for _ in range(min(count, len(getattr(self.model, queue)))):
            run()
        if heard:
            self.poll()

    @rule()
    def poll(self):
        """Let the tiers go on as between two steps."""
        self.model.hear(self.now)
        self.model.void_failed()
        self.model.plan(self.waiting, self.now)

    @rule(seconds=st.sampled_from([1.0, 5.0, 10.0, 300.0]))
    def sweep(self, seconds):
        self.now += seconds
        before = len(self.manager.sessions.contexts)
        assert self.manager.sessions.sweep(self.now) == before - len(self.manager.sessions.contexts)

    @precondition(lambda self: self.manager.sessions.contexts)
    @rule(which=WHICH, pinned=st.sampled_from([None, True, False]), ttl_s=st.sampled_from([None, 2.0, 500.0]))
    def configure(self, which, pinned, ttl_s):
        self.manager.sessions.configure(
            self.chosen(list(self.manager.sessions.contexts), which), pinned=pinned, ttl_s=ttl_s
        )

    @precondition(lambda self: self.manager.sessions.contexts)
    @rule(which=WHICH)
    def prefetch(self, which):
        self.manager.sessions.prefetch(self.chosen(list(self.manager.sessions.contexts), which), self.now)

    @precondition(lambda self: self.manager.sessions.contexts)
    @rule(which=WHICH)
    def delete(self, which):
        name = self.chosen(list(self.manager.sessions.contexts), which)
        deleting = self.manager.sessions.deletions._deleting
        # Sessions of one id are deleted together, whatever their salts.
        running = any(c.session[::2] == name[::2] for c in self.manager._running.values())
        if any(other[::2] == name[::2] for other in deleting):
            return
        self.deletions += 1
        problem = self.manager.sessions.deletions.delete(name[0], name[2], f"d{self.deletions}")
        assert problem == ("busy" if running else None)
        if running:
            self.deletions -= 1

    # --- helpers and invariants ---------------------------------------------------------------------------------------

    @property
    def waiting(self):
        return [name for name, context in self.model.contexts.items() if not context.rows.pages]

    @property
    def running(self):
        return [name for name, context in self.model.contexts.items() if context.rows.pages]

    @staticmethod
    def chosen(names, which):
        return names[which % len(names)]

    @invariant()
    def promises_are_kept(self):
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self):
        """Everybody leaves, everything ends: no lease, no copy, no slot and no byte is left over."""
        if not hasattr(self, "model"):
            return
        manager, model = self.manager, self.model
        for request_id in list(model.contexts):
            model.close(request_id, now=self.now)
            model.check()
        self.failing = 0.0
        for _ in range(3):
            self.now += 10.0
            model.settle(self.now)
        assert manager.num_leases == manager.in_flight == 0
        assert manager._siblings.coming == {}
        assert sorted(model.deleted, key=lambda name: int(name[1:])) == [f"d{i + 1}" for i in range(self.deletions)]
        assert manager.tiers.pages.num_free + manager.tiers.pages.num_cached == manager.tiers.pages.num_pages
        if not manager.tiers.disk.capacity_bytes:
            assert not manager.tiers.writes._dirty.sessions
        pinned = [row for row in manager.tiers.table if manager.tiers.pinned.own(row)]
        if not pinned:
            assert manager.tiers.dram.rows.resident <= manager.tiers.dram.most_rows
        self.restart()
        for name in list(manager.sessions.contexts):
            manager.sessions.deletions.delete(name[0], name[2], "end")
            model.settle(self.now)
        assert all(not row.owners for row in manager.tiers.table), "somebody who is gone owns something"
        model.check()
        assert not any(row.copies.get("disk") for row in manager.tiers.table)
        assert not model.disk
        assert not any(record.context for record in model.records.values())

    def restart(self):
        """A new process finds on disk what the old one had there."""
        if not self.manager.tiers.disk.capacity_bytes:
            return
        self.manager.sessions.sweep(self.now)
        self.model.settle(self.now)
        manager = make_manager(**self.options)
        manager.sessions.restore(self.model.extents.values(), self.model.records.values(), self.now)
        for name, session in manager.sessions.contexts.items():
            before = self.manager.sessions.contexts[name]
            assert (session.keys, session.open_key, session.cuts) == (before.keys, before.open_key, before.cuts)
            assert (session.pinned, session.ttl_s) == (before.pinned, before.ttl_s)
        assert set(manager.sessions.contexts) == set(self.manager.sessions.contexts)
        stored = {row.key for row in self.manager.tiers.table if "disk" in row.copies}
        assert stored <= {row.key for row in manager.tiers.table}
        assert manager.tiers.disk.used_bytes == sum(extent.size_bytes for extent in self.model.extents.values())


@pytest.mark.parametrize("page_size", [32, 64])
def test_whatever_happens_in_whatever_order(page_size):
    machine = type(f"Pages{page_size}", (Hierarchy,), {"page_size": page_size})
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(120), stateful_step_count=50))


def test_where_bits_count_no_row_is_saved_out_of_a_page():
    """Its keys are rotated there: they would be rounded once more. The state machine above sees to the rest."""
    for exact in (False, True):
        manager = make_manager(num_pages=8, staging_slots=3, disk_bytes=40 * SLOT_BYTES, exact=exact)
        model = PoolModel(manager)
        model.run("first", range(40), session="s")
        model.settle()  # on disk: its slots are others' again
        model.open("second", [*range(40), 500, 501], session="s")
        known = manager.view.resident_tokens("second")
        assert known == (32 if exact else 40)
        assert manager.view.admit("second", 42 - known) == known
        assert model.step("second", 42 - known)
        assert any(isinstance(order, FillFromPage) for order in model.saves) is not exact
        model.settle()


def test_an_open_block_is_copied_before_its_slot_is_another_blocks():
    """A turn goes on in the open block that lies in DRAM. Between the order to copy its rows and the copy, room is
    wanted for other blocks."""
    manager = make_manager(num_pages=8, dram_slots=3)
    model = PoolModel(manager)
    model.run("first", range(40), session="s")
    model.settle()
    model.open("second", [*range(40), 500, 501], session="s")
    assert manager.view.admit("second", 42 - manager.view.resident_tokens("second")) == 40
    assert model.step("second", 2)
    orders = [order for order in model.saves if isinstance(order, FillFromSlot)]
    assert [order.num_rows for order in orders] == [8]
    (order,) = orders
    assert manager.tiers.dram.rows._slots.is_pinned(order.source_slot)
    while (slot := manager.tiers.dram.rows.take_slot(None)) is not None:
        assert slot != order.source_slot
    while model.saves:
        model.run_save()
    assert model.slots[order.slot][:10] == model.pure(model.contexts["second"].domain, [*range(40), 500, 501])[32:]
