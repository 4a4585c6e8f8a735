"""Reads `claims.toml` and takes the number of each claim from the result that it names.

A claim is a sentence with places for numbers, the name of a result file, and where in it each number stands:

    [[claim]]
    theme = "Returning turns"
    text = "The first token of a fourth turn takes {ours:.0f} ms instead of {theirs:.0f} ms"
    result = "hierarchy"
    ours = "arms.attentionstore.by_turn.4.ttft_ms.p50"
    theirs = "arms.recompute.by_turn.4.ttft_ms.p50"
    pages = ["README.md"]

A path is names, in quotes if there is a point in them, and list indices, with points between them. `name[key=value]`
is the first item of a list that has this value, `*` is each item, where `min`, `max` or `sum` stands before the path;
`#` counts the items, and `path / path` is a quotient. `pages` are documents that contain the sentence: a test finds
each that says another number than the result does. `command` measures the result again where its program has got
another name since.
"""

import json
import re
import string
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.result_files import RESULTS, command_of

CLAIMS = Path(__file__).parent / "claims.toml"
_STEP = re.compile(r'"([^"]*)"|((?:[^."\[]|\[[^\]]*\])+)')
_ITEM = re.compile(r"(?P<name>[^\[]*)\[(?P<key>[^=]+)=(?P<value>[^\]]*)\]")
_OVER: dict[str, Callable[[list[Any]], Any]] = {"min": min, "max": max, "sum": sum}
_PERCENT = re.compile(r"(\d)%")
_KEYS = {"theme", "text", "result", "pages", "command"}


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim whose numbers have been read."""

    theme: str
    marked: str  # the sentence, each number between **
    result: str  # name of the file
    pages: tuple[str, ...]
    command: str  # measures it again
    date: str  # YYYY-MM-DD
    machine: str
    commit: str
    missed: tuple[str, ...]  # aims of the result that do not hold
    num_aims: int

    @property
    def sentence(self) -> str:
        return self.marked.replace("**", "")


class _Marking(string.Formatter):
    """Formats numbers, and puts each between **."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return f"**{super().format_field(value, format_spec)}**"


def claims(file: Path = CLAIMS, results: Path = RESULTS) -> list[Claim]:
    """Return all claims in the order of the file. Raises LookupError for a number that a result does not hold."""
    return [_claim(told, results) for told in tomllib.loads(file.read_text(encoding="utf-8"))["claim"]]


def _claim(told: Mapping[str, Any], results: Path) -> Claim:
    result = json.loads((results / f"{told['result']}.json").read_text(encoding="utf-8"))
    held = result.get("held", {})
    numbers = {name: value_at(result, path) for name, path in told.items() if name not in _KEYS}
    return Claim(
        theme=told["theme"],
        marked=_PERCENT.sub(r"\1 %", _Marking().format(told["text"], **numbers)),
        result=told["result"],
        pages=tuple(told.get("pages", ())),
        command=told.get("command", command_of(result)),
        date=str(result.get("finished", ""))[:10],
        machine=machine_of(result),
        commit=str(result["machine"]["commit"]),
        missed=tuple(aim for aim, holds in held.items() if not holds),
        num_aims=len(held),
    )


def machine_of(result: Mapping[str, Any]) -> str:
    """Return the name of the GPU that a result was measured on, or else of the processor and how many cores it has."""
    machine = result["machine"]
    if machine.get("gpu"):
        return str(machine["gpu"])
    name = re.sub(r"\((R|TM)\)|Processor|CPU|@.*", "", machine["cpu"])
    return f"{machine['cores']} cores of {' '.join(name.split())}"


def value_at(result: Any, path: str) -> Any:
    """Return the value at a path in a result. (The module's docstring describes paths.) Raises LookupError if there is
    none."""
    if " / " in path:
        above, below = path.split(" / ")
        return value_at(result, above) / value_at(result, below)
    word, _, rest = path.partition(" ")
    if word in _OVER:
        return _OVER[word](_each(result, rest))
    found = result
    for step in (quoted or plain for quoted, plain in _STEP.findall(path)):
        try:
            found = _next(found, step)
        except (KeyError, IndexError, TypeError, ValueError, StopIteration) as error:
            raise LookupError(f"there is no {step!r} of {path!r}") from error
    return found


def _each(result: Any, path: str) -> list[Any]:
    """Return the values of a path with one `*` in it."""
    before, _, after = path.partition(".*.")
    items = value_at(result, before)
    return [value_at(item, after) for item in (items.values() if isinstance(items, dict) else items)]


def _next(found: Any, step: str) -> Any:
    if step == "#":
        return len(found)
    if item := _ITEM.fullmatch(step):
        listed = found[item["name"]] if item["name"] else found
        return next(each for each in listed if str(each[item["key"]]) == item["value"])
    return found[int(step)] if isinstance(found, list) else found[step]
