"""Draws the committed results: docs/*.png and docs/results/*.md.

python -m benchmarks.figures.draw
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.claims.read import machine_of
from benchmarks.figures import codecs, cpu, drafts, fleet, gpu, hierarchy, int8_pages, modes, scheduling, truncation
from benchmarks.figures.panels import panels, save_panels, table, titled
from benchmarks.harness.result_files import BLUE, DOCS, GREY, command_of, load

SHOWN_TURNS = (1, 2, 5, 10)  # rows of a table beside the picture, which has all turns


def draw_replay(result: dict[str, Any], out: Path) -> None:
    """Draw the time to first token by turn, with prefix caching and with recomputing, into `out`."""
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


def speed_section(result: dict[str, Any], machine: str) -> list[str]:
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
        machine,
    )


def replay_section(result: dict[str, Any], machine: str) -> list[str]:
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
        machine,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Section:
    """The part of a page that shows one result. lines: returns the section's lines, given the result and a line on how
    it was measured. draw: draws the section's picture into a file."""

    result: str
    lines: Callable[[dict[str, Any], str], list[str]]
    picture: str = ""
    draw: Callable[[dict[str, Any], Path], None] | None = None


PAGES: dict[str, tuple[str, list[Section]]] = {
    "speed": (
        "Speed of the model",
        [
            Section("raw_speed", speed_section),
            Section("cpu_speed", cpu.section, "packed", cpu.draw),
            Section("drafts_smollm2", drafts.section, "drafts", drafts.draw),
            Section("int8_pages_smollm2", int8_pages.section, "int8", int8_pages.draw),
        ],
    ),
    "tiers": (
        "Tiers below HBM",
        [
            Section("modes", modes.section),
            Section("replay_dialogues_smollm2", replay_section, "ttft_by_turn", draw_replay),
            Section("hierarchy", hierarchy.section, "hierarchy", hierarchy.draw),
        ],
    ),
    "texts": (
        "What changes a text",
        [
            Section("codecs_smollm2", codecs.section, "codecs", codecs.draw),
            Section("codec_speed_smollm2", codecs.speed_section),
            Section("activations", codecs.activation_section),
            Section("selectors_speed_smollm2", codecs.selector_section),
            Section("selectors_smollm2", codecs.reading_section, "selectors", codecs.draw_selectors),
            Section("weights", codecs.weight_section),
            Section("truncation_text_smollm2", truncation.text_section, "truncation_text", truncation.draw_losses),
            Section("truncation_smollm2", truncation.time_section, "truncation", truncation.draw_times),
        ],
    ),
    "scheduling": (
        "The order of requests",
        [
            Section("scheduling_simulated", scheduling.simulated_section, "classes", scheduling.draw),
            Section("scheduling_served", scheduling.served_section),
        ],
    ),
    "fleet": (
        "Fleets",
        [
            Section("fleet_moves", fleet.moves),
            Section("fleet_kills", fleet.kills),
            Section("fleet_homes", fleet.homes),
        ],
    ),
}
"""Name -> title and sections of each page in docs/results/."""
INTRODUCTION = (
    "[All results](../results.md), with a number on every line. The aims of a section are `held` in its file in "
    "`benchmarks/results/`."
)


def page(name: str, pictures: Path) -> str:
    """Draw the pictures of a page into the folder `pictures`. Returns the page's text."""
    title, sections = PAGES[name]
    lines = [f"# {title}", "", INTRODUCTION, ""]
    for section in sections:
        result = load(section.result)
        if section.draw is not None:
            section.draw(result, pictures / f"{section.picture}.png")
        lines += section.lines(result, machine(result))
    return re.sub(r"\]\(([a-z0-9_]+\.(?:png|md))", r"](../\1", "\n".join(lines)).rstrip() + "\n"


def main() -> None:
    (DOCS / "results").mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        (DOCS / "results" / f"{name}.md").write_text(page(name, DOCS), encoding="utf-8")
    gpu.draw(load("gpu_day"), DOCS / "gpu.png")


if __name__ == "__main__":
    main()
