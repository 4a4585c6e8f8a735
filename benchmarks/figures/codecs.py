"""Shows what codecs lose and take, and what reading in part saves: a picture and sections of docs/results.md."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.figures.panels import held, perplexity, save_panels, table, titled, with_error
from benchmarks.harness.result_files import BLUE, GREY, load

BLOCK_TOKENS, BYTES_PER_NUMBER = 32, 2


def bits_by_layer(result: dict[str, Any], codec: str) -> list[float]:
    """Return for each layer how many bits a calibrated codec spends on a number of K and V."""
    sizes = result["calibrated"][codec]["bytes_by_layer"]
    numbers = BLOCK_TOKENS * result["settings"]["raw_bytes_per_token"] / BYTES_PER_NUMBER / len(sizes)
    return [8 * size / numbers for size in sizes]


def draw(result: dict[str, Any], out: Path) -> None:
    """Draw the codec figure into `out`. Left: KL divergence from raw KV against bytes. Right: bits of a number by
    layer, a line for each calibrated codec."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6))
    for name, row in result["codecs"].items():
        place, is_ours = (row["bytes_of_raw"], row["kl"]), name in result["calibrated"]
        left.errorbar(*place, yerr=2 * row["kl_error"], fmt="o", color=BLUE if is_ours else GREY)
        beside = (5, -11) if is_ours else (5, 3)
        left.annotate(name, place, xytext=beside, textcoords="offset points", fontsize=8)
    left.set(xlabel="bytes, times raw", ylabel="KL, nats a token", yscale="log", xlim=(0.1, 0.62))
    for name, shade in zip(result["calibrated"], (1.0, 0.5), strict=False):
        right.plot(bits_by_layer(result, name), marker="o", markersize=3, color=BLUE, alpha=shade, label=name)
    right.set(xlabel="layer", ylabel="bits a number (raw: 16)", ylim=(0, None))
    right.legend(frameon=False, fontsize=8)
    save_panels(figure, (left, right), out)


def section(result: dict[str, Any], machine: str) -> list[str]:
    rows = [
        (name, f"{row['bytes_of_raw']:.3f}", with_error(row), f"{row['same_choice']:.2%}", perplexity(row))
        for name, row in result["codecs"].items()
    ]  # fmt: skip
    return titled(
        "What codecs lose",
        "![divergence by bytes, bits by layer](codecs.png)",
        f"SmolLM2-135M, {result['settings']['scored_tokens']:,} tokens behind histories of 512 to 4,096 tokens, of "
        "documents that calibrated nothing: what the model says next behind a coded history, beside a raw one. ± is "
        "one standard error. A budget decides the steps of all layers at once, so layers differ in bits.",
        table("codec | bytes, x raw | KL, nats | same choice | perplexity", rows),
        held(result),
        machine,
    )


def speed_section(result: dict[str, Any], machine: str) -> list[str]:
    core = result["core"]
    rows = [
        (row["arm"], row["disk"], f"{row['ttft_ms_p50']:.0f}",
         f"{row['ttft_ms_least']:.0f} to {row['ttft_ms_most']:.0f}", f"{row['load_ms_p50']:.0f}",
         f"{row['loaded_share']:.1%}")
        for row in result["summary"]
        if row["arm"] != "lossless"  # an earlier result has this arm, which the server has no more
    ]  # fmt: skip
    return titled(
        "What coding costs in time",
        f"One core, MB of raw KV a second: encode {core['encode_mb_per_s']:.0f}, decode {core['decode_mb_per_s']:.0f}. "
        f"A turn behind {result['settings']['tokens']:,} tokens that come from the disk:",
        table(" | disk | TTFT p50, ms | least to most | loading p50, ms | of the history loaded", rows),
        held(result),
        machine,
    )


def selector_section(result: dict[str, Any], machine: str) -> list[str]:
    rows = [
        (row["streams"], f"{row['context']:,}", *(f"{row['tokens_per_s'][arm]:.1f}" for arm in ("none", "pairs")),
         f"{row['ratio']:.2f}", "{:.2f} to {:.2f}".format(*row["ratio_range"]))
        for row in result["rows"]
    ]  # fmt: skip
    return titled(
        "Decoding that reads a tenth",
        "Tokens decoded a second, reading the whole context and reading what `pairs` choose.",
        table("sequences | context | whole | pairs | ratio | of a round", rows),
        held(result),
        machine,
    )


