"""Draws the committed results: docs/*.png and docs/results/*.md.

python -m benchmarks.figures.draw
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.claims.read import machine_of
from benchmarks.figures import codecs, cpu, drafts, gpu, int8_pages, scheduling
from benchmarks.figures.fleet import fleet_sections
from benchmarks.figures.panels import panels, save_panels, table, titled
from benchmarks.figures.tiers import tier_sections
from benchmarks.figures.truncation import draw as draw_truncation
from benchmarks.figures.truncation import section as truncation_section
from benchmarks.harness.result_files import BLUE, DOCS, GREY, command_of, load

SHOWN_TURNS = (1, 2, 5, 10)  # rows of a table beside the picture, which has all turns


def draw_replay(result: dict[str, Any], out: Path) -> None:
    """Time to first token by turn."""
    figure, axes = panels(1)
    turns = [row["turn"] for row in result["by_turn"]]
    for mode, color, label in (("recompute", GREY, "computes the history again"), ("prefix", BLUE, "keeps it")):
        values = [row[f"{mode}_ttft_ms_p50"] for row in result["by_turn"]]
        axes[0].plot(turns, values, marker="o", color=color, label=label)
        axes[0].annotate(f"{values[-1]:.0f} ms", (turns[-1], values[-1]), xytext=(4, 5), textcoords="offset points")
    limits = (0.7, turns[-1] + 1.2)
    axes[0].set(xlabel="turn of the conversation", xticks=turns, ylim=(0, None), xlim=limits)
    axes[0].set(title="SmolLM2-135M-Instruct", ylabel="time to first token, p50, ms")
    axes[0].legend(frameon=False)
    save_panels(figure, axes, out)


def machine(result: dict[str, Any]) -> str:
    date, commit = result.get("finished", "")[:10], result["machine"]["commit"]
    return f"`{command_of(result)}`; {machine_of(result)}; {date}, {commit}."


def speed_section(result: dict[str, Any]) -> list[str]:
    arms, ratios = result["arms"], result["ratios"]
    rows = (
        [name, *(f"{a[name]['median']:,.1f} ({a[name]['min']:,.1f} to {a[name]['max']:,.1f})" for a in arms.values()),
         f"{ratios['transformers'][name]:.2f}"]
        for name in arms["reprise"]
    )  # fmt: skip
    return titled(
        "Raw speed beside transformers",
        "Random Llama (hidden 768, 12 layers, 12 heads, 4 KV heads, intermediate 2048, vocabulary 16,384; bf16), "
        f"{result['context']} prompt tokens a stream, caches off, medians of interleaved rounds (least to most). "
        "*transformers* is vanilla `generate`, in process, as a user starts it; *+malloc* has the allocator settings "
        "of our engine process.",
        table(" | ".join(("", *arms, "reprise / transformers")), rows),
        "Prefill: more is better. TPOT: less is better. All cores together read memory at "
        f"{result['memory_read_gb_s']} GB/s, and a decode step reads all weights but the embedding, 176 MB.",
        machine(result),
    )


def dialogues(pictures: Path) -> list[str]:
    result = load("replay_dialogues_smollm2")
    draw_replay(result, pictures / "ttft_by_turn.png")
    rows = (
        [row["turn"], f"{row['prompt_tokens_p50']:.0f}", f"{row['prefix_ttft_ms_p50']:.1f}",
         f"{row['recompute_ttft_ms_p50']:.1f}", f"{row['recompute_ttft_ms_p50'] / row['prefix_ttft_ms_p50']:.2f}"]
        for row in result["by_turn"]
        if row["turn"] in SHOWN_TURNS
    )  # fmt: skip
    return titled(
        "Real dialogues, reuse against recompute",
        "![TTFT by turn](ttft_by_turn.png)",
        "User turns of Topical-Chat as recorded, answers generated greedily in float32 by SmolLM2-135M-Instruct (at "
        "most 32 tokens), the same requests to two servers that differ in `cache.mode`, turn about. "
        f"{result['dialogues']} dialogues, {result['turns']} turns, {result['generated_tokens']} tokens generated on "
        f"each server, 8 conversations at once. {result['cached_ratio']:.2%} of the history tokens came from the cache "
        f"from the second turn on; {len(result['differences'])} differences in text, {len(result['errors'])} errors.",
        table("turn | prompt tokens p50 | TTFT p50 `prefix`, ms | TTFT p50 `recompute`, ms | ratio", rows),
        machine(result),
    )  # fmt: skip


def speed(pictures: Path) -> list[str]:
    lines = speed_section(load("raw_speed"))
    for name, module, picture in (
        ("cpu_speed", cpu, "packed"), ("drafts_smollm2", drafts, "drafts"), ("int8_pages_smollm2", int8_pages, "int8"),
    ):  # fmt: skip
        result = load(name)
        module.draw(result, pictures / f"{picture}.png")
        lines += module.section(result, machine(result))
    gpu.draw(load("gpu_day"), pictures / "gpu.png")
    return lines


def texts(pictures: Path) -> list[str]:
    cut = load("truncation_smollm2")
    draw_truncation(cut["parts"], pictures / "truncation.png")
    return [*codecs.sections(load, machine, pictures), *truncation_section(cut["parts"]), machine(cut), ""]


PAGES: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "speed": ("Speed of the model", speed),
    "tiers": ("Tiers below HBM", lambda pictures: dialogues(pictures) + tier_sections(load, machine, pictures)),
    "texts": ("What changes a text", texts),
    "scheduling": ("The order of requests", lambda pictures: scheduling.sections(load, machine, pictures)),
    "fleet": ("Fleets", lambda _: fleet_sections(load, machine)),
}
"""Name -> title and content of each page in docs/results/."""
INTRODUCTION = (
    "[All results](../results.md), with a number on every line. The aims of a section are `held` in its file in "
    "`benchmarks/results/`."
)


def page(name: str, pictures: Path) -> str:
    """Draw a page's pictures into a folder, and return its text."""
    title, sections = PAGES[name]
    lines = [f"# {title}", "", INTRODUCTION, "", *sections(pictures)]
    return re.sub(r"\]\(([a-z0-9_]+\.(?:png|md))", r"](../\1", "\n".join(lines)).rstrip() + "\n"


def main() -> None:
    (DOCS / "results").mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        (DOCS / "results" / f"{name}.md").write_text(page(name, DOCS), encoding="utf-8")


if __name__ == "__main__":
    main()
