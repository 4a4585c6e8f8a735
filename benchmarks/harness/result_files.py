"""Where committed results lie, and the colours they are drawn in."""

import json
from typing import Any

from benchmarks.harness.servers import RESULTS, ROOT

DOCS = ROOT / "docs"
BLUE, GREY = "#2563eb", "#9ca3af"


def load(name: str) -> dict[str, Any] | None:
    """A committed result, or None if there is none yet."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
