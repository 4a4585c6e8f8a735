"""The finish of pictures that stand in the documents, and the tables and verdicts of their sections."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt


def save_panels(figure: Any, axes: Sequence[Any], out: Path) -> None:
    """Leave out what shows nothing, write the picture and give its memory back."""
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)


def table(headings: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table. headings: as they stand between the outer bars."""
    lines = [f"| {headings.lstrip()} |", "|---" * (headings.count("|") + 1) + "|"]
    return [*lines, *(f"| {' | '.join(map(str, cells))} |" for cells in rows)]


def held(result: dict[str, Any]) -> str:
    """Return what a result holds, as a sentence."""
    return "; ".join(f"{what}: {'yes' if value else 'NO'}" for what, value in result["held"].items()) + "."


def with_error(row: dict[str, Any]) -> str:
    """Return a divergence with its standard error."""
    return f"{row['kl']:.5f} ± {row['kl_error']:.5f}"


def perplexity(row: dict[str, Any], digits: int = 2) -> str:
    """Return a change of perplexity with its standard error."""
    return f"{row['perplexity_change']:+.{digits}%} ± {row['perplexity_error']:.{digits}%}"
