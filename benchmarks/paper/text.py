"""Writes what the simulated figures say: docs/paper_figures.md and its pictures, of what `benchmarks.paper.figures`
found."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from benchmarks.figures.panels import table
from benchmarks.harness.result_files import DOCS, load
from benchmarks.paper import hybridserve, plots
from reprise.loadgen.sim import presets
from reprise.loadgen.sim.presets import FIGURE_MODELS

NEAR = 0.15  # share of the paper's number: farther off wants a note
Figures = dict[str, Any]  # fields of `reprise.loadgen.sim.result.Result`
Runs = dict[str, Figures]
BIG = "llama-13b"


def write(document: dict[str, Any]) -> None:
    """Write about the runs that there are; a figure whose runs are missing is left out."""
    entries = document["runs"]
    runs = {name: _whole(entry["figures"], entry["run"]["share"]) for name, entry in entries.items()}
    lines = [
        "# The papers' figures, simulated",
        "",
        "Drawn by `make figures`. The server's own queue and policy classes run on a virtual clock, on the machines "
        "that the papers state (`loadgen/sim/`). Only LRU and FIFO in Fig. 21 were fitted "
        "(`benchmarks/paper/fit.py`); all else is a prediction. `reprise simulate` plays these settings and others.",
        "",
    ]
    share = min((entry["run"]["share"] for entry in entries.values()), default=1.0)
    if share != 1:
        lines += [f"These runs have {share:.0%} of the sessions, their rate, tiers and batch (`--share`).", ""]
    for section in (_hits, _eviction, _times, _overflow, _capacity, _mediums, _unsaturated):
        lines += section(runs)
    lines += _ratios() + _documents(document["documents"]) + _reload()
    lines += hybridserve.section(load("hybridserve"))
    assumed = ([row["what"], row["value"], row["source"]] for row in document["assumptions"])
    slowest = max(entries, key=lambda name: entries[name]["processor_s"])
    took = f"The longest run ({slowest}) took {entries[slowest]['processor_s']:.0f} s of a core."
    lines += ["## Assumptions", "", *table("what | value | from", assumed), "", f"`{document['command']}`. {took}", ""]
    (DOCS / "paper_figures.md").write_text("\n".join(lines), encoding="utf-8")


def _whole(figures: Figures, share: float) -> Figures:
    """Scale a run with a share of the sessions on that share of a machine to the whole, in seconds and dollars. Its
    decode steps take as long, its prefills are as many times fewer, and it pays for as many times less storage."""
    gpu_s = figures["decode_gpu_s"] + figures["prefill_gpu_s"] / share
    longer = gpu_s / (figures["decode_gpu_s"] + figures["prefill_gpu_s"])
    storage = figures["cost_storage"] / share * longer
    gpus = (figures["cost"] - figures["cost_storage"]) * longer
    return {**figures, "gpu_s": gpu_s, "cost": gpus + storage, "cost_storage": storage}


def _beside(
    number: str, heading: str, title: str, unit: str, shown: str, ours: dict[str, float], paper: Sequence[float],
    what: str = "model", mine: str = "simulated",
) -> list[str]:  # fmt: skip
    """Return a heading, a picture and a table of our numbers beside the paper's, by what they are of."""
    rows = []
    for (label, value), theirs in zip(ours.items(), paper, strict=True):
        mark = " (see the note)" if abs(value / theirs - 1) > NEAR else ""
        rows.append([label, f"{value:{shown}}", f"{theirs:{shown}}", f"{value / theirs - 1:+.0%}{mark}"])
    series = {"paper": paper, "simulated": list(ours.values())}
    return [
        f"## AttentionStore Fig. {number}: {heading}", "", *plots.bars(f"fig{number}", title, unit, list(ours), series),
        *table(f"{what} | {mine} | paper | off by", rows), "",
    ]  # fmt: skip


def _of_models(runs: Runs, arm: str) -> Runs:
    """Model -> its run, where all models have one; else nothing."""
    names = {model: f"{model} {arm}" for model in FIGURE_MODELS}
    return {model: runs[name] for model, name in names.items()} if set(names.values()) <= runs.keys() else {}


