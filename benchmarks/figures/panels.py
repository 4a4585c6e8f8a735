"""The finish of pictures that stand in the documents."""

from collections.abc import Sequence
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
