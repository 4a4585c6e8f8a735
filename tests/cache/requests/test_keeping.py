"""Tests what a scorer is told of a context, and what a cut then drops."""

import pytest

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.truncate import CutRules
from reprise.cache.policies.keep import BLOCK_SCORERS
from tests.cache.pool_model import PoolModel, make_manager

WINDOW = 16 * BLOCK_TOKENS
TEXT = [*range(1000, 1000 + WINDOW - BLOCK_TOKENS)]
MORE = [*range(5000, 5064)]


def overflow(scorer, *, seen=None):
    """A conversation that fills its window and then goes on; the blocks of it that were dropped."""
    world = PoolModel(make_manager(num_pages=64, dram_slots=64, window=WINDOW, block_scorer=scorer))
    world.run("first", TEXT)
    world.settle()
    if seen is not None:
        world.open("again", TEXT)
        world.manager.requests.attended("again", seen)
        world.manager.requests.attended("again", seen)
        world.manager.view.admit("again", 1)
        assert world.step("again", 1)
        world.close("again")
        world.settle()
    rules = CutRules(
        allowed=True, keep_first=BLOCK_TOKENS, message_starts=(0, 70, 320, len(TEXT)), important=((80, 90),)
    )
    context = list(world.open("longer", [*TEXT, *MORE], rules=rules))
    cuts = world.contexts["longer"].cuts.ranges
    pending = len(context) - world.manager.view.resident_tokens("longer")
    assert world.manager.view.admit("longer", pending) == len(context) - pending
    assert world.step("longer", pending)
    world.check()
    kept = set(context)
    assert kept.isdisjoint(token for a, b in cuts for token in [*TEXT, *MORE][a:b])
    assert pending <= len(MORE) + BLOCK_TOKENS, "whatever stays is not computed again"
    world.close("longer")
    world.settle()
    return [start // BLOCK_TOKENS for a, b in cuts for start in range(a, b, BLOCK_TOKENS)]


@pytest.mark.parametrize("scorer", BLOCK_SCORERS)
def test_a_cut_drops_half_the_window_and_nothing_that_has_to_stay(scorer):
    dropped = overflow(scorer, seen=[1 / 15] * 15)
    assert len(dropped) == 8
    assert not {0, 2, 15} & set(dropped), "the system prompt, what is marked, and the newest message"


def test_what_was_attended_to_stays():
    seen = [0.01] * 15
    seen[4] = seen[6] = 0.3
    dropped = overflow("attended", seen=[share / sum(seen) for share in seen])
    assert dropped == [1, 3, 5, 7, 8, 9, 10, 11], "the newest quarter stays too"
    assert dropped != overflow("oldest")


def test_where_nothing_was_seen_the_oldest_leaves():
    assert overflow("attended") == overflow("oldest")


def test_attention_is_a_mean_in_which_the_present_counts_half():
    world = PoolModel(make_manager(num_pages=8, dram_slots=8))
    world.open("r", range(64))
    for seen in ([0.5, 0.5], [1.0, 0.0]):
        world.manager.requests.attended("r", seen)
    context = world.contexts["r"]
    assert [context.cuts.attention[key] for key in context.chain()] == [1.5, 0.5]
    world.close("r", 0)