def _ratio(kept: Figures, again: Figures, key: str) -> float:
    return float(kept[key] / again[key])


def _three(figures: Figures) -> str:
    return " / ".join(f"{figures[key]:.1%}" for key in ("hit_rate", "hit_rate_returning", "token_hit_rate"))


def _hits(runs: Runs) -> list[str]:
    kept = _of_models(runs, "attentionstore")
    if not kept:
        return []
    seeds = {
        model: [run["hit_rate"] for name, run in runs.items() if name.split(",")[0] == f"{model} attentionstore"]
        for model in kept
    }
    means = {model: fmean(rates) for model, rates in seeds.items()}
    rows = (
        [model, ", ".join(f"{rate:.1%}" for rate in seeds[model]), _three(run),
         f"{run['tier_hit_share'].get('dram', 0):.1%}"]
        for model, run in kept.items()
    )  # fmt: skip
    lines = _beside("13", "hit rate", "hit rate of all turns, 128 GB / 10 TB", "share of turns", ".1%", means,
                    (0.86, 0.71, 0.89, 0.90))  # fmt: skip
    heads = "model | workloads drawn alike | first of them: all turns / turns >= 2 / tokens | found in DRAM"
    return [*lines, *table(heads, rows), "", _NOTES["13"], ""]


def _eviction(runs: Runs) -> list[str]:
    points = {
        "LRU, 2T (fitted)": (f"{BIG} lru 2T", 0.129), "FIFO, 2T (fitted)": (f"{BIG} fifo 2T", 0.095),
        "AttentionStore, 2T": (f"{BIG} attentionstore 2T", 0.40), "LRU, 10T (fitted)": (f"{BIG} lru 10T", 0.58),
        "FIFO, 10T (fitted)": (f"{BIG} fifo 10T", 0.48), "AttentionStore, 10T": (f"{BIG} attentionstore", 0.86),
    }  # fmt: skip
    others = {"by_insertion": f"{BIG} fifo by insertion 10T", "by_formula": f"{BIG} eviction window 2T"}
    if not {*(name for name, _ in points.values()), *others.values()} <= runs.keys():
        return []
    found = {what: runs[name] for what, (name, _) in points.items()}
    rates = {what: run["hit_rate"] for what, run in found.items()}
    rows = (
        [what, _three(run), ", ".join(f"{run['tier_hit_share'].get(tier, 0):.1%}" for tier in ("dram", "disk")),
         f"{run['gpu_s']:,.0f}"]
        for what, run in found.items()
    )  # fmt: skip
    faster = [
        f"with {size} look-ahead is {found[f'LRU, {size} (fitted)']['gpu_s'] / mine:.2f} times LRU's and "
        f"{found[f'FIFO, {size} (fitted)']['gpu_s'] / mine:.2f} times FIFO's speed"
        for size in ("2T", "10T")
        for mine in (found[f"AttentionStore, {size}"]["gpu_s"],)
    ]
    hours = {"simulated": [run["gpu_s"] / 3600 for run in found.values()]}
    return [
        *_beside("21", "policies and sizes (13B)", "hit rate of all turns, LLaMA-13B", "share of turns", ".1%", rates,
                 [paper for _, paper in points.values()], ""),
        *table(" | all turns / turns >= 2 / tokens | DRAM, disk share of what was found | GPU time, s", rows), "",
        f"Fig. 21(b): {'; '.join(faster)} (paper: up to 2.7 times).", "",
        *plots.bars("fig21b", "GPU time, LLaMA-13B", "hours", list(points), hours),
        _NOTES["21"].format(**{what: f"{runs[name]['hit_rate']:.1%}" for what, name in others.items()}), "",
    ]  # fmt: skip


