"""Tests that what each scenario holds can hold, and can fail."""

import math
from typing import Any

import pytest

from benchmarks.fleet import faults, homes, kills, moves
from benchmarks.fleet.chat_stream import ChatStream
from benchmarks.fleet.kills import BROKEN, ENDED, Kill, SeenAnswer, difference
from benchmarks.fleet.scenario import Account

TIMES = {"recovered_s": 5.0, "heads": 3, "heads_s": 10.0}


def row(ttft_ms: float = 100.0, **changes: Any) -> dict[str, Any]:
    usual = {
        "conversation": "c", "turn": 1, "is_named": True, "replica": "a", "at_home": True, "is_known": True,
        "route": "home", "prompt_tokens": 150, "answer_tokens": 50, "history_tokens": 100, "cached_tokens": 100,
        "error": "", "same_text": True, "has_moved": False,
        "tokens": dict.fromkeys(("hbm", "dram", "disk", "redis"), 0),
    }  # fmt: skip
    return {**usual, "ttft_ms": ttft_ms, **changes}


def moved(home_ms: float, replica: str, errors: list[str], share: float, **changes: Any) -> dict[str, Any]:
    found = {"moved": "redis", "home": "disk", "recompute": "dram"}
    rows = [
        row(ttft_ms, arm=arm, tokens={**row()["tokens"], found[arm]: share * 100}, **changes)
        for arm, ttft_ms in (("moved", 130.0), ("home", home_ms), ("recompute", 434.0 if home_ms == 100 else 433.0))
    ]
    first = row(arm="moved", turn=0, replica=replica)
    return moves.result_of(Account([first, *rows], errors), [] if not errors else [{}])


def came_home(errors: list[str], at_home: bool) -> dict[str, Any]:
    rows = [row(part=part, is_named=named, at_home=at_home) for part in homes.PARTS for named in (True, False)]
    return homes.result_of(Account(rows, errors))


def killed(*answers: dict[str, Any]) -> dict[str, Any]:
    seen = [SeenAnswer(**{"kind": "greedy", **answer}) for answer in answers]
    return kills.result_of([], [SeenAnswer("seeded", moved_ttft_s=0.2), *seen])


def stream_of(*tokens: tuple[str, float]) -> ChatStream:
    stream = ChatStream("", {})
    stream.tokens[0], stream.texts[0] = list(tokens), "".join(text for text, _ in tokens)
    return stream


OTHER = difference("greedy", stream_of(("a", -1.0)), stream_of(("b", -2.0)))
DRAW = difference("seeded", stream_of(("a", -1.0)), stream_of(("b", -2.0)))
GOOD_AND_BAD = {
    "faults": lambda: (
        faults.result_of([row(arm=arm, fault="slow") for arm in faults.ARMS], {"slow": TIMES}, 1000),
        faults.result_of(
            [row(126.0, arm="redis", fault="slow", same_text=False), row(arm="without", fault="slow"),
             {"arm": "redis", "fault": "slow", "error": "503"}],
            {"slow": TIMES | {"recovered_s": None, "heads_s": 10.1}}, 999,
        ),
    ),
    "homes": lambda: (came_home([], True), came_home(["503"], False)),
    "kills": lambda: (
        killed({"fate": BROKEN, "pause_s": 0.6}, {"after": BROKEN, "history": 100, "cached": 90},
               {"after": ENDED, "history": 100, "cached": 70, "computed": 30}),
        killed({"error": "503"}, {"fate": BROKEN, "pause_s": 0.8, "difference": OTHER, "lost": "not known"},
               {"kind": "seeded", "difference": DRAW}, {"after": BROKEN, "history": 100, "cached": 89},
               {"after": ENDED, "history": 100, "cached": 69, "computed": 30}),
    ),
    "moves": lambda: (moved(100.0, "b", [], 1.0), moved(99.0, "a", ["503"], 0.9, is_known=False)),
}  # fmt: skip


@pytest.mark.parametrize("scenario", GOOD_AND_BAD)
def test_what_is_held_can_fail(scenario):
    good, bad = (result["held"] for result in GOOD_AND_BAD[scenario]())
    assert [line for line, holds in good.items() if not holds] == []
    assert [line for line, holds in bad.items() if holds and line != "kills broke streams"] == []
    assert good.keys() == bad.keys()
    assert not killed()["held"]["kills broke streams"]


def test_a_difference_has_a_cause_and_a_broken_stream_a_pause():
    near = difference("greedy", stream_of(("a", -2.0)), stream_of(("b", -2.00001)))
    short = difference("seeded", stream_of(("a", -1.0), ("b", -1.0)), stream_of(("a", -1.0)))
    assert [one and one.cause for one in (near, DRAW, OTHER, short)] == ["near-tie", "draw", "other", "other"]
    assert short is not None
    assert short.gap == math.inf
    stream = stream_of()
    stream.came_s, stream.x_cache = [0.0, 5.0, 5.1, 7.1, 7.2], {"route": {"replica": "b"}}
    kill = Kill("replica", "a", 5.05, frozenset({"greedy"}))
    assert (kill.fate("greedy", stream), kill.fate("seeded", stream)) == (BROKEN, "")
    assert kill.pause_s(stream) == pytest.approx(2.0)
