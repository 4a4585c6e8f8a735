"""Writes what the simulated figures say: docs/paper_figures.md and its pictures, of what `benchmarks.paper.figures`
found."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.figures.panels import table
from benchmarks.harness.result_files import DOCS, load
from benchmarks.paper import hybridserve, plots
from reprise.loadgen.sim import presets
from reprise.loadgen.sim.presets import FIGURE_MODELS

NEAR = 0.15  # share of the paper's number: what is farther off is marked
Figures = dict[str, Any]  # fields of `reprise.loadgen.sim.result.Result`
Runs = dict[str, Figures]
BIG = "llama-13b"


def write(document: dict[str, Any]) -> None:
    """Write docs/paper_figures.md with the runs of a result. A figure whose runs are missing is left out."""
    entries = document["runs"]
    runs = {name: _whole(entry["figures"], entry["run"]["share"]) for name, entry in entries.items()}
    lines = [
        "# The papers' figures, simulated",
        "",
        "Drawn by `make figures`. The server's own queue and policy classes run on a virtual clock, on the machines "
        "that the papers state (`loadgen/sim/`). Only LRU and FIFO in Fig. 21 were fitted; all else is a prediction. "
        "`reprise simulate` plays these settings and others. "
        f"In the tables the paper's number stands in brackets, and * marks what is more than {NEAR:.0%} off.",
        "",
    ]
    share = min((entry["run"]["share"] for entry in entries.values()), default=1.0)
    if share != 1:
        lines += [f"These runs have {share:.0%} of the sessions, their rate, tiers and batch (`--share`).", ""]
    for section in (_by_model, _eviction, _capacity, _unsaturated):
        lines += section(runs)
    lines += _ratios() + _documents(document["documents"]) + _reload()
    lines += hybridserve.section(load("hybridserve"))
    # What the papers state is in the result file alone.
    assumed = (
        [row["what"], row["value"], row["source"]]
        for row in document["assumptions"]
        if not row["source"].startswith(("AttentionStore", "CaR"))
    )
    slowest = max(entries, key=lambda name: entries[name]["processor_s"])
    took = f"The longest run ({slowest}) took {entries[slowest]['processor_s']:.0f} s of a core."
    lines += [
        "## Assumptions", "",
        "What the papers leave open. What they state is in `benchmarks/results/paper_figures.json`.", "",
        *table("what | value | from", assumed), "", f"`{document['command']}`. {took}", "",
    ]  # fmt: skip
    (DOCS / "paper_figures.md").write_text("\n".join(lines), encoding="utf-8")


def _whole(figures: Figures, share: float) -> Figures:
    """Scale a run with a share of the sessions on that share of a machine to the whole, in seconds and dollars. Its
    decode steps take as long, its prefills are as many times fewer, and it pays for as many times less storage."""
    gpu_s = figures["decode_gpu_s"] + figures["prefill_gpu_s"] / share
    longer = gpu_s / (figures["decode_gpu_s"] + figures["prefill_gpu_s"])
    storage = figures["cost_storage"] / share * longer
    gpus = (figures["cost"] - figures["cost_storage"]) * longer
    return {**figures, "gpu_s": gpu_s, "cost": gpus + storage, "cost_storage": storage}


def _beside(ours: float, theirs: float, shown: str) -> str:
    """Return our number, marked if it is far off, and the paper's."""
    mark = "*" if abs(ours / theirs - 1) > NEAR else ""
    return f"{ours:{shown}}{mark} ({theirs:{shown}})"


def _of_models(runs: Runs, arm: str) -> Runs:
    """Model -> its run, where all models have one; else nothing."""
    names = {model: f"{model} {arm}" for model in FIGURE_MODELS}
    return {model: runs[name] for model, name in names.items()} if set(names.values()) <= runs.keys() else {}


def _ratio(kept: Figures, again: Figures, key: str) -> float:
    return float(kept[key] / again[key])


def _three(figures: Figures) -> str:
    return " / ".join(f"{figures[key]:.1%}" for key in ("hit_rate", "hit_rate_returning", "token_hit_rate"))


