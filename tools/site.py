"""Hooks of mkdocs: the site gets the result files, which lie outside docs/, where docs/results.md leads to them."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
IN_CHECKOUT, IN_SITE = "](../benchmarks/results/", "](result_files/"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the result files to those of the site."""
    for result in sorted(RESULTS.glob("*.json")):
        files.append(File.generated(config, f"result_files/{result.name}", abs_src_path=str(result)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Let links of a page in docs/ to result files lead to where the site has them."""
    return markdown.replace(IN_CHECKOUT, IN_SITE)
