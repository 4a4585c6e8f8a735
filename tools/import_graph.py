"""The modules of the checkout and what they import, read from their syntax trees without running any of them."""

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PREFIX = "reprise."  # begins the names of modules; rules and reports call them by their folders
COMPOSITION_ROOTS = ("app.main", "app.cli")  # they put together parts of all folders, which do not know each other


@dataclass(frozen=True)
class Import:
    """One imported name: `from a import b` is `a.b`, since b may be a module."""

    name: str
    line: int
    lazy: bool  # inside a function


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    @functools.cache  # noqa: B019 - modules are read once and kept anyway
    def imports(self) -> list[Import]:
        found = []
        lazy_nodes = {
            id(inner)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for inner in ast.walk(node)
        }
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: relative import"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            found += [Import(name.removeprefix(PREFIX), node.lineno, id(node) in lazy_nodes) for name in names]
        return found


def is_below(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def modules(*folders: str) -> Iterator[Module]:
    """The modules of these top folders, in the order of their paths; a package has the name of its folder."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield _read(path)


@functools.cache
def _read(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, path, ast.parse(path.read_text(encoding="utf-8")))


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules each of which imports all others, through whatever stands between them. (Tarjan.)"""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        path.append(name)
        for imported in sorted(graph[name]):
            if imported not in order:
                visit(imported)
                lowest[name] = min(lowest[name], lowest[imported])
            elif imported in path:
                lowest[name] = min(lowest[name], order[imported])
        if lowest[name] == order[name]:
            circle = path[path.index(name) :]
            del path[path.index(name) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in graph:
        if name not in order:
            visit(name)
    return found


def import_graph(parsed: Iterable[Module]) -> dict[str, set[str]]:
    """Module -> the modules of ours it imports, anywhere in its file."""
    modules_ = {module.name: module for module in parsed}
    graph: dict[str, set[str]] = {}
    for name, module in modules_.items():
        named = (imported.name for imported in module.imports())
        whole = (full if full in modules_ else full.rpartition(".")[0] for full in named)
        graph[name] = {full for full in whole if full in modules_ and full != name}
    return graph