@dataclass(frozen=True, slots=True)
class _Compared:
    """A figure of AttentionStore with a number for every model."""

    number: str
    what: str
    unit: str
    shown: str
    paper: tuple[float, ...]
    """The figures of the paper, one for each of FIGURE_MODELS."""
    arms: tuple[str, ...]
    measure: Callable[..., float]
    """Takes the runs of a model in these arms."""


_COMPARED = (
    _Compared("13", "hit rate of all turns, 128 GB / 10 TB", "share of turns", ".1%", (0.86, 0.71, 0.89, 0.90),
              ("attentionstore", "attentionstore, seed 1", "attentionstore, seed 2"),
              lambda *seeds: fmean(run["hit_rate"] for run in seeds)),
    _Compared("14", "time to first token without queueing, saved", "", ".1%", (0.85, 0.61, 0.87, 0.86),
              ("attentionstore", "recompute"), lambda kept, again: 1 - _ratio(kept, again, "prefill_mean_s")),
    _Compared("15", "prefill throughput, times recompute's", "", ".1f", (6.8, 2.6, 7.8, 7.2),
              ("attentionstore", "recompute"), lambda kept, again: _ratio(kept, again, "prefill_tokens_per_s")),
    _Compared("16", "GPU time, times as fast", "", ".2f", (4.0, 1.9, 3.3, 3.4),
              ("attentionstore", "recompute"), lambda kept, again: _ratio(again, kept, "gpu_s")),
    _Compared("17", "cost, saved", "", ".1%", (0.70, 0.43, 0.66, 0.68),
              ("attentionstore", "recompute"), lambda kept, again: 1 - _ratio(kept, again, "cost")),
    _Compared("22", "points of hit rate lost without decoupled positions", "share of turns", ".1%",
              (0.176, 0.415, 0.181, 0.184),
              ("attentionstore", "overflow"), lambda kept, cut: float(kept["hit_rate"] - cut["hit_rate"])),
    _Compared("24", "hit rate with 10 GB of HBM and 128 GB of DRAM", "share of turns", ".1%",
              (0.034, 0.017, 0.077, 0.191), ("hbm+dram",), lambda run: float(run["hit_rate"])),
)  # fmt: skip


def _by_model(runs: Runs) -> list[str]:
    rows, parts = [], list[str]()
    for figure in _COMPARED:
        arms = [_of_models(runs, arm) for arm in figure.arms]
        if not all(arms):
            continue
        ours = {model: figure.measure(*(arm[model] for arm in arms)) for model in FIGURE_MODELS}
        cells = (
            _beside(value, theirs, figure.shown) for value, theirs in zip(ours.values(), figure.paper, strict=True)
        )
        rows.append([f"{figure.number}: {figure.what}", *cells])
        series = {"paper": figure.paper, "simulated": list(ours.values())}
        parts += plots.bars(f"fig{figure.number}", figure.what, figure.unit, list(ours), series)
        if figure.number == "24":
            parts += _mediums(runs)
        parts += [f"**Fig. {figure.number}.** {_NOTES[figure.number]}", ""] if figure.number in _NOTES else []
    if not rows:
        return []
    heads = " | ".join(("figure", *FIGURE_MODELS))
    return ["## AttentionStore, by model", "", *table(heads, rows), "", *parts]


def _mediums(runs: Runs) -> list[str]:
    arms = {"HBM": "hbm", "HBM + DRAM": "hbm+dram", "DRAM + SSD": "attentionstore"}
    found = {what: _of_models(runs, arm) for what, arm in arms.items()}
    hours = {what: [run["gpu_s"] / 3600 for run in of.values()] for what, of in found.items()}
    return (
        plots.bars("fig24b", "GPU time by medium", "hours", list(FIGURE_MODELS), hours) if all(found.values()) else []
    )


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
    rates = [run["hit_rate"] for run in found.values()]
    paper = [theirs for _, theirs in points.values()]
    rows = ([what, _beside(ours, theirs, ".1%")] for what, ours, theirs in zip(points, rates, paper, strict=True))
    faster = [found[f"LRU, {size} (fitted)"]["gpu_s"] / found[f"AttentionStore, {size}"]["gpu_s"]
              for size in ("2T", "10T")]  # fmt: skip
    hours = {"simulated": [run["gpu_s"] / 3600 for run in found.values()]}
    series = {"paper": paper, "simulated": rates}
    return [
        "## AttentionStore Fig. 21: policies and sizes (13B)", "",
        *plots.bars("fig21", "hit rate of all turns, LLaMA-13B", "share of turns", list(points), series),
        *table(" | hit rate of all turns", rows), "",
        *plots.bars("fig21b", "GPU time, LLaMA-13B", "hours", list(points), hours),
        f"Look-ahead is {faster[0]:.2f} times LRU's speed with 2T, {faster[1]:.2f} times with 10T (paper, Fig. 21b: up "
        "to 2.7 times).", "",
        _NOTES["21"].format(**{what: f"{runs[name]['hit_rate']:.1%}" for what, name in others.items()}), "",
    ]  # fmt: skip