def _times(runs: Runs) -> list[str]:
    kept, again = _of_models(runs, "attentionstore"), _of_models(runs, "recompute")
    if not (kept and again):
        return []
    lines: list[str] = []
    kinds: tuple[tuple[str, str, Callable[[Figures, Figures], float], tuple[float, ...], str], ...] = (
        ("14", "time to first token without queueing, saved", lambda a, r: 1 - _ratio(a, r, "prefill_mean_s"),
         (0.85, 0.61, 0.87, 0.86), ".1%"),
        ("15", "prefill throughput, times recompute's", lambda a, r: _ratio(a, r, "prefill_tokens_per_s"),
         (6.8, 2.6, 7.8, 7.2), ".1f"),
        ("16", "GPU time, times as fast", lambda a, r: r["gpu_s"] / a["gpu_s"], (4.0, 1.9, 3.3, 3.4), ".2f"),
        ("17", "cost, saved", lambda a, r: 1 - a["cost"] / r["cost"], (0.70, 0.43, 0.66, 0.68), ".1%"),
    )  # fmt: skip
    more = {
        "14": "With queueing, mean: " + "; ".join(
            f"{m} {run['ttft_mean_s']:,.0f} s instead of {again[m]['ttft_mean_s']:,.0f}" for m, run in kept.items()),
        "17": "Storage is " + ", ".join(f"{run['cost_storage'] / run['cost']:.1%} ({m})" for m, run in kept.items())
        + " of the cost (paper: 16.4 / 9.0 / 9.0 / 9.0 %)",
    }  # fmt: skip
    for number, title, measure, paper, shown in kinds:
        ours = {model: measure(kept[model], again[model]) for model in FIGURE_MODELS}
        lines += _beside(number, title, title, "", shown, ours, paper)
        lines += [f"{more[number]}.", ""] if number in more else []
        lines += [_NOTES[number], ""]
    return lines


def _overflow(runs: Runs) -> list[str]:
    kept, cut = _of_models(runs, "attentionstore"), _of_models(runs, "overflow")
    if not (kept and cut):
        return []
    drops = {model: kept[model]["hit_rate"] - cut[model]["hit_rate"] for model in FIGURE_MODELS}
    lines = _beside("22", "hit rate lost where a cut invalidates what is saved",
                    "points of hit rate lost without decoupled positions", "share of turns", ".1%", drops,
                    (0.176, 0.415, 0.181, 0.184))  # fmt: skip
    return [*lines, _NOTES["22"], ""]


def _capacity(runs: Runs) -> list[str]:
    found = {float(name.split()[-1]): run for name, run in sorted(runs.items()) if " capacity " in name}
    if not found:
        return []
    paper = {0.1: 0.51, 0.25: 0.98}
    rates = {"turns >= 2": "hit_rate_returning", "all turns": "hit_rate", "tokens": "token_hit_rate"}
    drawn = {what: [(ratio, found[ratio][key]) for ratio in sorted(found)] for what, key in rates.items()}
    rows = (
        [f"{ratio:g}", *(f"{run[key]:.1%}" for key in rates.values()), f"{paper[ratio]:.0%}" if ratio in paper else "",
         f"{run['answer_tokens'] / run['gpu_s']:,.0f}"]
        for ratio, run in sorted(found.items())
    )  # fmt: skip
    axes = ("capacity / (sessions an hour x window)", "hit rate")
    return [
        "## AttentionStore Fig. 23: capacity (13B, unsaturated, TTL 1 h)", "",
        *plots.lines("fig23", "hit rate by capacity, TTL 1 h", axes, drawn, list(paper.items())),
        *table(f"RCC / CCpUT | {' | '.join(rates)} | paper | tokens of answers a GPU second", rows), "",
        _NOTES["23"], "",
    ]  # fmt: skip


def _mediums(runs: Runs) -> list[str]:
    arms = {"HBM": "hbm", "HBM + DRAM": "hbm+dram", "DRAM + SSD": "attentionstore"}
    found = {what: _of_models(runs, arm) for what, arm in arms.items()}
    if not all(found.values()):
        return []
    rates = {model: run["hit_rate"] for model, run in found["HBM + DRAM"].items()}
    hours = {what: [run["gpu_s"] / 3600 for run in of.values()] for what, of in found.items()}
    alone = ", ".join(f"{run['hit_rate']:.1%} ({model})" for model, run in found["HBM"].items())
    return [
        *_beside("24", "mediums", "hit rate with 10 GB of HBM and 128 GB of DRAM", "share of turns", ".1%", rates,
                 (0.034, 0.017, 0.077, 0.191), mine="HBM + DRAM"),
        f"HBM alone: {alone} (paper: about 0).", "",
        *plots.bars("fig24b", "GPU time by medium", "hours", list(FIGURE_MODELS), hours),
        _NOTES["24"], "",
    ]  # fmt: skip


