"""REPORT.md: what matters of a day in at most 10,000 characters, ratios first, since it may be all that comes back."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

MOST_CHARACTERS = 10_000
_LINE_CHARACTERS = 230
Line = Mapping[str, Any]


def read_lines(out: Path, name: str = "results.jsonl") -> list[dict[str, Any]]:
    """Return the lines of results in a day's folder; a line that was cut off is left out."""
    found = []
    for line in (out / name).read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def ratios(lines: Iterable[Line]) -> dict[str, float]:
    """Return the day's main figures as ratios to other figures of the day: to the reading rate, to the link alone, and
    to other programs."""
    given = [line for line in lines if "error" not in line]
    found: dict[str, float] = {}
    read_gbps = _values(given, "ceilings", "gbps", item="read", rows=8)
    link_gbps = _values(given, "ceilings", "gbps", item="link", way="to the device")
    for line in given:
        if line["section"] == "turns" and line["item"].startswith("decode") and line.get("ms") and read_gbps:
            found[f"{line['item']}: of the bytes it reads"] = line["ms"] * read_gbps[0] / 1e3 / line["gb"]
        if line["section"] == "turns" and line["item"].startswith("decode") and line.get("host_gap_ms") is not None:
            found[f"{line['item']}: host gap, ms"] = line["host_gap_ms"]
        if line["section"] == "peers" and line["item"].startswith("nano-vllm, decode") and line.get("ms"):
            ours = _values(given, "turns", "ms", streams=line["streams"], context=line["context"], sampled=False)
            if ours:
                found[f"decode {line['streams']}: of nano-vllm's"] = ours[0] / line["ms"]
    for label in {line["from"] for line in given if line["section"] == "turns" and "from" in line}:
        first = median(_values(given, "turns", "first_ms", **{"from": label}))
        loaded = median(_values(given, "turns", "loaded_gb", **{"from": label}))
        if loaded and link_gbps:
            found[f"return, {label}: ms beyond the link"] = first - 1e3 * loaded / link_gbps[0]
        elif read_gbps:
            whole = median(_values(given, "turns", "gb", **{"from": label}))
            found[f"return, {label}: of the bytes it reads"] = first * read_gbps[0] / 1e3 / whole
        theirs = _values(given, "peers", "first_ms", item="nano-vllm, return")
        if theirs and not loaded:
            found[f"return, {label}: of nano-vllm's"] = first / median(theirs)
    saved = _values(given, "turns", "ms", item="prompts back to back")
    unsaved = _values(given, "unsaved", "ms", item="prompts back to back")
    if saved and unsaved:
        found["prompts while others are saved: of those without"] = saved[0] / unsaved[0]
    return {name: round(value, 3) for name, value in found.items()}


def _values(lines: Iterable[Line], section: str, name: str, **wanted: Any) -> list[float]:
    return [
        line[name]
        for line in lines
        if line["section"] == section and name in line and all(line.get(key) == value for key, value in wanted.items())
    ]


def report(out: Path, title: str) -> str:
    """Return a report of the results in a day's folder: ratios, errors, then all lines, at most MOST_CHARACTERS."""
    lines, tests = read_lines(out), read_lines(out, "tests.jsonl")
    failed = [line for line in [*lines, *tests] if "error" in line]
    counts = {how: sum(test["outcome"] == how for test in tests) for how in ("passed", "failed", "skipped")}
    parts = [f"# {title}", "", f"{len(lines)} lines, {len(failed)} errors; tests: {counts}", "", "## Ratios", ""]
    parts += [f"- {name}: {value}" for name, value in ratios(lines).items()]
    parts += ["", "## Errors", ""] + [_short(line) for line in failed]
    section = ""
    for line in lines:
        if "error" in line:
            continue
        if line["section"] != section:
            section = line["section"]
            parts += ["", f"## {section}", ""]
        parts.append(_short({name: value for name, value in line.items() if name not in ("section", "at")}))
    text = "\n".join(parts) + "\n"
    mark = "\n(cut off: the rest is in results.jsonl)\n"
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - len(mark)] + mark


def _short(line: Line) -> str:
    words = ", ".join(f"{name} {value}" for name, value in line.items() if name != "item")
    return f"- {line['item']}: {words}"[:_LINE_CHARACTERS]