def draw_selectors(quality: dict[str, Any], out: Path) -> None:
    """Draw the figure of selectors into `out`. Left: tokens decoded a second by context. Right: needles found, by the
    share of rows that is read."""
    speed = load("selectors_speed_smollm2")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6))
    for streams, style in ((1, "--"), (8, "-")):
        rows = sorted((row for row in speed["rows"] if row["streams"] == streams), key=lambda row: row["context"])
        for name, color in (("none", GREY), ("pairs", BLUE)):
            rates = [row["tokens_per_s"][name] for row in rows]
            label = f"{name}, {streams} at once"
            left.plot([row["context"] for row in rows], rates, style, marker="o", color=color, label=label)
    left.set(xlabel="tokens of context", ylabel="tokens decoded a second", xlim=(0, None), ylim=(0, None))
    left.legend(frameon=False, fontsize=8)
    needles = quality["needles"]
    for name, found in needles["found"].items():
        place = quality["read"].get(name, {"rows": 1.0})["rows"], found / needles["asked"]
        right.plot(*place, "o", color=BLUE if name == "pairs" else GREY)
        right.annotate(name, place, xytext=(5, 4), textcoords="offset points", fontsize=8)
    right.set(xlabel="share of the rows that is read", ylabel="needles found", xlim=(0, 1.1), ylim=(0, 1.05))
    save_panels(figure, (left, right), out)


def reading_section(result: dict[str, Any], machine: str) -> list[str]:
    settings, needles = result["settings"], result["needles"]
    rows = [
        (f"{int(history):,}", arms["texts"], name, f"{result['read'].get(name, {'rows': 1.0})['rows']:.1%}",
         with_error(row), f"{row['same_choice']:.1%}", perplexity(row))
        for history, arms in result["texts"].items() for name, row in arms.items() if name != "texts"
    ]  # fmt: skip
    found = ", ".join(f"{name} {count}" for name, count in needles["found"].items())
    return titled(
        "What reading a part changes",
        "![tokens decoded by context, needles found by share read](selectors.png)",
        f"SmolLM2-135M, {settings['scored']} tokens decoded behind each text, beside what reading everything says "
        "next. `rounding` reads everything too, but computes them together: what bf16 alone does.",
        table("behind | texts | selector | rows read | KL, nats | same choice | perplexity", rows),
        f"Of {needles['asked']} needles in books of {needles['context']:,} tokens, asked for one after the other: "
        f"{found}.",
        held(result),
        machine,
    )


def activation_section(result: dict[str, Any], machine: str) -> list[str]:
    rows = [
        (name, f"{row['turn_ms']:.0f}", f"{row['loaded_mb']:.1f}", f"{row['reused']:.0%}")
        for name, row in result["arms"].items()
    ]
    return titled(
        "K and V made of activations",
        f"A turn of 8 tokens behind {result['tokens']:,}, of a random model of the 125 M shape whose heads have K and "
        "V of their own; the disk has 0.15 GB/s. "
        f"K and V are made in {result['share_of_recompute']:.3f} of a recompute.",
        table("history | turn, ms | loaded, MB | reused", rows),
        held(result),
        machine,
    )


def weight_section(result: dict[str, Any], machine: str) -> list[str]:
    rows = []
    for name, row in result["arms"].items():
        cells = [name, f"{row['copying_ms']:.1f}" if row["bytes"] else ""]
        for kind in ("prefill", "decode"):
            cells += [f"{row[kind]['step_ms']:.0f}", f"{row[kind]['waited_ms']:.1f}" if row["bytes"] else ""]
        rows.append(cells)
    return titled(
        "Weights that pass through HBM",
        "Steps of 512 prompt tokens and of one decoded token, of a random model of the 125 M shape whose layers' "
        "weights are copied over a link of so many GB/s in every step.",
        table("weights | copying, ms | prefill, ms | waited | decode, ms | waited", rows),
        held(result),
        machine,
    )
