"""Tests that what hangs, dies or fails costs its item, not the ones after it."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day.supervisor import Supervisor

CHILD = """
import json, os, sys, time
how = dict(a="ok", b=sys.argv[1], c="ok")
def say(item, **values):
    print(json.dumps({"item": item, **values}), flush=True)
say("opening", limit_s=20)
if sys.argv[1] == "never opens":
    sys.exit(4)
for name, way in how.items():
    if name in sys.argv[2:]:
        continue
    say(name, limit_s=1.0 if way == "hang" else 20)
    print("words for the log", file=sys.stderr, flush=True)
    if way == "hang":
        time.sleep(60)
    if way == "die":
        os._exit(7)
    if way == "raise":
        say(name, error="ValueError: no")
        continue
    if way == "test":
        say(name, test="test_x", outcome="passed")
        continue
    say(name, ms=1.5)
"""


def ran(out: Path, way: str, limit_s: float = 60.0) -> tuple[list[dict[str, Any]], Supervisor]:
    def command(section: str, skip: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", CHILD, way, *skip]

    day = Supervisor(out, command, time.monotonic() + 60)
    day.run("some", limit_s)
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()], day


@pytest.mark.parametrize(
    ("way", "says"),
    [("hang", "too long"), ("die", "status 7"), ("raise", "ValueError")],
)
def test_the_items_after_one_that_fails_are_measured(tmp_path: Path, way: str, says: str) -> None:
    lines, day = ran(tmp_path, way)
    assert [(line["item"], line.get("ms")) for line in lines] == [("a", 1.5), ("b", None), ("c", 1.5)]
    assert says in lines[1]["error"]
    assert day.failures == ["some: b"]
    assert "words for the log" in (tmp_path / "log.txt").read_text()
    assert len(list(tmp_path.iterdir())) <= 3, "with the report there are four files"


def test_a_section_ends_when_its_time_is_over(tmp_path: Path) -> None:
    lines, _ = ran(tmp_path, "hang", limit_s=0.6)
    assert "no time was left" in lines[-1]["error"]
