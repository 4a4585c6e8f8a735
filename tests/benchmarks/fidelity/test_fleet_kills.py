"""Tests what counts as a difference between two answers, as a near-tie and as a pause."""

import pytest

from benchmarks.fidelity.fleet_kills import Books, Kill, Returning, Shot, Struck, difference, pauses, result_of
from benchmarks.fleet.chat_stream import ChatStream


def stream_of(*choices: list[tuple[str, float]]) -> ChatStream:
    stream = ChatStream("", {})
    for index, tokens in enumerate(choices):
        stream.tokens[index] = tokens
        stream.texts[index] = "".join(token for token, _ in tokens)
    return stream


def a_turn(cached: int, is_broken: bool = True) -> Returning:
    before = Struck("a", "home", {0: 3}, is_broken)
    return Returning("greedy", 100, 30, cached, before, "b" if is_broken else "a", None, x_cache={})


SAID = [("a", -1.0), ("b", -2.0)]


def test_equal_answers_do_not_differ():
    assert difference("greedy", stream_of(SAID, SAID), stream_of(SAID, SAID), was_broken=True) is None


@pytest.mark.parametrize(
    ("kind", "logprob", "other", "cause"),
    [
        ("greedy", -2.0, -2.00001, "near-tie"),
        ("greedy", -2.0, -2.1, "other"),
        ("seeded", -2.0, -2.04, "draw"),
        ("seeded, n=2", -9.0, -9.1, "draw"),
        ("greedy", -9.0, -9.04, "other"),
    ],
)
def test_the_first_difference_has_a_cause(kind, logprob, other, cause):
    expected, found = ([("a", -1.0), ("b", logprob)], [("a", -1.0), ("c", other)])
    differs = difference(kind, stream_of(SAID, expected), stream_of(SAID, found), was_broken=True)
    assert differs is not None
    assert (differs.choice, differs.position, differs.expected, differs.found) == (1, 1, "b", "c")
    assert differs.cause == cause


def test_nothing_excuses_an_answer_that_is_too_short():
    found = difference("seeded", stream_of(SAID), stream_of(SAID[:1]), was_broken=True)
    assert found is not None
    assert found.cause == "other"


def test_a_pause_is_the_longest_gap_that_ends_after_the_kill():
    stream = stream_of(SAID)
    stream.came_s = [0.0, 5.0, 5.1, 7.1, 7.2]
    ended = stream_of(SAID)
    ended.came_s = [1.0, 2.0]
    assert pauses([stream, ended], killed_s=5.05) == [pytest.approx(2.0)]


def test_lost_turns_errors_and_differences_are_not_held():
    books = Books(kills=[Kill("replica", "a", 3, [0.5])], moved_ttft_s=[0.2], returning=[a_turn(95)])
    assert all(result_of(books)["held"].values())
    books.kills.append(Kill("replica", "a", 3, [0.8]))
    books.returning.append(a_turn(80))
    books.errors, books.lost = ["503"], ["greedy: not known"]
    found = difference("greedy", stream_of(SAID), stream_of([("c", -3.0)]), was_broken=True)
    assert found is not None
    books.differences = [found]
    held = result_of(books)["held"]
    assert [line for line, holds in held.items() if not holds] == [
        "no client sees an error",
        "texts of the undisturbed server, near-ties and draws excused",
        "at most 2% of the greedy answers excused",
        "no turn is lost",
        "pause p95 at most 2 TTFT of a moved turn and 0.3 s",
        "at least 90% of the history cached after a kill",
    ]


def test_an_answer_that_its_replica_had_ended_is_not_broken(monkeypatch):
    monkeypatch.setattr(ChatStream, "route", {"replica": "a", "route": "home"})
    broken, ended, elsewhere = (stream_of(SAID) for _ in range(3))
    broken.x_cache, ended.x_cache = ({"route": {"replica": name}} for name in ("b", "a"))
    shot = Shot("replica", "a", 3, 0.0, {broken: {0: 1}, ended: {0: 2}})
    assert shot.met(broken) == Struck("a", "home", {0: 1}, is_broken=True)
    assert shot.met(ended) == Struck("a", "home", {0: 2}, is_broken=False)
    assert shot.met(elsewhere) is None


def test_after_an_answer_that_had_ended_only_what_its_turn_computed_may_be_computed_again():
    books = Books(returning=[a_turn(95), a_turn(70, is_broken=False)])
    result = result_of(books)
    assert (result["history_cached"], result["history_cached_after_an_end"]) == (0.95, 0.7)
    line = next(line for line in result["held"] if "had ended" in line)
    assert result["held"][line]
    books.returning.append(a_turn(69, is_broken=False))
    assert not result_of(books)["held"][line]
