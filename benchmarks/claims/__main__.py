"""Write docs/results.md, and the numbers of all claims into the documents that repeat them.

python -m benchmarks.claims
"""

import sys

from benchmarks.claims.pages import missing, of_page, results_page, with_numbers
from benchmarks.claims.read import claims
from benchmarks.harness.result_files import DOCS, ROOT

DETAIL = (
    ("Speed of the model, drafts, packed weights", "results/speed.md"),
    ("Conversations over the tiers below HBM", "results/tiers.md"),
    ("What changes a text: codecs, selectors, truncation", "results/texts.md"),
    ("The order of requests", "results/scheduling.md"),
    ("Fleets", "results/fleet.md"),
    ("The papers' figures, simulated on the papers' machines", "paper_figures.md"),
    ("What has run on a GPU", "gpu.md"),
)


def main() -> int:
    """Write the documents. Returns the exit status: 1 if a document does not repeat a claim that it should."""
    found = claims()
    (DOCS / "results.md").write_text(results_page(found, DETAIL), encoding="utf-8")
    status = 0
    for name in sorted({page for claim in found for page in claim.pages}):
        page = ROOT / name
        text = with_numbers(page.read_text(encoding="utf-8"), of_page(found, page, ROOT))
        page.write_text(text, encoding="utf-8")
        for sentence in missing(text, of_page(found, page, ROOT)):
            print(f"{name} lacks: {sentence}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