def _capacity(runs: Runs) -> list[str]:
    found = {float(name.split()[-1]): run for name, run in sorted(runs.items()) if " capacity " in name}
    if not found:
        return []
    paper = {0.1: 0.51, 0.25: 0.98}
    rates = {"turns >= 2": "hit_rate_returning", "all turns": "hit_rate", "tokens": "token_hit_rate"}
    drawn = {what: [(ratio, found[ratio][key]) for ratio in sorted(found)] for what, key in rates.items()}
    rows = [[f"{ratio:g}", _beside(found[ratio]["hit_rate_returning"], theirs, ".1%")]
            for ratio, theirs in paper.items() if ratio in found]  # fmt: skip
    axes = ("capacity / (sessions an hour x window)", "hit rate")
    return [
        "## AttentionStore Fig. 23: capacity (13B, unsaturated, TTL 1 h)", "",
        *plots.lines("fig23", "hit rate by capacity, TTL 1 h", axes, drawn, list(paper.items())),
        *table("capacity / (sessions an hour x window) | hit rate of turns >= 2", rows), "",
        _NOTES["23"], "",
    ]  # fmt: skip


def _unsaturated(runs: Runs) -> list[str]:
    arms = [f"{BIG} unsaturated {arm}" for arm in ("recompute", "attentionstore", "lru")]
    if not set(arms) <= runs.keys():
        return []
    base, kept, lru = (runs[name] for name in arms)
    return [
        "## The same server with a short queue (13B)", "",
        f"With think times and {presets.UNSATURATED_RATE:g} sessions a second, look-ahead hits {_three(kept)} of all "
        f"turns, turns >= 2 and tokens, LRU {_three(lru)}. Mean TTFT: {base['ttft_mean_s'] * 1e3:.0f} ms recomputed, "
        f"{kept['ttft_mean_s'] * 1e3:.0f} ms reused. The published margins over LRU need a backlog.", "",
    ]  # fmt: skip


def _ratios() -> list[str]:
    """Return what the cost model alone says: a batch of 16 prompts of 1,000 tokens on one GPU."""
    shape = presets.SHAPES[BIG]
    costs = presets.costs(presets.one_gpu(shape))
    again_s = 16 * costs.prefill_s(1000, 0)
    labels, drawn = [], dict[str, list[float]]({"recompute": [], "no pre-loading": [], "layer by layer": []})
    for history in (500, 600, 700, 800, 900):
        new_s = 16 * costs.tokens_s(1000 - history, history)
        load_s = 16 * history * shape.kv_bytes_per_token / 26e9
        both_s = max(new_s, load_s + new_s / shape.num_layers)
        labels.append(f"{history} / {1000 - history}")
        for values, seconds in zip(drawn.values(), (again_s, load_s + new_s, both_s), strict=True):
            values.append(1e3 * seconds)
    first, last = (drawn["recompute"][place] / drawn["layer by layer"][place] for place in (0, -1))
    return [
        "## AttentionStore Fig. 18: recompute and reuse by share of history (13B, one A100)", "",
        *plots.bars("fig18", "prefill of 16 x 1K tokens by history / new tokens", "ms", labels, drawn),
        f"By the cost model alone, loading layer by layer is {first:.1f} times as fast as recomputing where half is "
        f"history, {last:.1f} times where nine tenths are. {_NOTES['18']}", "",
    ]  # fmt: skip


