"""Tests of how a replica's hooks accompany a turn, from its admission to its commit."""

from typing import Any

import msgspec
import pytest

from reprise.app.errors import ApiError
from reprise.fleet.identify import link_answer, response_digest
from reprise.fleet.keys import SessionName
from reprise.fleet.replica.replica_turn import ReplicaTurn
from reprise.fleet.replica.resume import DeltaNote, ResumedTurn, TurnNote, digest_of
from tests.app.fakes import model_info
from tests.fleet.replica.fake_home import SUBMIT, EndedTurn, FakeHome, Said

CHAIN = b"c" * 32
NAME = SessionName("alice", "s")


def resumed(**changes: Any) -> ResumedTurn:
    """An answer of one choice that has said three tokens in two pieces."""
    fields: dict[str, Any] = {
        "note": TurnNote(request_id="chatcmpl-1", session_id="s", seed=7, prompt=digest_of(SUBMIT.token_ids)),
        "created": 1000,
        "fingerprint": "f",
        "exact": True,
        "place": 0,
        "deltas": [DeltaNote(choice=0, ids=[4, 5]), DeltaNote(choice=0, ids=[6])],
    }
    return ResumedTurn(**{**fields, **changes})


async def test_a_new_turn_is_claimed_begun_spent_and_committed_once(tmp_path):
    home = FakeHome()
    turn = ReplicaTurn(home, "alice", chain=CHAIN)
    assert turn.admit("s", model_info(tmp_path)) == "s"
    assert turn.admit(None, model_info(tmp_path)) is None
    assert await turn.claim("s", "salt")
    assert home.claimed == [SessionName("alice", "s", "salt")]
    assert turn.resume(SUBMIT) is SUBMIT
    begun = turn.begin(SUBMIT, keep_s=None)
    assert (begun.request_id, begun.paid_tokens) == ("chatcmpl-2", 0)
    turn.spend(5)
    assert home.spent == [("alice", 5)]
    ended = EndedTurn(choices=[Said([4]), Said([]), Said([5, 6], "Bye")], response_ids=["resp_1"])
    for _ in range(2):
        await turn.end(ended)
    chains = (link_answer(CHAIN, "Hello"), link_answer(CHAIN, "Bye"), response_digest("resp_1"))
    assert home.committed == [(NAME, {"tokens": 5, "ttl_s": 60.0, "chains": chains})]  # 3 + 2 of the longest
    assert home.gone == []


@pytest.mark.parametrize("keep_s", [0.5, 1000.0])
async def test_a_session_lives_as_long_as_its_client_says(keep_s):
    home = FakeHome()
    turn = ReplicaTurn(home, "alice")
    turn.begin(SUBMIT, keep_s=keep_s)
    await turn.end(EndedTurn())
    assert home.committed == [(NAME, {"tokens": 5, "ttl_s": keep_s, "chains": ()})]


@pytest.mark.parametrize("ended", [EndedTurn(choices=[Said([])]), EndedTurn(is_handed_over=True)])
async def test_a_turn_of_which_nothing_is_kept_here_is_given_up(ended):
    home = FakeHome()
    turn = ReplicaTurn(home, "alice", chain=CHAIN)
    turn.begin(SUBMIT, keep_s=None)
    await turn.end(ended)
    await turn.end(EndedTurn())
    assert (home.committed, home.gone) == ([], [NAME])


async def test_a_turn_that_the_engine_never_had_is_neither_committed_nor_given_up():
    home = FakeHome()
    await ReplicaTurn(home, "alice").end(EndedTurn())
    assert (home.committed, home.gone) == ([], [])


def test_a_resumed_turn_goes_on_as_the_one_that_was_begun(tmp_path):
    turn = ReplicaTurn(FakeHome(), "alice", resumed=resumed())
    assert not turn.is_new
    assert turn.admit("other", model_info(tmp_path, fingerprint="f")) == "s"
    asked = turn.resume(SUBMIT)
    assert (asked.resume, asked.over, asked.sampling.seed) == ([[4, 5, 6]], None, 7)
    assert msgspec.structs.replace(asked, resume=[], sampling=SUBMIT.sampling) == SUBMIT
    begun = turn.begin(asked, keep_s=None)
    assert (begun.request_id, begun.created, begun.paid_tokens) == ("chatcmpl-1", 1000, 3)


@pytest.mark.parametrize("changes", [{"fingerprint": "other"}, {"exact": False}])
def test_another_models_turn_is_not_gone_on_with(changes, tmp_path):
    turn = ReplicaTurn(FakeHome(), "alice", resumed=resumed(**changes))
    with pytest.raises(ApiError) as refused:
        turn.admit(None, model_info(tmp_path, fingerprint="f"))
    assert (refused.value.status, refused.value.code) == (409, "cannot_resume")
