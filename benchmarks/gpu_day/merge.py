"""Writes a day's results into `benchmarks/results/gpu_day.json` and the tables of docs/gpu.md.

What earlier days left in the file stays as it is: this one's is under "day", with commit, card and ratios.
"""

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_day.report import ratios, read_lines

ROOT = Path(__file__).parent.parent.parent
RESULTS, DOCUMENT = ROOT / "benchmarks" / "results" / "gpu_day.json", ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- gpu_day: tables begin -->", "<!-- gpu_day: tables end -->"
Line = Mapping[str, Any]


def merge(out: Path, results: Path = RESULTS, document: Path = DOCUMENT) -> None:
    """Write the results of the day in the folder `out` into the results file and the document. Raises ValueError if
    there are none, or the document lacks its markers."""
    lines = read_lines(out)
    machine = next((line for line in lines if line["item"] == "machine" and "card" in line), None)
    if machine is None:
        raise ValueError(f"{out} has no results of a day")
    text = document.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{document} lacks its markers, {BEGIN} and {END}")
    start = next((line for line in lines if line["item"] == "start"), {})
    day = {
        "commit": start.get("commit") or _commit(),
        "card": machine["card"],
        "versions": machine["versions"],
        "merged": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "ratios": ratios(lines),
        "lines": lines,
    }
    before = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {"benchmark": "gpu_day"}
    results.write_text(json.dumps({**before, "day": day}, indent=1) + "\n", encoding="utf-8")
    head, rest = text.split(BEGIN)
    document.write_text(f"{head}{BEGIN}\n{tables(day)}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def tables(day: Mapping[str, Any]) -> str:
    """Return a day's tables as Markdown."""
    lines: Sequence[Line] = [line for line in day["lines"] if "error" not in line and line["section"] == "turns"]
    versions = ", ".join(f"{name} {value}" for name, value in day["versions"].items() if value)
    parts = [f"{day['card']}; {versions}; commit {str(day['commit'])[:12]}.", ""]
    decoded = [line for line in lines if line["item"].startswith("decode") and "ms" in line]
    if decoded:
        parts += ["| decoding | ms a token | on the device | between two steps |", "|---|---|---|---|"]
        for line in decoded:
            name = f"{line['streams']} x {line['context']}{', sampled' if line['sampled'] else ''}"
            parts.append(f"| {name} | {line['ms']} | {line['device_ms']} | {line['host_gap_ms']} |")
        parts.append("")
    firsts: dict[str, list[Line]] = {}
    for line in lines:
        if "first_ms" in line and ("from" in line or "tokens" in line):
            name = f"return, {line['from']}" if "from" in line else f"prompt of {line['tokens']}"
            firsts.setdefault(name, []).append(line)
    if firsts:
        parts += ["| turn | first token, ms | later tokens, ms |", "|---|---|---|"]
        for name, turns in firsts.items():
            later = [value for turn in turns for value in turn["later_ms"]]
            shown = round(median(later), 2) if later else ""
            parts.append(f"| {name} | {', '.join(str(turn['first_ms']) for turn in turns)} | {shown} |")
        parts.append("")
    if day["ratios"]:
        parts += ["| ratio within the day | |", "|---|---|"]
        parts += [f"| {name} | {value} |" for name, value in day["ratios"].items()]
    return "\n".join(parts)


def _commit() -> str:
    ran = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return ran.stdout.strip()