def _unsaturated(runs: Runs) -> list[str]:
    arms = [f"{BIG} unsaturated {arm}" for arm in ("recompute", "attentionstore", "lru")]
    if not set(arms) <= runs.keys():
        return []
    base, kept, lru = (runs[name] for name in arms)
    return [
        "## The same server with a short queue (13B)", "",
        f"With think times and {presets.UNSATURATED_RATE:g} sessions a second all that returns finds its KV under any "
        f"policy: look-ahead hits {_three(kept)} of all turns, turns >= 2 and tokens, LRU {_three(lru)}. Mean TTFT: "
        f"{base['ttft_mean_s'] * 1e3:.0f} ms recomputed, {kept['ttft_mean_s'] * 1e3:.0f} ms reused; without queueing "
        f"{1 - _ratio(kept, base, 'prefill_mean_s'):.0%} less (paper, Fig. 14: 85 %); prefill throughput "
        f"{_ratio(kept, base, 'prefill_tokens_per_s'):.1f} times; GPU time {_ratio(base, kept, 'gpu_s'):.2f} times as "
        "fast. The published margins over LRU need a backlog.", "",
    ]  # fmt: skip


def _ratios() -> list[str]:
    """Return what the cost model alone says: a batch of 16 prompts of 1,000 tokens on one GPU."""
    shape = presets.SHAPES[BIG]
    costs = presets.costs(presets.one_gpu(shape))
    again_s = 16 * costs.prefill_s(1000, 0)
    rows, drawn = [], dict[str, list[float]]({"recompute": [], "no pre-loading": [], "layer by layer": []})
    for history in (500, 600, 700, 800, 900):
        new_s = 16 * costs.tokens_s(1000 - history, history)
        load_s = 16 * history * shape.kv_bytes_per_token / 26e9
        both_s = max(new_s, load_s + new_s / shape.num_layers)
        times = (f"{1e3 * seconds:.0f}" for seconds in (new_s, load_s, both_s, again_s))
        rows.append([f"{history} / {1000 - history}", *times, f"{again_s / both_s:.2f}"])
        for values, seconds in zip(drawn.values(), (again_s, load_s + new_s, both_s), strict=True):
            values.append(1e3 * seconds)
    heads = "history / new | compute new, ms | load history, ms | layer by layer, ms | recompute, ms | times"
    return [
        "## AttentionStore Fig. 18: recompute and reuse by share of history (13B, one A100, 16 x 1K tokens)", "",
        *table(heads, rows), "",
        *plots.bars("fig18", "prefill of 16 x 1K tokens by history / new tokens", "ms", [r[0] for r in rows], drawn),
        _NOTES["18"], "",
    ]  # fmt: skip


def _documents(found: dict[str, Any]) -> list[str]:
    """found: length of the document -> arm -> means of a question."""
    rows = []
    for length, row in found.items():
        again, kept = row["recompute"], row["attentionstore"]
        faster = again["ttft_s"] / kept["ttft_s"]
        rows.append([f"{int(length):,}", f"{again['ttft_s']:.2f}", f"{kept['ttft_s']:.3f}", f"{1 - 1 / faster:.0%}",
                     f"{faster:.1f}", f"{1 - kept['gpu_s'] / again['gpu_s']:.0%}",
                     f"{again['gpu_s'] / kept['gpu_s'] - 1:+.0%}"])  # fmt: skip
    arms = {"recompute": "recompute", "reuse": "attentionstore"}
    ttfts = {what: [(int(n) / 1000, row[arm]["ttft_s"]) for n, row in found.items()] for what, arm in arms.items()}
    rates = {what: [(int(n) / 1000, 64 / row[arm]["gpu_s"]) for n, row in found.items()] for what, arm in arms.items()}
    heads = "document | TTFT recompute, s | reuse, s | saved | prefill, times | GPU time saved | output rate"
    return [
        "## AttentionStore Fig. 25, 26: long documents (Mistral-7B, one A100, batch 1; turns 2 to 6)", "",
        *table(heads, rows), "",
        *plots.lines("fig25", "TTFT by length of the document", ("K tokens", "s"), ttfts, [(28, 2.5), (28, 0.12)]),
        *plots.lines("fig26", "answers by length of the document", ("K tokens", "tokens a second"), rates),
        "Paper, at 28K: 2.5 s, about 0.12 s, 95 %, 22 times; output up to 67 % more.", "", _NOTES["25"], "",
    ]  # fmt: skip


