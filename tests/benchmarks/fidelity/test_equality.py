"""Tests which turns the equality benchmark plays, and what it concludes from them."""

import gzip
import json
from itertools import islice
from pathlib import Path

from benchmarks.fidelity.equality import MODES, Tally, read_conversations, summarize, verdicts

NAMES = [mode.name for mode in MODES]


def tally(name: str, returning: int, **differences: bool) -> Tally:
    """All history from where the mode says, in equal parts."""
    (mode,) = (mode for mode in MODES if mode.name == name)
    found = Tally(turns=returning, returning=returning)
    for tier in mode.from_tiers:
        found.history_tokens[tier] = 100
    found.differences = [{"excused": excused} for excused in differences.values()]
    return found


def test_every_utterance_is_a_turn_behind_a_long_enough_opening(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": f"one two {n}"} for n in range(5)]
    with gzip.open(tmp_path / "d.gz", "wt") as file:
        file.write(json.dumps({"id": "d", "turns": turns}) + "\n")
    short, again = islice(read_conversations(tmp_path / "d.gz", 0), 2)
    assert short.user_turns == again.user_turns == [t["content"] for t in turns]
    opened = next(read_conversations(tmp_path / "d.gz", 7))
    assert opened.user_turns == ["one two 0 one two 1 one two 2", "one two 3", "one two 4"]


def test_what_holds() -> None:
    planned = dict.fromkeys(NAMES, 300)
    tallies = {name: tally(name, 300) for name in NAMES}
    assert all(verdicts(tallies, planned, False).values())
    tallies["dram"] = tally("dram", 300, near_tie=True)
    assert all(verdicts(tallies, planned, False).values())
    assert summarize(tallies)[0]["near_ties"] == 1
    exact = verdicts(tallies, planned, True)
    assert [line for line, holds in exact.items() if not holds] == ["identical text"]


def test_what_does_not_hold() -> None:
    planned = dict.fromkeys(NAMES, 300)

    def broken(**changes: Tally) -> list[str]:
        tallies = {name: tally(name, 300) for name in NAMES} | changes
        return [line for line, holds in verdicts(tallies, planned, False).items() if not holds]

    assert broken(disk=tally("disk", 299)) == ["as many returning turns as asked for"]
    assert broken(disk=tally("disk", 300, wrong=False)) == ["identical text"]
    many = {str(n): True for n in range(14)}  # 14 of 2,700 turns, 0.52 %
    assert broken(disk=tally("disk", 300, **many)) == ["near-ties in at most 0.5% of the turns"]
    elsewhere = tally("disk", 300)
    elsewhere.history_tokens["computed"] = 101
    assert broken(disk=elsewhere) == ["disk: most history from disk"]
    only_hbm = tally("mixed", 300)
    only_hbm.history_tokens["disk"] = 1
    assert broken(mixed=only_hbm) == ["mixed: most history from hbm and disk"]
