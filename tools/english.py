"""Checks the English of docstrings and comments, as far as a program can: docs/contributing/writing.md says the rest.

python -m tools.english [FOLDER ...]      # each finding with its place; exit status 1 if there is any
"""

import ast
import io
import itertools
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
# A docstring begins with a verb, or with "A", "An" or "The" and a noun. A string below an attribute may be any noun.
_NO_BEGINNING = re.compile(
    r"(What|Who|Whom|Whose|Whoever|Whatever|Which|Whichever|How|Those|Not|Of|When|Where|As|See|In|On|At|By|From"
    r"|To|With|Without|If|Until|Likewise|For|So|Between|Also|This|That|After|Before|While|Because|Then|Than|And|Or|But"
    r"|Like|\.\.\.)\b"
)
# Requests, sequences, blocks and threads are things. In the other folders, these words mean clients and operators.
_PERSONS = re.compile(r"\b(who|whom|nobody|somebody|everybody|whoever|anybody)\b", re.IGNORECASE)
_OF_THINGS = ("cache", "engine", "kernels", "scheduler")
# In time, in a queue and in a text it is "after"; a server stands behind a gateway, and a part behind a protocol.
_BEHIND = re.compile(
    r"\bbehind\b(?! (\w+ ){0,2}(gateways?|prox(y|ies)|balancers?|hooks?|protocols?|walls?)\b)", re.IGNORECASE
)
_NO_COMMENT = re.compile(r"#\s*(of|and|in|to|until|likewise|or|but|who|whom|which|that|then|than|so)\b")
# These continue or announce another comment, so they are faults where code lies between the two.
_HANGS_ON_ABOVE = re.compile(r"#\s*(and|or|but)\b")
_HANGS_ON_BELOW = re.compile(r"[,:]\s*$")
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
        for body in ("body", "orelse", "finalbody"):
            for string in _below_attributes(getattr(node, body, None)):
                yield from _of_text(string, of_things)
    yield from _of_comments(source, of_things)


def _of_docstring(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, of_things: bool
) -> Iterator[tuple[int, str]]:
    if ast.get_docstring(node, clean=False) is not None:
        statement = node.body[0]
        assert isinstance(statement, ast.Expr)
        yield from _of_text(statement, of_things)


def _below_attributes(statements: object) -> Iterator[ast.Expr]:
    """Yield the strings that stand directly below an assignment and describe it."""
    if isinstance(statements, list):
        for above, below in itertools.pairwise(statements):
            is_attribute = isinstance(above, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr)
            if is_attribute and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                yield below


def _of_text(statement: ast.Expr, of_things: bool) -> Iterator[tuple[int, str]]:
    assert isinstance(statement.value, ast.Constant)
    text, line = str(statement.value.value), statement.lineno
    if _NO_BEGINNING.match(text):
        yield line, f"begin with a verb: {text.splitlines()[0]}"
    yield from ((line, fault) for fault in _of_words(text, of_things))


def _of_comments(source: str, of_things: bool) -> Iterator[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    alone = {line for line, token in comments.items() if not token.line[: token.start[1]].strip()}
    for line, token in comments.items():
        if line not in alone and _NO_COMMENT.match(token.string):
            yield line, f"write the noun again: {token.string}"
        elif line in alone and line - 1 not in comments and _HANGS_ON_ABOVE.match(token.string):
            yield line, f"say the whole thought: {token.string}"
        if line + 1 not in alone and line not in alone and _HANGS_ON_BELOW.search(token.string):
            yield line, f"end the thought: {token.string}"
        yield from ((line, fault) for fault in _of_words(token.string, of_things))


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
