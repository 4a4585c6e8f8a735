"""Tests that the documents match the tree: generated tables are up to date, and every path and link leads somewhere."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from reprise.cache.stats import MISS_REASONS
from tools.reference import PAGES, with_tables

ROOT = Path(__file__).parent.parent
WRITTEN = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")]
WRITTEN += sorted((ROOT / "docs").rglob("*.md"))
FOLDERS = "app|benchmarks|cache|docker|docs|engine|examples|fleet|kernels|loadgen|model|reprise|scheduler|tests|tools"
# Files and folders in backquotes, and those that begin a line of a drawing. NAME in capitals stands for any.
NAMED = re.compile(rf"(?:`|^ *)((?:{FOLDERS})/[a-z0-9_./-]*)(?=[` :]|$)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")
CITED = re.compile(r'(?<!/)\b(docs/[a-z0-9_/-]+\.md)(?:,\s+"([^"]+)")?')  # a page, perhaps a heading in it
MEMBER = re.compile(r"\b[A-Z]\w*[a-z]\w*\.[a-z_]\w+")  # Class.method or Class.field
MODULE = re.compile(rf"python -m (?:reprise\.)?((?:{FOLDERS})(?:\.\w+)+)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@functools.cache
def members() -> set[str]:
    """Return `Class.name` for every method and annotated field of our classes."""
    found = set()
    for module in (path for folder in FOLDERS.split("|") for path in (ROOT / folder).rglob("*.py")):
        nodes = ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        for owner in (node for node in nodes if isinstance(node, ast.ClassDef)):
            for inner in owner.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{owner.name}.{inner.name}")
                elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                    found.add(f"{owner.name}.{inner.target.id}")
    return found


def missing(page: Path, text: str) -> Iterator[str]:
    """Yield what the text names that is not there."""
    for path in NAMED.findall(text):
        if not (ROOT / path).exists():
            yield path
    for link in LINK.findall(text):
        if not (page.parent / link).exists():
            yield f"link to {link}"
    yield from (name for name in MEMBER.findall(text) if name not in members())
    for module in MODULE.findall(text):
        path = ROOT / module.replace(".", "/")
        if not (path.with_suffix(".py").exists() or path.is_dir()):
            yield f"module {module}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_are_what_the_code_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- generated: ") == text.count("<!-- end -->") > 0
    assert with_tables(text) == text, "write them anew: python -m tools.reference"


@pytest.mark.parametrize("page", WRITTEN, ids=name_of)
def test_what_a_document_names_is_there(page: Path) -> None:
    assert list(missing(page, page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS.split("|") if folder != "tests"])
def test_what_a_module_cites_is_there(folder: str) -> None:
    for module in (ROOT / folder).rglob("*.py"):
        for page, heading in CITED.findall(module.read_text(encoding="utf-8")):
            assert f"# {heading}" in (ROOT / page).read_text(encoding="utf-8"), f"{name_of(module)}: {page}, {heading}"


def test_what_is_not_there_is_found() -> None:
    lines = (
        "`app/main.py`, `app/none.py` and [a](docs/none.md#x), [b](docs/api.md), [c](https://example.org)",
        "    app/turn/   its folder",
        "    cache/none/ none",
        "`python -m benchmarks.none`, `python -m tools.reference`, `benchmarks/results/NAME.json`",
        "`Saver.capture`, `CacheSettings.policy` and `Saver.none`",
    )
    expected = ["app/none.py", "cache/none/", "link to docs/none.md", "Saver.none", "module benchmarks.none"]
    assert list(missing(ROOT / "README.md", "\n".join(lines))) == expected


def test_every_miss_reason_is_explained() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    table = page.split("| `miss_reasons` | why tokens were computed |\n|---|---|\n")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(MISS_REASONS)
