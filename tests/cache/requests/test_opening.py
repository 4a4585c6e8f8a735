"""Tests histories that the client has shortened itself."""

from reprise.cache.blocks.truncate import CutRules
from reprise.cache.requests.opening import ClientCut
from tests.cache.pool_model import PoolModel, make_manager

TEXT = [*range(1000, 1400)]


def make_world(window=10_000):
    world = PoolModel(make_manager(num_pages=64, dram_slots=64, window=window))
    world.run("first", TEXT)
    world.settle()
    return world


def turn(world, request_id, stream, *, cut=None, reserve=1):
    """A whole turn; (its context as it began, tokens found, its report)."""
    sent = stream if cut is None else stream[: cut[0]] + stream[cut[1] :]
    client_cut = None if cut is None else ClientCut(stream, *cut)
    rules = CutRules(allowed=True, keep_first=0, message_starts=tuple(range(0, len(sent), 10)), important=())
    context = list(world.open(request_id, sent, rules=rules, reserve=reserve, client_cut=client_cut))
    pending = len(context) - world.manager.view.resident_tokens(request_id)
    cached = world.manager.view.admit(request_id, pending)
    report = world.manager.requests.report(request_id)
    assert world.step(request_id, pending)
    world.check()
    world.close(request_id)
    world.settle()
    return context, cached, report


def test_what_the_client_drops_stays_cut_as_long_as_it_drops_it():
    world = make_world()
    text = [*TEXT, 1, 2]
    context, cached, report = turn(world, "shorter", text, cut=(0, 128))
    assert (context, report.truncated_tokens) == (text[128:], 128)
    assert cached == 272, "the open block of sixteen moves with the rest"
    text += [3, 4]
    context, cached, report = turn(world, "again", text, cut=(0, 128))
    assert (context, report.truncated_tokens) == (text[128:], 128)
    assert cached == 274, "all that was computed, the open block with it"


def test_all_that_the_client_kept_before_its_cut_stays_with_the_rest_of_its_last_block():
    world = make_world()
    text = [*TEXT, 1, 2]
    context, _, report = turn(world, "shorter", text, cut=(100, 256))
    assert (context, report.truncated_tokens) == (text[:128] + text[256:], 128)


def test_a_clients_cut_ends_when_it_sends_what_it_had_cut():
    world = make_world()
    text = [*TEXT, 1, 2]
    turn(world, "shorter", text, cut=(0, 128))
    text += [3, 4]
    context, cached, report = turn(world, "whole", text)
    assert (context, report.truncated_tokens) == (text, 0)
    assert cached == 384, "what was computed before the cut is still there"
    assert sum(report.miss_reasons.values()) == 20
    context, cached, report = turn(world, "more", [*text, 5])
    assert (cached, report.truncated_tokens) == (404, 0)


def test_a_client_may_send_again_some_of_what_it_had_cut():
    world = make_world()
    text = [*TEXT, 1, 2]
    turn(world, "shorter", text, cut=(0, 256))
    context, cached, report = turn(world, "longer", [*text, 3], cut=(0, 128))
    assert (context, report.truncated_tokens) == ([*text, 3][128:], 128)
    assert cached == 256


def test_a_clients_cut_stays_where_the_whole_does_not_fit():
    world = make_world(window=416)
    text = [*TEXT, 1, 2]
    turn(world, "shorter", text, cut=(0, 128))
    context, _, report = turn(world, "too long", [*text, 3], reserve=32)
    assert (context, report.truncated_tokens) == ([*text, 3][128:], 128)
    _, _, report = turn(world, "fits", [*text, 3, 4], reserve=12)
    assert report.truncated_tokens == 0


def test_what_the_window_had_no_room_for_stays_cut():
    world = PoolModel(make_manager(num_pages=64, dram_slots=64, window=320))
    context, _, report = turn(world, "cut", [*TEXT, 1], reserve=1)
    assert report.truncated_tokens == 160
    stream = [*TEXT, 1, 2]
    context, _, report = turn(world, "shorter", stream, cut=(0, 256))
    assert report.truncated_tokens == 256
    context, _, report = turn(world, "whole", [*stream, 3])
    assert report.truncated_tokens == 160, "the client's part of it has come back"
    assert context == [*stream, 3][160:]


def test_who_made_a_cut_outlives_the_process():
    world = make_world()
    text = [*TEXT, 1, 2]
    turn(world, "shorter", text, cut=(0, 128))
    (session,) = world.manager.sessions.contexts.values()
    read = type(session).unpack(session.pack(), session.lineage.domain, 0.0)
    assert read.client_cuts == session.client_cuts == [(0, 128)]
    assert read.own_cuts == []
