"""What the simulated figures say: docs/paper_figures.md and its pictures, of what `figures_paper` has found."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from benchmarks.harness.result_files import DOCS, load
from benchmarks.paper import hybridserve, plots
from reprise.loadgen.sim import presets
from reprise.loadgen.sim.presets import FIGURE_MODELS

NEAR = 0.15  # of the paper's number: farther off wants a note
Figures = dict[str, Any]  # of `reprise.loadgen.sim.result.Result`


def write(document: dict[str, Any]) -> None:
    """Write about the runs that there are; a figure whose runs are missing is left out."""
    runs = {name: _whole(entry["figures"], entry["run"]["share"]) for name, entry in document["runs"].items()}
    share = min((entry["run"]["share"] for entry in document["runs"].values()), default=1.0)
    lines = [
        "# The papers' figures, simulated",
        "",
        "Drawn by `make figures`. The server's own queue and policy classes on a virtual clock, on the machines "
        "that the papers state; see `loadgen/sim/`. Only the four points of LRU and FIFO in Fig. 21 were fitted "
        "(`benchmarks/paper/fit.py`); all that is said of AttentionStore is a prediction. "
        "`reprise simulate` plays these settings and others, or a running server's machine as it has measured "
        "itself (`--server URL`), every policy beside recomputing.",
        "",
    ]
    if share != 1:
        lines += [
            f"These runs have {share:.0%} of the sessions, of their rate, of the tiers and of the batch (`--share`): "
            "hit rates and the times of single turns are about those of the whole; GPU time and cost are "
            "scaled to it.",
            "",
        ]
    for section in (_hits, _eviction, _times, _overflow, _capacity, _mediums, _unsaturated, _ratios):
        lines += section(runs)
    lines += _documents(document["documents"]) + _reload()
    if (offloaded := load("hybridserve")) is not None:
        lines += hybridserve.section(offloaded)
    lines += ["## Assumptions", "", "| what | value | from |", "|---|---|---|"]
    lines += [f"| {row['what']} | {row['value']} | {row['source']} |" for row in document["assumptions"]]
    lines += ["", f"`{document['command']}`. {_seconds(document['runs'])}", ""]
    (DOCS / "paper_figures.md").write_text("\n".join(lines), encoding="utf-8")


def _seconds(entries: dict[str, Any]) -> str:
    """How long simulating takes."""
    slowest = max(entries, key=lambda name: entries[name]["processor_s"])
    told = f"The longest run ({slowest}) took {entries[slowest]['processor_s']:.0f} s of a core"
    if (usual := entries.get("llama-13b attentionstore")) is not None:
        told += f", 13B with all tiers {usual['processor_s']:.0f} s"
    return f"{told}."


def _whole(figures: Figures, share: float) -> Figures:
    """Scale a run with a share of the sessions on that share of a machine to the whole, in seconds and dollars. Its
    decode steps take as long, its prefills are as many times fewer, and it pays for as many times less storage."""
    gpu_s = figures["decode_gpu_s"] + figures["prefill_gpu_s"] / share
    longer = gpu_s / (figures["decode_gpu_s"] + figures["prefill_gpu_s"])
    storage = figures["cost_storage"] / share * longer
    gpus = (figures["cost"] - figures["cost_storage"]) * longer
    return {**figures, "gpu_s": gpu_s, "cost": gpus + storage, "cost_storage": storage}


def _beside(header: Sequence[str], rows: Sequence[tuple[str, float, float, str]]) -> list[str]:
    """rows: (what, ours, the paper's, format)."""
    lines = [f"| {' | '.join([*header, 'off by'])} |", "|" + "---|" * (len(header) + 1)]
    for what, ours, paper, shown in rows:
        off = f"{ours / paper - 1:+.0%}" if paper else ""
        mark = " (see the note)" if paper and abs(ours / paper - 1) > NEAR else ""
        lines.append(f"| {what} | {ours:{shown}} | {paper:{shown}} | {off}{mark} |")
    return [*lines, ""]


def _have(runs: dict[str, Figures], *names: str) -> bool:
    return all(name in runs for name in names)


def _of_models(runs: dict[str, Figures], arm: str) -> dict[str, Figures]:
    """Model -> its run, where all models have one; else nothing."""
    names = {model: f"{model} {arm}" for model in FIGURE_MODELS}
    return {model: runs[name] for model, name in names.items()} if _have(runs, *names.values()) else {}


def _ratio(kept: Figures, again: Figures, key: str) -> float:
    return float(kept[key] / again[key])


def _three(figures: Figures) -> str:
    return " / ".join(f"{figures[key]:.1%}" for key in ("hit_rate", "hit_rate_returning", "token_hit_rate"))


def _hits(runs: dict[str, Figures]) -> list[str]:
    kept = _of_models(runs, "attentionstore")
    if not kept:
        return []
    paper = dict(zip(FIGURE_MODELS, (0.86, 0.71, 0.89, 0.90), strict=True))
    seeds = {
        model: [run["hit_rate"] for name, run in runs.items() if name.split(",")[0] == f"{model} attentionstore"]
        for model in kept
    }
    means = {model: fmean(rates) for model, rates in seeds.items()}
    lines = ["## AttentionStore Fig. 13: hit rate", ""]
    lines += plots.beside("fig13", "hit rate of all turns, 128 GB / 10 TB", "share of turns", list(kept),
                   list(means.values()), list(paper.values()))  # fmt: skip
    lines += _beside(("model", "simulated", "paper"), [(model, means[model], paper[model], ".1%") for model in kept])
    spread = "; ".join(f"{model} " + ", ".join(f"{rate:.1%}" for rate in seeds[model]) for model in kept)
    lines += [
        f"Means over {len(seeds[FIGURE_MODELS[0]])} workloads drawn alike: {spread}. All else is of the first.", "",
        "Three hit rates, of all turns / of turns from the second on / of prompt tokens:", "",
    ]  # fmt: skip
    for model, run in kept.items():
        dram = run["tier_hit_share"].get("dram", 0)
        lines.append(f"- {model}: {_three(run)}; of what was found, {dram:.1%} in DRAM (paper: 99.6 % for 13B)")
    return [*lines, "", _NOTES["13"], ""]


def _eviction(runs: dict[str, Figures]) -> list[str]:
    points = [
        ("LRU, 2T (fitted)", "llama-13b lru 2T", 0.129), ("FIFO, 2T (fitted)", "llama-13b fifo 2T", 0.095),
        ("AttentionStore, 2T", "llama-13b attentionstore 2T", 0.40), ("LRU, 10T (fitted)", "llama-13b lru 10T", 0.58),
        ("FIFO, 10T (fitted)", "llama-13b fifo 10T", 0.48), ("AttentionStore, 10T", "llama-13b attentionstore", 0.86),
    ]  # fmt: skip
    points = [point for point in points if point[1] in runs]
    if not points:
        return []
    lines = ["## AttentionStore Fig. 21: policies and sizes (13B)", ""]
    lines += plots.beside("fig21", "hit rate of all turns, LLaMA-13B", "share of turns", [point[0] for point in points],
                   [runs[point[1]]["hit_rate"] for point in points], [point[2] for point in points])  # fmt: skip
    lines += _beside(("", "simulated", "paper"), [(w, runs[n]["hit_rate"], p, ".1%") for w, n, p in points])
    lines += [
        "| | all turns / turns >= 2 / tokens | DRAM, disk share of what was found | GPU time, s |",
        "|---|---|---|---|",
    ]
    for what, name, _ in points:
        run, shares = runs[name], runs[name]["tier_hit_share"]
        lines.append(
            f"| {what} | {_three(run)} | {shares.get('dram', 0):.1%}, {shares.get('disk', 0):.1%} "
            f"| {run['gpu_s']:,.0f} |"
        )
    lines += [""]
    for size, kept in (("2T", "llama-13b attentionstore 2T"), ("10T", "llama-13b attentionstore")):
        others = {arm: f"llama-13b {arm.lower()} {size}" for arm in ("LRU", "FIFO")}
        if _have(runs, kept, *others.values()):
            faster = ", ".join(
                f"{runs[name]['gpu_s'] / runs[kept]['gpu_s']:.2f} times {arm}'s" for arm, name in others.items()
            )
            lines += [f"Fig. 21(b), {size}: look-ahead is {faster} speed (paper: up to 2.7 times).", ""]
    lines += plots.bars("fig21b", "GPU time, LLaMA-13B", "hours", [point[0] for point in points],
                        {"simulated": [runs[point[1]]["gpu_s"] / 3600 for point in points]})  # fmt: skip
    others = {"by_insertion": "llama-13b fifo by insertion 10T", "by_formula": "llama-13b eviction window 2T"}
    if _have(runs, *others.values()):
        lines += [_NOTES["21"].format(**{what: f"{runs[name]['hit_rate']:.1%}" for what, name in others.items()}), ""]
    return lines


def _times(runs: dict[str, Figures]) -> list[str]:
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
    for number, title, measure, paper, shown in kinds:
        ours = {model: measure(kept[model], again[model]) for model in FIGURE_MODELS}
        lines += [f"## AttentionStore Fig. {number}: {title}", ""]
        lines += plots.beside(f"fig{number}", title, "", list(ours), list(ours.values()), paper)
        lines += _beside(
            ("model", "simulated", "paper"), [(m, ours[m], p, shown) for m, p in zip(ours, paper, strict=True)]
        )
        if number == "14":
            both = [f"{m} {kept[m]['ttft_mean_s']:,.0f} s instead of {again[m]['ttft_mean_s']:,.0f}" for m in ours]
            lines += [f"With queueing, mean: {'; '.join(both)}.", ""]
        if number == "17":
            lines += ["Storage is " + ", ".join(f"{kept[m]['cost_storage'] / kept[m]['cost']:.1%} ({m})" for m in ours)
                      + " of the cost (paper: 16.4 / 9.0 / 9.0 / 9.0 %).", ""]  # fmt: skip
        lines += [_NOTES[number], ""]
    return lines


def _overflow(runs: dict[str, Figures]) -> list[str]:
    kept, cut = _of_models(runs, "attentionstore"), _of_models(runs, "overflow")
    if not (kept and cut):
        return []
    paper = dict(zip(FIGURE_MODELS, (0.176, 0.415, 0.181, 0.184), strict=True))
    drops = {model: kept[model]["hit_rate"] - cut[model]["hit_rate"] for model in FIGURE_MODELS}
    lines = ["## AttentionStore Fig. 22: hit rate lost where a cut invalidates what is saved", ""]
    lines += plots.beside("fig22", "points of hit rate lost without decoupled positions", "share of turns", list(drops),
                   list(drops.values()), list(paper.values()))  # fmt: skip
    lines += _beside(("model", "simulated", "paper"), [(model, drops[model], paper[model], ".1%") for model in drops])
    return [*lines, _NOTES["22"], ""]


def _capacity(runs: dict[str, Figures]) -> list[str]:
    found = {float(name.split()[-1]): run for name, run in runs.items() if " capacity " in name}
    if not found:
        return []
    paper = {0.1: 0.51, 0.25: 0.98}
    rates = {"turns >= 2": "hit_rate_returning", "all turns": "hit_rate", "tokens": "token_hit_rate"}
    lines = ["## AttentionStore Fig. 23: capacity (13B, unsaturated, TTL 1 h)", ""]
    axes = ("capacity / (sessions an hour x window)", "hit rate")
    lines += plots.lines("fig23", "hit rate by capacity, TTL 1 h", axes,
                         {what: [(ratio, found[ratio][key]) for ratio in sorted(found)] for what, key in rates.items()},
                         list(paper.items()))  # fmt: skip
    lines += [f"| RCC / CCpUT | {' | '.join(rates)} | paper | tokens of answers a GPU second |", "|" + "---|" * 6]
    for ratio, run in sorted(found.items()):
        shown = [f"{run[key]:.1%}" for key in rates.values()]
        shown += [f"{paper[ratio]:.0%}" if ratio in paper else "", f"{run['answer_tokens'] / run['gpu_s']:,.0f}"]
        lines.append(f"| {ratio:g} | {' | '.join(shown)} |")
    return [*lines, "", _NOTES["23"], ""]


def _mediums(runs: dict[str, Figures]) -> list[str]:
    hbm, dram = _of_models(runs, "hbm"), _of_models(runs, "hbm+dram")
    if not (hbm and dram):
        return []
    paper = dict(zip(FIGURE_MODELS, (0.034, 0.017, 0.077, 0.191), strict=True))
    lines = ["## AttentionStore Fig. 24: mediums", ""]
    lines += plots.beside("fig24", "hit rate with 10 GB of HBM and 128 GB of DRAM", "share of turns", list(dram),
                   [run["hit_rate"] for run in dram.values()], list(paper.values()))  # fmt: skip
    lines += _beside(
        ("model", "HBM + DRAM", "paper"), [(m, run["hit_rate"], paper[m], ".1%") for m, run in dram.items()]
    )
    lines += [
        "HBM alone: " + ", ".join(f"{run['hit_rate']:.1%} ({m})" for m, run in hbm.items()) + " (paper: about 0).",
        "",
    ]
    arms = {"HBM": hbm, "HBM + DRAM": dram, "DRAM + SSD": _of_models(runs, "attentionstore")}
    if all(arms.values()):
        hours = {arm: [run["gpu_s"] / 3600 for run in found.values()] for arm, found in arms.items()}
        lines += plots.bars("fig24b", "GPU time by medium", "hours", list(FIGURE_MODELS), hours)
    return [*lines, _NOTES["24"], ""]


def _ratios(_: dict[str, Figures]) -> list[str]:
    """What the cost model alone says: a batch of 16 prompts of 1,000 tokens on one GPU."""
    shape = presets.SHAPES["llama-13b"]
    costs = presets.costs(presets.one_gpu(shape))
    again_s = 16 * costs.prefill_s(1000, 0)
    lines = ["## AttentionStore Fig. 18: recompute and reuse by share of history (13B, one A100, 16 x 1K tokens)", "",
             "| history / new | compute new, ms | load history, ms | layer by layer, ms | recompute, ms | times |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    drawn: dict[str, list[float]] = {"recompute": [], "no pre-loading": [], "layer by layer": []}
    histories = (500, 600, 700, 800, 900)
    for history in histories:
        new_s = 16 * costs.tokens_s(1000 - history, history)
        load_s = 16 * history * shape.kv_bytes_per_token / 26e9
        both_s = max(new_s, load_s + new_s / shape.num_layers)
        lines.append(f"| {history} / {1000 - history} | {new_s * 1e3:.0f} | {load_s * 1e3:.0f} | {both_s * 1e3:.0f} "
                     f"| {again_s * 1e3:.0f} | {again_s / both_s:.2f} |")  # fmt: skip
        for values, seconds in zip(drawn.values(), (again_s, load_s + new_s, both_s), strict=True):
            values.append(1e3 * seconds)
    labels = [f"{history} / {1000 - history}" for history in histories]
    picture = plots.bars("fig18", "prefill of 16 x 1K tokens by history / new tokens", "ms", labels, drawn)
    return [*lines, "", *picture, _NOTES["18"], ""]


def _documents(rows: dict[str, Any]) -> list[str]:
    """rows: length of the document -> arm -> means of a question."""
    lines = ["## AttentionStore Fig. 25, 26: long documents (Mistral-7B, one A100, batch 1; turns 2 to 6)", "",
             "| document | TTFT recompute, s | reuse, s | saved | prefill, times | GPU time saved | output rate |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    for length, row in rows.items():
        again, kept = row["recompute"], row["attentionstore"]
        faster = again["ttft_s"] / kept["ttft_s"]
        lines.append(
            f"| {int(length):,} | {again['ttft_s']:.2f} | {kept['ttft_s']:.3f} "
            f"| {1 - 1 / faster:.0%} | {faster:.1f} | {1 - kept['gpu_s'] / again['gpu_s']:.0%} "
            f"| {again['gpu_s'] / kept['gpu_s'] - 1:+.0%} |"
        )
    lines += [""]
    arms = {"recompute": "recompute", "reuse": "attentionstore"}
    ttfts = {what: [(int(n) / 1000, row[arm]["ttft_s"]) for n, row in rows.items()] for what, arm in arms.items()}
    lines += plots.lines("fig25", "TTFT by length of the document", ("K tokens", "s"), ttfts, [(28, 2.5), (28, 0.12)])
    rates = {what: [(int(n) / 1000, 64 / row[arm]["gpu_s"]) for n, row in rows.items()] for what, arm in arms.items()}
    lines += plots.lines("fig26", "answers by length of the document", ("K tokens", "tokens a second"), rates)
    return [
        *lines,
        "Paper, at 28K: 2.5 s, about 0.12 s, 95 %, 22 times; output up to 67 % more.",
        "",
        _NOTES["25"],
        "",
    ]


def _reload() -> list[str]:
    lines = ["## CaR Fig. 5: recompute and reload (8 A100-40GB, CXL 64 GB/s)", "",
             "| model | tokens | recompute, ms | reload, ms | saved |", "|---|---|---|---|---|"]  # fmt: skip
    drawn: dict[str, list[float]] = {"recompute": [], "reload": []}
    for name, shape in presets.CAR_SHAPES.items():
        costs = presets.costs(shape)
        for tokens in (1024, 2048):
            again_s = costs.prefill_s(tokens, 0)
            load_s = tokens * shape.kv_bytes_per_token / 64e9
            total_s = load_s + costs.prefill_s(1, tokens)
            lines.append(
                f"| {name} | {tokens:,} | {again_s * 1e3:.0f} | {total_s * 1e3:.0f} | {1 - total_s / again_s:.0%} |"
            )
            if tokens == 2048:
                drawn["recompute"].append(1e3 * again_s)
                drawn["reload"].append(1e3 * total_s)
    picture = plots.bars("car5", "2K tokens: recompute and reload", "ms", list(presets.CAR_SHAPES), drawn)
    return [*lines, "", *picture, _NOTES["car"], ""]


def _unsaturated(runs: dict[str, Figures]) -> list[str]:
    again = {
        model: runs[f"{model} unsaturated recompute"]
        for model in FIGURE_MODELS
        if f"{model} unsaturated recompute" in runs
    }
    names = ("llama-13b unsaturated attentionstore", "llama-13b unsaturated lru")
    if not _have(runs, *names) or "llama-13b" not in again:
        return []
    kept, lru = (runs[name] for name in names)
    base = again["llama-13b"]
    return [
        "## The same server with a short queue (13B)", "",
        f"With think times and {presets.UNSATURATED_RATE:g} sessions a second the queue holds seconds of work, not "
        f"hours, and all that returns finds its KV under any policy: look-ahead hits "
        f"{kept['hit_rate_returning']:.1%} of the turns from the second on, LRU "
        f"{lru['hit_rate_returning']:.1%} (all turns / turns >= 2 / tokens: {_three(kept)} and {_three(lru)}). TTFT, "
        f"mean, queueing included: {base['ttft_mean_s'] * 1e3:.0f} ms recomputed, {kept['ttft_mean_s'] * 1e3:.0f} ms "
        f"reused; without queueing {1 - _ratio(kept, base, 'prefill_mean_s'):.0%} less (paper, Fig. 14: 85 %); prefill "
        f"throughput {_ratio(kept, base, 'prefill_tokens_per_s'):.1f} times; GPU time "
        f"{_ratio(base, kept, 'gpu_s'):.2f} times as fast. The published margins over LRU need a backlog.", "",
    ]  # fmt: skip


_NOTES = {
    "13": "Note: nothing was fitted to these four. Turns that open a session cannot hit; how many of those counted do "
    "depends on how far a server is behind when sessions come, and so on how fast it is, which LRU and FIFO in "
    "Fig. 21 tell only roughly: many settings a step away meet these about as well. With 1,000 tokens a turn "
    "for 975 (squares of 16.6 for 16.1) the means were 88, 73, 92.1 and 88 %. LLaMA-70B "
    "and Falcon-40B need so little KV that all of it fits: their misses are first turns alone.",
    "14": "Note: of the turns after the first, a third of the 975 tokens is new, and hits compute no less.",
    "15": "Note: the same numbers as Fig. 14, as a ratio.",
    "16": "Note: here most of the GPU time is decoding, which caching does not shorten. 4.0 times with prefills 6.8"
    " times as fast means that recomputing takes seven times as long as decoding. At the stated prefill rate "
    "(0.14 s for a prompt of 2K tokens, 13B) and some 650 tokens an answer, a step of the batch of 24 would "
    "have to take 1 ms; reading the weights alone takes 8. LLaMA-65B waits for its disk besides.",
    "17": "Note: follows from GPU time (Fig. 16): where decoding decides how long it takes, storage is paid for and"
    " little is saved.",
    "18": "Note: by the cost model alone; without a read buffer the load of long histories is longer than the "
    "computation of short prompts, which is why AttentionStore begins it before (Fig. 19, 20: measured on the"
    " real server, see results.md).",
    "21": "Note: four lengths and the order of FIFO were fitted to the four points of LRU and FIFO "
    "(`benchmarks/results/fit_paper.json`: no half step from there is better, nor is another share of HBM's "
    "bandwidth), which are met within 2 points of hit rate, means of three workloads, but for FIFO with 10T, by 3.5. "
    "What it takes: sessions that open with a long prompt, so that what is kept fills the window from the "
    "start, and a FIFO in which who began first leaves first, also when its KV was evicted and saved again in "
    "between; with a new place for every new insertion FIFO hits as much as LRU or more ({by_insertion} "
    "with 10T). Look-ahead's policy knows all who wait: told only of the first (C_mem + C_disk) / S_kv of them, as "
    "the paper's formula reads, it has no order for the others, lets those go that come next and hits {by_formula} "
    "with 2T; the paper's example, too, lets the last in line go. (b) GPU time hardly depends on hits, for the reason "
    "given with Fig. 16.",
    "22": "Note: by the fitted lengths 44 % of the turns overflow a window of 4K and 96 % one of 2K, most of them "
    "in the middle of an answer. What is computed again then is saved here, and the next turn finds"
    " it; if, as the paper may mean, that turn misses as well, the drops come up to these shares. The "
    "paper's numbers lie between.",
    "23": "Note: the paper does not say how long people think, which decides how much of an hour's sessions is "
    "alive at once; with think times of half a minute a tenth is enough. The ratio is of the disk; 128 GB of "
    "DRAM hold copies.",
    "24": "Note: small remainders of a rotation, in proportion to capacity over all the KV that waits: within 3"
    " points for all four.",
    "25": "Note: a prompt's token attends to Mistral's sliding window of 4K, which meets the paper's 2.5 s. "
    "Reuse is bound by PCIe: 28K tokens of .131 MB take 141 ms at 26 GB/s. The time of a decode step is "
    "from the paper's own share of 41 % for prefills, so the output rate follows from it.",
    "car": "Note: by the cost model alone, nothing overlapped, prefills at the rate that AttentionStore states. "
    "Bytes grow with layers and width, computation with parameters, so larger models save more. OPT-30B comes"
    " near the paper's 30 %; its 60 % for OPT-13B is not explained by these rates.",
}
