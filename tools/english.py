"""Checks the English of docstrings and comments, as far as a program can: docs/contributing/writing.md says the rest.

python -m tools.english [FOLDER ...]      # each finding with its place; exit status 1 if there is any
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.import_graph import ROOT

FOLDERS = (
    "app",
    "benchmarks",
    "cache",
    "engine",
    "fleet",
    "kernels",
    "loadgen",
    "model",
    "scheduler",
    "tests",
    "tools",
)
"""Folders in which `make check` allows no finding."""
# A docstring begins with a verb, or with "A", "An" or "The" and a noun.
_NO_BEGINNING = re.compile(
    r"(What|Who|Whom|Whose|Whoever|Whatever|Which|Whichever|How|Those|Not|Of|When|Where|As|See|In|On|At|By|From"
    r"|To|With|Without|If|Until|Likewise|\.\.\.)\b"
)
# Requests, sequences, blocks and threads are things. In the other folders, these words mean clients and operators.
_PERSONS = re.compile(r"\b(who|whom|nobody|somebody|everybody|whoever|anybody)\b", re.IGNORECASE)
_OF_THINGS = ("cache", "engine", "kernels", "scheduler")
# In time, in a queue and in a text it is "after"; a server stands behind a gateway, and a part behind a protocol.
_BEHIND = re.compile(
    r"\bbehind\b(?! (\w+ ){0,2}(gateways?|prox(y|ies)|balancers?|hooks?|protocols?|walls?)\b)", re.IGNORECASE
)
_NO_COMMENT = re.compile(r"#\s*(of|and|in|to|until|likewise|or|but)\b")
_VALIDATORS = ("field_validator", "model_validator")


def findings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the fault of each finding in a file, in no order."""
    source = path.read_text(encoding="utf-8")
    of_things = path.relative_to(ROOT).parts[0] in _OF_THINGS
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of_docstring(node, of_things)
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_check_") and _is_validator(node):
            yield node.lineno, f"a validator is named _check_<what>: {node.name}"
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if token.line[: token.start[1]].strip() and _NO_COMMENT.match(token.string):
                yield line, f"write the noun again: {token.string}"
            yield from ((line, fault) for fault in _of_words(token.string, of_things))


def _of_docstring(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, of_things: bool
) -> Iterator[tuple[int, str]]:
    text = ast.get_docstring(node, clean=False)
    if text is None:
        return
    line = node.body[0].lineno
    if _NO_BEGINNING.match(text):
        yield line, f"begin with a verb: {text.splitlines()[0]}"
    yield from ((line, fault) for fault in _of_words(text, of_things))


def _of_words(text: str, of_things: bool) -> Iterator[str]:
    found = _PERSONS.search(text) if of_things else None
    if found:
        yield f"a request is not {found[0]!r}: {text.strip().splitlines()[0]}"
    if _BEHIND.search(text):
        yield f"'behind' is a place: {text.strip().splitlines()[0]}"


def _is_validator(node: ast.FunctionDef) -> bool:
    return any(
        isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id in _VALIDATORS
        for made in node.decorator_list
    )


def checked(folders: Iterable[str]) -> list[str]:
    """Return all findings in these folders, a line each."""
    files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [f"{path.relative_to(ROOT)}:{line} {fault}" for path in files for line, fault in sorted(set(findings(path)))]


def main() -> int:
    lines = checked(sys.argv[1:] or FOLDERS)
    print("\n".join(lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
