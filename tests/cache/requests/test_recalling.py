"""Tests what a cut dropped and a new message brings back."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cache.blocks.context import MAX_DROPPED, SessionContext
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.truncate import CutRules, apply_cuts, blocks_of
from reprise.cache.moves import LoadBlocks
from reprise.cache.policies.keep import BLOCK_SCORERS
from reprise.cache.requests.opening import ClientCut
from tests.cache.pool_model import PoolModel, domain_of, make_manager
from tests.example_counts import examples

WINDOW = 16 * BLOCK_TOKENS
COMMON = range(5)


def make_world(**changes):
    return PoolModel(make_manager(**{"num_pages": 64, "dram_slots": 200, "window": WINDOW, "recall": True, **changes}))


def message(seed, *, length=2 * BLOCK_TOKENS, about=()):
    """Common words, and each of the words that it is about."""
    words = random.Random(seed).choices(COMMON, k=length - len(about))
    for word in about:
        words.insert(random.Random(word).randrange(len(words)), word)
    return words


class Chat:
    """A conversation and its turns."""

    def __init__(self, world, *, session="s", tenant="", keep_first=0):
        self.world, self.session, self.tenant, self.keep_first = world, session, tenant, keep_first
        self.text, self.starts, self.turns = [], [], 0
        self.important = ()
        self.context = None

    def open(self, said):
        """Open the turn of a message, which is the newest of the conversation."""
        self.starts.append(len(self.text))
        self.text += said
        self.turns += 1
        name = f"{self.tenant}/{self.session}/{self.turns}"
        rules = CutRules(True, self.keep_first, tuple(self.starts), self.important)
        self.world.open(name, self.text, session=self.session, tenant=self.tenant, rules=rules, reserve=8)
        self.context = self.world.contexts[name]
        return name

    def compute(self, name):
        """Compute what is missing; start anew whenever a load fails. Returns the tokens found at last."""
        while True:
            pending = len(self.context.token_ids) - self.world.manager.view.resident_tokens(name)
            cached = self.world.manager.view.admit(name, pending)
            assert cached is not None
            if self.world.step(name, len(self.context.token_ids) - cached):
                return cached

    def say(self, said, *, answer=()):
        """A whole turn. Returns its report, with the cached tokens among it."""
        name = self.open(said)
        self.compute(name)
        assert apply_cuts(self.text, self.context.cuts.ranges) == self.context.token_ids
        report = self.world.manager.requests.report(name)
        for token in answer:
            assert self.world.manager.view.grow(name, 1)
            self.context.token_ids.append(token)
            assert self.world.step(name, 1)
        self.starts.append(len(self.text))
        self.text += answer
        self.world.check()
        self.world.close(name)
        self.world.settle()
        return report

    def fill(self, count, *, first=100):
        for number in range(count):
            self.say(message(first + number, about=[first + number]))


def test_what_a_message_is_about_comes_back_and_nothing_is_computed_again():
    chat = Chat(make_world(), keep_first=BLOCK_TOKENS)
    chat.fill(8)
    assert chat.context.cuts.ranges
    report = chat.say(message(1, about=[101]))
    assert report.recalled_tokens == 4 * BLOCK_TOKENS, "a quarter of the window"
    assert 101 in chat.context.token_ids[:-64]
    assert report.computed_tokens <= 2 * BLOCK_TOKENS + 1, "the message and no more"
    assert chat.context.token_ids[:BLOCK_TOKENS] == chat.text[:BLOCK_TOKENS], "the system prompt stays"
    assert chat.world.manager.stats.recalled_tokens == report.recalled_tokens


def test_a_context_keeps_its_length_and_loses_what_is_wanted_least():
    chat = Chat(make_world())
    chat.fill(8)
    length, cuts = len(chat.context.token_ids), chat.context.cuts.ranges
    report = chat.say(message(1, about=[101]))
    assert len(chat.context.token_ids) == length + 2 * BLOCK_TOKENS
    assert report.truncated_tokens == sum(b - a for a, b in cuts)
    kept = [
        start
        for start in range(0, len(chat.text) - 64, 32)
        if not any(a <= start < b for a, b in chat.context.cuts.ranges)
    ]
    before = [start for start in range(0, len(chat.text) - 64, 32) if not any(a <= start < b for a, b in cuts)]
    assert set(kept) - set(before) == {64, 96, 128, 160}, "the block that has it, and those around it"
    assert set(before) - set(kept) == set(before[:4]), "the oldest of it"


def test_the_next_message_gives_back_what_the_last_one_had_recalled():
    chat = Chat(make_world())
    chat.fill(8)
    chat.say(message(1, about=[101]))
    first, cuts = set(chat.context.cuts.recalled), chat.context.cuts.ranges
    chat.say(message(2, about=[103]))
    assert 103 in chat.context.token_ids[:-64]
    assert not first & chat.context.cuts.recalled
    kept = {*range(len(chat.text) // BLOCK_TOKENS)} - {start // BLOCK_TOKENS for start in blocks_of(cuts)} - first
    assert not kept & {start // BLOCK_TOKENS for start in blocks_of(chat.context.cuts.ranges)}, "nothing else has left"


@pytest.mark.parametrize("about", [(), (999,), (106,)])
def test_a_message_about_nothing_that_was_dropped_changes_nothing(about):
    """106 is in the context."""
    chat, plain = Chat(make_world()), Chat(make_world(recall=False))
    for each in (chat, plain):
        each.fill(8)
    assert chat.say(message(1, about=about)) == plain.say(message(1, about=about))
    assert chat.context.cuts.ranges == plain.context.cuts.ranges
    assert chat.context.chain() == plain.context.chain()


def test_off_nothing_is_noted():
    chat = Chat(make_world(recall=False))
    chat.fill(8)
    (session,) = chat.world.manager.sessions.contexts.values()
    assert (session.dropped, session.recalled) == ({}, set())
    assert chat.say(message(1, about=[101])).recalled_tokens == 0


def test_what_is_marked_and_what_the_message_is_about_too_does_not_leave():
    chat = Chat(make_world())
    chat.fill(8)
    left = next(start for start in range(0, len(chat.text), 32) if start >= chat.context.cuts.ranges[-1][1])
    chat.important = ((left, left + 10),)
    marked = chat.text[left : left + BLOCK_TOKENS]
    chat.say(message(1, about=[101]))
    assert chat.context.cuts.recalled_tokens
    place = left - sum(b - a for a, b in chat.context.cuts.ranges if b <= left)
    assert chat.context.token_ids[place : place + BLOCK_TOKENS] == marked


def test_another_tenant_has_nothing_to_recall():
    world = make_world()
    ours, theirs = Chat(world), Chat(world, tenant="other")
    ours.fill(8)
    theirs.fill(8, first=300)
    assert theirs.say(message(1, about=[101])).recalled_tokens == 0
    assert theirs.say(message(2, about=[301])).recalled_tokens > 0


def test_a_block_that_is_nowhere_stays_out():
    chat = Chat(make_world())
    chat.fill(8)
    (session,) = chat.world.manager.sessions.contexts.values()
    for place, key in session.dropped.items():
        if 101 in chat.text[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS]:
            chat.world.manager.tiers.forget(key)
    assert chat.say(message(1, about=[101])).recalled_tokens == 0


@pytest.mark.parametrize("reason", ["checksum", "io", "deadline"])
def test_what_cannot_be_read_leaves_the_context_again(reason):
    world = make_world(num_pages=24, dram_slots=0, staging_slots=24, disk_bytes=1 << 20)
    chat = Chat(world)
    chat.fill(8)
    length = len(chat.context.token_ids)
    (session,) = world.manager.sessions.contexts.values()
    recalled = {key for place, key in session.dropped.items() if place in (2, 3)}
    failing = iter([True])

    def fails(order):
        is_first = isinstance(order, LoadBlocks) and order.blocks[0].key in recalled and next(failing, False)
        return reason if is_first else None

    world.fails = fails
    other = Chat(world, session="t")
    other.fill(6, first=500)  # takes the pages
    report = chat.say(message(1, about=[101]))
    assert next(failing, False) is False, "the load has failed"
    assert report.recalled_tokens == 3 * BLOCK_TOKENS
    assert len(chat.context.token_ids) == length + BLOCK_TOKENS
    assert report.truncated_tokens == sum(b - a for a, b in chat.context.cuts.ranges)
    assert report.computed_tokens <= 3 * BLOCK_TOKENS, "nothing that was kept"


def test_what_the_client_dropped_itself_stays_out():
    chat = Chat(make_world(window=1 << 20))
    chat.fill(12)
    stream, said = list(chat.text), message(1, about=[101])
    cut = ClientCut(stream + said, 0, 256)
    rules = CutRules(True, 0, tuple(start - 256 for start in chat.starts if start >= 256), ())
    chat.world.open("shifted", (stream + said)[256:], session="s", rules=rules, reserve=8, client_cut=cut)
    context = chat.world.contexts["shifted"]
    assert context.cuts.by_client == context.cuts.ranges == [(0, 256)]
    assert context.cuts.recalled_tokens == 0
    chat.world.close("shifted", 0)


def test_what_was_dropped_outlives_the_process():
    chat = Chat(make_world())
    chat.fill(8)
    chat.say(message(1, about=[101]))
    (session,) = chat.world.manager.sessions.contexts.values()
    assert session.dropped
    read = SessionContext.unpack(session.pack(), domain_of("", ""), 0.0)
    assert (read.dropped, read.recalled) == (session.dropped, session.recalled)
    assert list(read.dropped) == sorted(read.dropped)
    session.dropped = {}
    read = SessionContext.unpack(session.pack(), domain_of("", ""), 0.0)
    assert (read.dropped, read.recalled) == ({}, set())
    session.dropped = dict.fromkeys(range(2 * MAX_DROPPED), session.keys[0])
    assert list(SessionContext.unpack(session.pack(), domain_of("", ""), 0.0).dropped) == [*range(2048, 4096)]


def chatter(seed, *, scorer, window, dram, disk, failing, coded):
    """Several conversations about a few things in too little memory; the model of the pool checks every row. Returns
    the tokens recalled."""
    rng = random.Random(seed)
    world = make_world(
        num_pages=2 * window, window=window * BLOCK_TOKENS, dram_slots=dram, staging_slots=6, disk_bytes=disk * 128,
        block_scorer=scorer, coded_slots=coded,
    )  # fmt: skip
    world.fails = lambda order: "checksum" if isinstance(order, LoadBlocks) and rng.random() < failing else None
    chats = [Chat(world, session=name, tenant=name[:1], keep_first=rng.choice([0, 40])) for name in ("a", "b")]
    for turn in range(40):
        chat = rng.choice(chats)
        said = message(turn, length=rng.randrange(20, 70), about=rng.sample(range(100, 130), rng.randrange(3)))
        chat.say(said, answer=rng.choices(COMMON, k=rng.randrange(9)))
        is_sound(chat.context)
    return world.manager.stats.recalled_tokens


def is_sound(context):
    assert all(a % BLOCK_TOKENS == b % BLOCK_TOKENS == 0 for a, b in context.cuts.ranges)
    assert all(before[1] < after[0] for before, after in pairwise(context.cuts.ranges))
    assert apply_cuts(context.conversation, context.cuts.ranges) == context.token_ids
    assert not any(a <= place * BLOCK_TOKENS < b for place in context.cuts.recalled for a, b in context.cuts.ranges)
    assert set(context.cuts.dropped) <= {start // BLOCK_TOKENS for start in blocks_of(context.cuts.ranges)}


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**16),
    scorer=st.sampled_from(list(BLOCK_SCORERS)),
    window=st.sampled_from([6, 9, 16]),
    dram=st.sampled_from([4, 12, 80]),
    disk=st.sampled_from([0, 20, 400]),
    failing=st.sampled_from([0.0, 0.2]),
    coded=st.sampled_from([None, None, 20]),
)
def test_whatever_is_recalled_is_what_it_was(seed, **world):
    chatter(seed, **world)


def test_conversations_do_recall_something():
    """Else the test above proves nothing."""
    for scorer in BLOCK_SCORERS:
        assert chatter(1, scorer=scorer, window=9, dram=12, disk=400, failing=0.2, coded=None) > 0
