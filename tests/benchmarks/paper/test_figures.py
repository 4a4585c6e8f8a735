"""Tests that the runs of the papers' figures are what they claim, and that a share of them is scaled to the whole."""

import json

import pytest

from benchmarks.paper import text
from benchmarks.paper.figures import FILE, execute, runs
from benchmarks.paper.text import _whole


def test_a_run_of_a_small_share():
    wanted = runs(0.01)
    kept, again = (execute(wanted[f"llama-13b {arm}"])["figures"] for arm in ("attentionstore", "recompute"))
    assert again["hit_rate"] == 0 < kept["hit_rate"]
    assert kept["prefill_mean_s"] < again["prefill_mean_s"]


def test_a_share_is_scaled_to_the_whole():
    # A quarter: 10 s of decode stay, 1 s of prefill becomes 4; 14 s instead of 11 cost $11 * 14/11 for GPUs, and the
    # whole storage 4 times as much for as long.
    whole = _whole({"decode_gpu_s": 10.0, "prefill_gpu_s": 1.0, "cost": 12.0, "cost_storage": 1.0}, 0.25)
    assert whole["gpu_s"] == 14.0
    assert whole["cost_storage"] == pytest.approx(4 * 14 / 11)
    assert whole["cost"] == pytest.approx(14 + 4 * 14 / 11)


def test_the_page_is_written_of_the_committed_runs(tmp_path, monkeypatch):
    document = json.loads(FILE.read_text(encoding="utf-8"))
    monkeypatch.setattr(text, "DOCS", tmp_path)
    monkeypatch.setattr(text.plots, "bars", lambda name, *rest: [f"![](paper/{name}.png)", ""])
    monkeypatch.setattr(text.plots, "lines", lambda name, *rest: [f"![](paper/{name}.png)", ""])
    text.write(document)
    page = (tmp_path / "paper_figures.md").read_text(encoding="utf-8")
    assert page.count("![](paper/") == 16
    assert "| LRU, 2T (fitted) | " in page
    text.write(document | {"runs": {"llama-13b recompute": document["runs"]["llama-13b recompute"]}})
    assert "## AttentionStore Fig. 21" not in (tmp_path / "paper_figures.md").read_text(encoding="utf-8")