def _documents(found: dict[str, Any]) -> list[str]:
    """found: length of the document -> arm -> means of a question."""
    again, kept = (found["28000"][arm] for arm in ("recompute", "attentionstore"))
    faster = again["ttft_s"] / kept["ttft_s"]
    rows = (
        ["TTFT recomputed, s", _beside(again["ttft_s"], 2.5, ".2f")],
        ["TTFT reused, s", _beside(kept["ttft_s"], 0.12, ".2f")],
        ["TTFT saved", _beside(1 - 1 / faster, 0.95, ".0%")],
        ["prefill, times as fast", _beside(faster, 22, ".1f")],
        ["more output", _beside(again["gpu_s"] / kept["gpu_s"] - 1, 0.67, ".0%")],
    )
    arms = {"recompute": "recompute", "reuse": "attentionstore"}
    ttfts = {what: [(int(n) / 1000, row[arm]["ttft_s"]) for n, row in found.items()] for what, arm in arms.items()}
    rates = {what: [(int(n) / 1000, 64 / row[arm]["gpu_s"]) for n, row in found.items()] for what, arm in arms.items()}
    return [
        "## AttentionStore Fig. 25, 26: long documents (Mistral-7B, one A100, batch 1; turns 2 to 6)", "",
        *plots.lines("fig25", "TTFT by length of the document", ("K tokens", "s"), ttfts, [(28, 2.5), (28, 0.12)]),
        *plots.lines("fig26", "answers by length of the document", ("K tokens", "tokens a second"), rates),
        *table("document of 28,000 tokens | ", rows), "", _NOTES["25"], "",
    ]  # fmt: skip


def _reload() -> list[str]:
    drawn, saved = dict[str, list[float]]({"recompute": [], "reload": []}), []
    for name, shape in presets.CAR_SHAPES.items():
        costs = presets.costs(shape)
        again_s = costs.prefill_s(2048, 0)
        total_s = 2048 * shape.kv_bytes_per_token / 64e9 + costs.prefill_s(1, 2048)
        saved.append(f"{1 - total_s / again_s:.0%} ({name})")
        drawn["recompute"].append(1e3 * again_s)
        drawn["reload"].append(1e3 * total_s)
    return [
        "## CaR Fig. 5: recompute and reload (8 A100-40GB, CXL 64 GB/s)", "",
        *plots.bars("car5", "2K tokens: recompute and reload", "ms", list(presets.CAR_SHAPES), drawn),
        f"By the cost model alone, nothing overlapped, reloading 2K tokens saves {', '.join(saved)}. {_NOTES['car']}",
        "",
    ]  # fmt: skip


_NOTES = {
    "13": "Means of three workloads. Turns that open a session cannot hit. LLaMA-70B and Falcon-40B need so little KV "
    "that all of it fits: only first turns miss.",
    "14": "A third of a returning turn's 975 tokens is new, and hits compute no less. Fig. 15 is the same as a ratio.",
    "16": "Most of the GPU time here is decoding, which caching does not shorten. 4.0 times with prefills 6.8 times as "
    "fast means that recomputing takes seven times as long as decoding. At the stated prefill rate a step of the batch "
    "of 24 would have to take 1 ms; reading the weights alone takes 8. Fig. 17 follows from this.",
    "18": "Loads of long histories take longer than the computation of short prompts, which is why AttentionStore "
    "begins them before.",
    "21": "Four lengths and the order of FIFO were fitted to LRU and FIFO "
    "([how](decisions/0055-programs-that-answered-once.md)). FIFO has to mean that the session that began first "
    "leaves first: with a new place for every insertion it hits {by_insertion} with 10T. Told only of the first "
    "(C_mem + C_disk) / S_kv requests that wait, as the paper's formula reads, look-ahead hits {by_formula} with "
    "2T.",
    "22": "By the fitted lengths 44 % of the turns overflow a window of 4K and 96 % one of 2K. What is computed again "
    "then is saved here; if that turn misses as well, the drops come up to these shares. The paper's numbers lie "
    "between.",
    "23": "The paper does not say how long people think; with think times of half a minute a tenth is enough.",
    "24": "Small remainders of a rotation; within 3 points for all four.",
    "25": "A prompt's token attends to Mistral's sliding window of 4K, which meets the paper's 2.5 s. Reuse is bound "
    "by PCIe. The time of a decode step is from the paper's own share of 41 % for prefills.",
    "car": "The paper has 30 % for OPT-30B; its 60 % for OPT-13B is not explained by these rates.",
}
