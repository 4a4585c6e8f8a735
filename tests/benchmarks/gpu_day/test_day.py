"""Tests of what a day is begun with, and of what is kept of it."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day import stamp
from benchmarks.gpu_day.merge import BEGIN, END, merge
from benchmarks.gpu_day.report import ratios, read_lines

TURNS: list[dict[str, Any]] = [
    {"section": "ceilings", "item": "machine", "card": "H100", "versions": {"torch": "2.11.0", "cuda": None}},
    {"section": "ceilings", "item": "read", "rows": 8, "gbps": 2830.0},
    {"section": "ceilings", "item": "link", "way": "to the device", "gbps": 54.5},
    {"section": "turns", "item": "decode 1", "streams": 1, "context": 1024, "sampled": False, "ms": 6.7, "gb": 15.28,
     "device_ms": 6.5, "host_gap_ms": 0.2},
    {"section": "turns", "item": "return, HBM", "from": "HBM", "first_ms": 12.0, "later_ms": [8.0, 8.2], "gb": 19.3,
     "loaded_gb": 0.0},
    {"section": "turns", "item": "return, DRAM all", "from": "DRAM all", "first_ms": 85.0, "later_ms": [8.0],
     "gb": 19.3, "loaded_gb": 4.1},
    {"section": "peers", "item": "nano-vllm, decode 1", "streams": 1, "context": 1024, "ms": 7.62},
    {"section": "turns", "item": "prompt 512", "error": "RuntimeError: no"},
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "day"
    out.mkdir()
    lines = [json.dumps(line) for line in TURNS]
    (out / "results.jsonl").write_text("\n".join([*lines, '{"section": "cut o']) + "\n")
    (out / "tests.jsonl").write_text(json.dumps({"section": "gpu_tests", "test": "a", "outcome": "passed"}) + "\n")
    return out


def test_ratios_are_within_the_day() -> None:
    found = ratios(TURNS)
    assert found["decode 1: of the bytes it reads"] == 1.241  # 6.7 ms of 15.28 GB at 2,830 GB/s, which are 5.40 ms
    assert found["decode 1: of nano-vllm's"] == 0.879
    assert found["return, HBM: of the bytes it reads"] == 1.76  # 12 ms of 6.82
    assert found["return, DRAM all: ms beyond the link"] == 9.771  # 4.1 GB at 54.5 GB/s take 75.23 ms


def test_a_day_is_merged_beside_what_was_there(folder: Path, tmp_path: Path) -> None:
    results, document = tmp_path / "gpu_day.json", tmp_path / "gpu.md"
    results.write_text(json.dumps({"benchmark": "gpu_day", "shapes": {"8b": 1}}))
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        merge(folder, results, document)
    kept = json.loads(results.read_text())
    assert kept["shapes"] == {"8b": 1}
    assert kept["day"]["card"] == "H100"
    assert kept["day"]["ratios"] == ratios(TURNS)
    text = document.read_text()
    assert text.startswith(f"before\n{BEGIN}\nH100; torch 2.11.0; ")
    assert text.endswith(f"{END}\nafter\n")
    assert "| 1 x 1024 | 6.7 | 6.5 | 0.2 |" in text
    assert "| return, DRAM all | 85.0 | 8.0 |" in text
    assert "old" not in text


def test_a_day_needs_a_preflight_on_its_own_sources_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text("x = 1\n")
    path = tmp_path / "build" / "stamp.json"
    assert "no preflight" in stamp.why_refused(path, tmp_path)
    stamp.write_stamp(path, tmp_path)
    assert stamp.why_refused(path, tmp_path) == ""
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "gpu_day.json").write_text("{}")
    assert stamp.why_refused(path, tmp_path) == "", "results are no sources"
    (tmp_path / "engine" / "a.py").write_text("x = 2\n")
    assert "other sources" in stamp.why_refused(path, tmp_path)
    stamp.write_stamp(path, tmp_path)
    monkeypatch.setattr(stamp, "versions", lambda: {"torch": "2.99.0"})
    assert "2.99.0" in stamp.why_refused(path, tmp_path)


def test_a_dry_section_leaves_four_files(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "benchmarks.gpu_day", "--dry", "--out", str(tmp_path), "--only", "ceilings")
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=stamp.ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["REPORT.md", "log.txt", "results.jsonl", "tests.jsonl"]
    assert {line["item"] for line in read_lines(tmp_path)} == {"start", "machine", "read", "product", "launch"}
    assert re.search(r"^# GPU day, dry$", ran.stdout, re.MULTILINE)
