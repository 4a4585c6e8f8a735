"""Shows how sparse attention is by layer, and what dropping tokens costs beside codecs: a picture and its section of
docs/results.md."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from benchmarks.figures.panels import perplexity, save_panels, table, with_error
from benchmarks.harness.result_files import BLUE, GREY


def draw(results: dict[str, dict[str, Any]], out: Path) -> None:
    """Left the profile of each model, by depth; right divergence by bytes, of the first model."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6))
    for (title, result), colour in zip(results.items(), (BLUE, GREY), strict=False):
        shares = result["sparsity"]
        depth = [place / (len(shares) - 1) for place in range(len(shares))]
        left.plot(depth, [100 * share for share in shares], marker="o", markersize=3, color=colour, label=title)
    left.plot([0, 1], [60, 95], "x", color="black", label="CaR: first layer, later ones")
    left.set(xlabel="depth, first layer to last", ylabel="weights below 1 % of their row's largest, %", ylim=(0, 100))
    left.legend(frameon=False, fontsize=8)
    title, result = next(iter(results.items()))
    for name, row in result["arms"].items():
        colour = GREY if name.startswith("drop") else BLUE
        right.plot(row["bytes_of_raw"], row["kl"], "o", color=colour)
        right.annotate(name, (row["bytes_of_raw"], row["kl"]), xytext=(5, 3), textcoords="offset points", fontsize=8)
    right.set(xlabel="bytes, times raw", ylabel="KL, nats a token", yscale="log", xlim=(0, 1), title=title)
    save_panels(figure, (left, right), out)


def section(results: dict[str, dict[str, Any]], machines: list[str]) -> list[str]:
    rows = [
        (title, name, f"{row['bytes_of_raw']:.3f}", with_error(row), f"{row['same_choice']:.1%}", perplexity(row, 1))
        for title, result in results.items()
        for name, row in result["arms"].items()
    ]
    lines = [
        "## Sparse attention by layer, and dropping tokens by it",
        "",
        "![sparsity by layer](sparsity.png)",
        "",
        "CaR's Fig. 4: the share of attention's weights below 1 % of the largest of their row, among those that "
        "causality allows; the paper has 60 % in the first layer, 95 % later. Then each layer drops that share of a "
        "history's tokens, the least attended ones (*drop as sparse*), all layers as many (*evenly*), or half "
        "as many. A small run: 192 tokens behind each of a few histories are scored.",
        "",
        *table("model | arm | bytes, x raw | KL, nats | same choice | perplexity", rows),
    ]
    for title, result in results.items():
        shares = ", ".join(f"{share:.0%}" for share in result["sparsity"])
        scored = f"{result['scored_tokens']:,} tokens of {result['texts']} texts scored"
        lines += ["", f"{title}, {scored}. By layer: {shares}."]
    return [*lines, "", *(line for machine in machines for line in (machine, ""))]
