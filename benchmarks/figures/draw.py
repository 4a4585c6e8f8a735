"""Draws the committed results: docs/*.png and docs/results/*.md.

python -m benchmarks.figures.draw
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.claims.read import machine_of
from benchmarks.figures import classes as classes_figure
from benchmarks.figures import codecs, coded_capacity, cpu, drafts, gpu, int8_pages, sparsity
from benchmarks.figures.fleet import fleet_sections
from benchmarks.figures.tiers import tier_sections
from benchmarks.figures.truncation import all_parts, truncation_results
from benchmarks.figures.truncation import draw as draw_truncation
from benchmarks.figures.truncation import section as truncation_section
from benchmarks.harness.result_files import BLUE, DOCS, GREY, command_of, load
from benchmarks.scheduling.report import DEFAULT, POLICIES

MEASURES = ("mean", "p50", "p95", "p99")
POISSON = {
    "First tokens under load": "poisson",
    "First tokens where a queue stands": "poisson_load",
}


def draw_replay(results: dict[str, dict[str, Any]], out: Path) -> None:
    """Time to first token by turn, one panel per model."""
    figure, axes = plt.subplots(1, len(results), figsize=(5.2 * len(results), 3.8), squeeze=False)
    for axis, (title, result) in zip(axes[0], results.items(), strict=True):
        turns = [row["turn"] for row in result["by_turn"]]
        for mode, color, label in (("recompute", GREY, "computes the history again"), ("prefix", BLUE, "keeps it")):
            values = [row[f"{mode}_ttft_ms_p50"] for row in result["by_turn"]]
            axis.plot(turns, values, marker="o", color=color, label=label)
            axis.annotate(f"{values[-1]:.0f} ms", (turns[-1], values[-1]), xytext=(4, 5), textcoords="offset points")
        axis.set(
            title=title, xlabel="turn of the conversation", xticks=turns, ylim=(0, None), xlim=(0.7, turns[-1] + 1.2)
        )
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("time to first token, p50, ms")
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)


def machine(result: dict[str, Any]) -> str:
    date, commit = result.get("finished", "")[:10], result["machine"]["commit"]
    return f"`{command_of(result)}`; {machine_of(result)}; {date}, {commit}."


def replay_section(title: str, result: dict[str, Any]) -> list[str]:
    lines = [
        f"### {title}",
        "",
        f"{result['dialogues']} dialogues, {result['turns']} turns, {result['generated_tokens']} tokens generated on "
        f"each server, 8 conversations at once. {result['cached_ratio']:.2%} of the history tokens came from the cache "
        f"from the second turn on; {len(result['differences'])} differences in text, {len(result['errors'])} errors.",
        "",
        "| turn | conversations | prompt tokens p50 | TTFT p50 `prefix`, ms | TTFT p50 `recompute`, ms | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["by_turn"]:
        ours, theirs = row["prefix_ttft_ms_p50"], row["recompute_ttft_ms_p50"]
        lines.append(
            f"| {row['turn']} | {row['conversations']} | {row['prompt_tokens_p50']:.0f} | {ours:.1f} | {theirs:.1f} "
            f"| {theirs / ours:.2f} |"
        )
    return [*lines, "", machine(result), ""]


def speed_section(result: dict[str, Any]) -> list[str]:
    arms, ratios = result["arms"], result["ratios"]
    lines = [
        "## Raw speed beside transformers",
        "",
        "Random Llama (hidden 768, 12 layers, 12 heads, 4 KV heads, intermediate 2048, vocabulary 16,384; bf16), "
        f"{result['context']} prompt tokens a stream, caches off, medians of interleaved rounds (least to most). "
        "*transformers* is vanilla `generate`, in process, as a user starts it; *+malloc* has the allocator settings "
        "of our engine process.",
        "",
        "| | " + " | ".join(arms) + " | " + " | ".join(f"ratio to {against}" for against in ratios) + " |",
        "|---" * (1 + len(arms) + len(ratios)) + "|",
    ]
    for name in arms["reprise"]:
        cells = [f"{a[name]['median']:,.1f} ({a[name]['min']:,.1f} to {a[name]['max']:,.1f})" for a in arms.values()]
        cells += [f"{ratio[name]:.2f}" for ratio in ratios.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "Prefill: more is better. TPOT: less is better. All cores together read memory at "]
    lines[-1] += f"{result['memory_read_gb_s']} GB/s, and a decode step reads all weights but the embedding, 176 MB."
    return [*lines, "", machine(result), ""]


def schedulers_section(result: dict[str, Any]) -> list[str]:
    link = result["calibration"]
    lines = [
        "## Who starts next",
        "",
        f"24 conversations of a random 125 M-shape model (bf16), HBM and DRAM for a third of them, the rest on a disk "
        f"throttled to {link['disk_gbps']:.2f} GB/s: a mean history takes {link['load_s'] * 1e3:.0f} ms to load, its "
        f"turn's new tokens {link['prefill_s'] * 1e3:.0f} ms to compute. Rates are shares of "
        f"{link['service_rate']:.1f} turns a second. Times in ms; a load is hidden when it holds "
        "up its step by no more than 20 ms.",
        "",
        *([result["notes"], ""] if "notes" in result else []),
        "| rate | policy | TTFT mean | p50 | p95 | p99 | longest wait, class 1 / 2 / 3 | finished or hidden "
        "| goodput, 1/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rate, ratios in result["ratios"].items():
        for policy, arm in ((policy, legs[rate]) for policy, legs in result["arms"].items()):
            ttft, waits = arm["ttft_ms"], arm["max_wait_ms_by_class"]
            lines.append(
                f"| {float(rate):.0%} | {policy} | {' | '.join(f'{ttft[measure]:.0f}' for measure in MEASURES)} "
                f"| {' / '.join(f'{waits[key]:.0f}' for key in sorted(waits))} | {arm['loads_hidden']:.1%} "
                f"| {arm['goodput']:.2f} |"
            )
        for name, found in ratios.items():
            cells = " | ".join(f"{found[measure]:.2f}" for measure in MEASURES)
            lines.append(f"| | *{name}* | {cells} | | | |")
    lines += ["", "; ".join(f"{name}: {'yes' if held else 'NO'}" for name, held in result["held"].items()) + "."]
    return [*lines, "", overtakes_of(result), "", machine(result), ""]


def overtakes_of(result: dict[str, Any]) -> str:
    """How often `car-hidden` has put a turn before another, which is all that it does with an order."""
    legs = result["arms"][DEFAULT].values()
    overtakes, turns = sum(leg["overtakes"] for leg in legs), sum(leg["turns"] for leg in legs)
    text = f"Overtakes by `{DEFAULT}`: {overtakes} in {turns} turns."
    if overtakes > turns / 100:
        return text
    return (
        f"{text} Its order was that of arrival, as with `fcfs`: loads that hide are no reason to go first. So the "
        "ratios say how far runs of one and the same order are apart on this machine, and those of the second FCFS "
        "server, `fcfs-again`, the same."
    )


def foretold_section(result: dict[str, Any]) -> list[str]:
    against = [f"{DEFAULT}/fcfs", f"{DEFAULT}/priority"]
    lines = [
        "The same turns on the simulator (`python -m benchmarks.scheduling.foretold`), where a machine's speed never "
        f"changes: {result['rounds']} rounds, TTFT mean / p50 / p95 in ms, p95 of "
        f"`{DEFAULT}` in units of the others over all rounds (95 % interval):",
        "",
        *([result["notes"], ""] if "notes" in result else []),
        f"| load / new tokens | rate | {' | '.join(POLICIES)} | {' | '.join(against)} |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        times = " | ".join(
            " / ".join(f"{row['ttft_ms'][policy][measure]:.0f}" for measure in ("mean", "p50", "p95"))
            for policy in POLICIES
        )
        ratios = " | ".join(
            f"{found['p95']:.2f} ({found['interval'][0]:.2f} to {found['interval'][1]:.2f})"
            for found in (row[name] for name in against)
        )
        lines.append(f"| {row['load_factor']:g} | {row['share']:.0%} | {times} | {ratios} |")
    return [
        *lines,
        "",
        "Look-ahead and the timer serve every policy, so where a load takes no longer than the new tokens, nearly all "
        "are hidden whatever the order, and jobs of one size finish no sooner on the whole for being reordered. Order "
        "gains where the link is short, and what gains is the priority order: the window costs a little of it.",
        "",
    ]


def poisson_section(title: str, result: dict[str, Any]) -> list[str]:
    """First tokens and gaps of every server, and what the default loses against `fcfs-0`."""
    kinds = {"returning": ("p50", "mean", "p95"), "first": ("p50", "mean", "p95"), "tpot": ("p50",), "itl": ("p99",)}
    lines = [
        f"## {title}",
        "",
        "{conversations} conversations a round, {rate:g} a second by Poisson, {turns} turns of a random 125 M-shape "
        "model (bf16): first prompts of {first_tokens} tokens, then {more_tokens} more {think_s:g} s after each answer "
        "of {answer_tokens}. Times in ms.".format(**result["workload"]),
        "",
        "| server | returning turns, TTFT p50 / mean / p95 | first turns | TPOT p50 | ITL p99 | tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for arm, found in result["arms"].items():
        cells = [" / ".join(f"{found[kind][figure]:.0f}" for figure in figures) for kind, figures in kinds.items()]
        lines.append(f"| {arm} | " + " | ".join(cells) + f" | {found['tokens_per_s']:.1f} |")
    lines += ["", "; ".join(f"{name}: {'yes' if held else 'NO'}" for name, held in result["held"].items()) + "."]
    if result["lost"]:
        lines += ["", "The default loses: " + "; ".join(result["lost"]) + "."]
    return [*lines, "", machine(result), ""]


def dialogues() -> list[str]:
    titles = {"bundled model (5.6 M)": "replay_dialogues", "SmolLM2-135M-Instruct": "replay_dialogues_smollm2"}
    replays = {title: result for title, name in titles.items() if (result := load(name)) is not None}
    draw_replay(replays, DOCS / "ttft_by_turn.png")
    lines = [
        "## Real dialogues, reuse against recompute",
        "",
        "![TTFT by turn](ttft_by_turn.png)",
        "",
        "User turns of Topical-Chat as recorded, answers generated greedily in float32 (at most 32 tokens), the "
        "same requests to two servers that differ in `cache.mode`, turn about.",
        "",
    ]
    return lines + [line for title, result in replays.items() for line in replay_section(title, result)]


def speed() -> list[str]:
    lines = []
    if (raw := load("raw_speed")) is not None:
        lines += speed_section(raw)
    if (on_cpu := load("cpu_speed")) is not None:
        cpu.draw(on_cpu, DOCS / "packed.png")
        lines += cpu.section(on_cpu, machine(on_cpu))
    if (drafted := load("drafts_smollm2")) is not None:
        drafts.draw(drafted, DOCS / "drafts.png")
        lines += drafts.section(drafted, machine(drafted))
    if (packed := load("int8_pages_smollm2")) is not None:
        int8_pages.draw(packed, DOCS / "int8.png")
        lines += int8_pages.section(packed, machine(packed))
    if (on_gpu := load("gpu_day")) is not None:
        gpu.draw(on_gpu, DOCS / "gpu.png")
    return lines


def tiers() -> list[str]:
    lines = dialogues() + tier_sections(load, machine, DOCS)
    if (capacity := load("coded_capacity")) is not None:
        coded_capacity.draw(capacity, DOCS / "coded_capacity.png")
        lines += coded_capacity.section(capacity, machine(capacity))
    return lines


def texts() -> list[str]:
    lines = codecs.sections(load, machine, DOCS)
    sparse = {"SmolLM2-135M-Instruct": load("sparsity_smollm2"), "bundled model (5.6 M)": load("sparsity")}
    if found := {title: result for title, result in sparse.items() if result is not None}:
        sparsity.draw(found, DOCS / "sparsity.png")
        lines += sparsity.section(found, [machine(result) for result in found.values()])
    if cuts := truncation_results():
        parts = all_parts(cuts)
        draw_truncation(parts, DOCS / "truncation.png")
        lines += truncation_section(parts)
        lines += [line for result in cuts for line in (machine(result), "")]
    return lines


def scheduling() -> list[str]:
    lines = []
    if (schedulers := load("schedulers")) is not None:
        lines += schedulers_section(schedulers)
        if (foretold := load("schedulers_foretold")) is not None:
            lines += foretold_section(foretold)
    if (classes := load("classes_foretold")) is not None:
        classes_figure.draw(classes_figure.drawn(classes), DOCS / "classes.png")
        lines += classes_figure.section(classes, machine(classes))
        if (served := load("classes")) is not None:
            lines += classes_figure.server_section(served, machine(served))
    for title, name in POISSON.items():
        if (result := load(name)) is not None:
            lines += poisson_section(title, result)
    return lines


PAGES: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "speed": ("Speed of the model", speed),
    "tiers": ("Tiers below HBM", tiers),
    "texts": ("What changes a text", texts),
    "scheduling": ("The order of requests", scheduling),
    "fleet": ("Fleets", lambda: fleet_sections(load, machine)),
}
"""Name -> title and content of each page in docs/results/."""


def main() -> None:
    (DOCS / "results").mkdir(parents=True, exist_ok=True)
    for name, (title, sections) in PAGES.items():
        lines = [f"# {title}", "", "[All results](../results.md), with a number on every line.", "", *sections()]
        text = re.sub(r"\]\(([a-z0-9_]+\.(?:png|md))", r"](../\1", "\n".join(lines))
        (DOCS / "results" / f"{name}.md").write_text(text.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