def _reload() -> list[str]:
    rows, drawn = [], dict[str, list[float]]({"recompute": [], "reload": []})
    for name, shape in presets.CAR_SHAPES.items():
        costs = presets.costs(shape)
        for tokens in (1024, 2048):
            again_s = costs.prefill_s(tokens, 0)
            total_s = tokens * shape.kv_bytes_per_token / 64e9 + costs.prefill_s(1, tokens)
            rows.append([name, f"{tokens:,}", f"{again_s * 1e3:.0f}", f"{total_s * 1e3:.0f}",
                         f"{1 - total_s / again_s:.0%}"])  # fmt: skip
            if tokens == 2048:
                drawn["recompute"].append(1e3 * again_s)
                drawn["reload"].append(1e3 * total_s)
    return [
        "## CaR Fig. 5: recompute and reload (8 A100-40GB, CXL 64 GB/s)", "",
        *table("model | tokens | recompute, ms | reload, ms | saved", rows), "",
        *plots.bars("car5", "2K tokens: recompute and reload", "ms", list(presets.CAR_SHAPES), drawn),
        _NOTES["car"], "",
    ]  # fmt: skip


_NOTES = {
    "13": "Nothing was fitted to these four. Turns that open a session cannot hit. LLaMA-70B and Falcon-40B need so "
    "little KV that all of it fits: their misses are first turns alone.",
    "14": "Note: of the turns after the first, a third of the 975 tokens is new, and hits compute no less.",
    "15": "Note: the same numbers as Fig. 14, as a ratio.",
    "16": "Note: most of the GPU time here is decoding, which caching does not shorten. 4.0 times with prefills 6.8 "
    "times as fast means that recomputing takes seven times as long as decoding. At the stated prefill rate a step of "
    "the batch of 24 would have to take 1 ms; reading the weights alone takes 8.",
    "17": "Note: follows from GPU time (Fig. 16).",
    "18": "By the cost model alone. Loads of long histories are longer than the computation of short prompts, which is "
    "why AttentionStore begins them before.",
    "21": "Four lengths and the order of FIFO were fitted to LRU and FIFO (`benchmarks/results/fit_paper.json`). FIFO "
    "has to mean that the session that began first leaves first: with a new place for every insertion it hits "
    "{by_insertion} with 10T. Told only of the first (C_mem + C_disk) / S_kv requests that wait, as the paper's "
    "formula reads, look-ahead hits {by_formula} with 2T.",
    "22": "Note: by the fitted lengths 44 % of the turns overflow a window of 4K and 96 % one of 2K. What is computed "
    "again then is saved here; if that turn misses as well, the drops come up to these shares. The paper's numbers lie "
    "between.",
    "23": "The paper does not say how long people think; with think times of half a minute a tenth is enough.",
    "24": "Note: small remainders of a rotation; within 3 points for all four.",
    "25": "A prompt's token attends to Mistral's sliding window of 4K, which meets the paper's 2.5 s. Reuse is bound "
    "by PCIe. The time of a decode step is from the paper's own share of 41 % for prefills.",
    "car": "By the cost model alone, nothing overlapped. OPT-30B comes near the paper's 30 %; its 60 % for OPT-13B is "
    "not explained by these rates.",
}
