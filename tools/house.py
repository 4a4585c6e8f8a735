"""Prints what a reader of the tree stumbles over: circles, wide folders, long classes and functions, names used twice.

Reads syntax trees only, takes a few seconds, and judges nothing: where a longer class reads better, it stays.
"""

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath

from tools.import_graph import COMPOSITION_ROOTS, ROOT, Module, circles, import_graph, is_below, modules

FOLDERS = ("app", "benchmarks", "cache", "engine", "fleet", "kernels", "loadgen", "model", "scheduler", "tools")


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def definitions(module: Module) -> Iterator[tuple[str, Definition]]:
    """(`Class.method`, its node) for everything that is defined in the module, nested functions too."""

    def inside(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Definition):
                yield prefix + child.name, child
                yield from inside(child, f"{prefix}{child.name}.")
            else:
                yield from inside(child, prefix)

    yield from inside(module.tree, "")


def path_of(module: Module) -> str:
    path = module.path
    return (path.relative_to(ROOT) if path.is_absolute() else path).as_posix()


def folder_of(module: Module) -> str:
    return PurePath(path_of(module)).parent.as_posix()


def ranked(sizes: Iterable[tuple[int, str]]) -> list[str]:
    """Lines like `  412 cache/table.py:12 Table`, the largest first."""
    return [f"{size:5} {what}" for size, what in sorted(sizes, key=lambda pair: (-pair[0], pair[1]))]


def longest(parsed: Iterable[Module], *kinds: type[Definition]) -> list[str]:
    """Definitions of these kinds by their lines."""
    return ranked(
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{path_of(module)}:{node.lineno} {name}")
        for module in parsed
        for name, node in definitions(module)
        if isinstance(node, kinds)
    )


def constructors(parsed: Iterable[Module]) -> list[str]:
    """`__init__` methods by how many parameters they take, `self` left out."""
    return ranked(
        (
            len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) - 1,
            f"{path_of(module)}:{node.lineno} {name.removesuffix('.__init__')}",
        )
        for module in parsed
        for name, node in definitions(module)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )


def widest(parsed: Iterable[Module]) -> list[str]:
    """Folders by how many modules lie directly in them."""
    counts = Counter(folder_of(module) for module in parsed if module.path.name != "__init__.py")
    return ranked((count, folder) for folder, count in counts.items())


def used_twice(named: Iterable[tuple[str, str]]) -> list[str]:
    """Return, of (name, where), the names that stand in several places: `Turn: a.py, b.py`."""
    places: dict[str, set[str]] = defaultdict(set)
    for name, where in named:
        places[name].add(where)
    return [f"{name}: {', '.join(sorted(all_))}" for name, all_ in sorted(places.items()) if len(all_) > 1]


def class_names(parsed: Iterable[Module]) -> list[tuple[str, str]]:
    """Public classes at the top of their modules, and where."""
    return [
        (node.name, path_of(module))
        for module in parsed
        for node in module.tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def file_names(parsed: Iterable[Module]) -> list[tuple[str, str]]:
    return [(m.path.name, folder_of(m)) for m in parsed if m.path.name != "__init__.py"]


def both_ways(parsed: Sequence[Module], *, nested: bool) -> list[str]:
    """Pairs of folders that import each other, with one example of either arrow: where one lies inside the other
    (`nested`), or where they lie side by side.
    """
    return [shown for one, other, shown in _pairs(parsed, folder_of) if other.startswith(f"{one}/") == nested]


def both_ways_at_the_top(parsed: Sequence[Module]) -> list[str]:
    """Pairs of top folders that import each other, with one example of either arrow."""
    return [shown for _, _, shown in _pairs(parsed, lambda module: module.name.split(".")[0])]


def _pairs(parsed: Sequence[Module], place: Callable[[Module], str]) -> Iterator[tuple[str, str, str]]:
    """Yield the pairs of places that import each other, and what shows it. Composition roots are left out."""
    inside = [module for module in parsed if not is_below(module.name, COMPOSITION_ROOTS)]
    places = {module.name: place(module) for module in inside}
    examples: dict[tuple[str, str], str] = {}
    for name, imported in import_graph(inside).items():
        for other in sorted(imported):
            if places[name] != places[other]:
                examples.setdefault((places[name], places[other]), f"{name} -> {other}")
    for (one, other), arrow in sorted(examples.items()):
        if one < other and (other, one) in examples:
            yield one, other, f"{one} <-> {other}: {arrow}, {examples[other, one]}"


def untested(parsed: Iterable[Module], tests: Iterable[str]) -> list[str]:
    """Modules without a `tests/<folder>/test_<name>.py` or a test file whose name begins like that."""
    present = set(tests)
    found = []
    for module in parsed:
        path = PurePath(path_of(module))
        stem = (PurePath("tests") / path.parent / f"test_{path.stem}").as_posix()
        if path.name != "__init__.py" and not any(t == f"{stem}.py" or t.startswith(f"{stem}_") for t in present):
            found.append(path.as_posix())
    return found


def size_of(folder: str, parsed: Iterable[Module]) -> str:
    """The number of files and lines of a top folder."""
    own = [module for module in parsed if is_below(module.name, (folder,))]
    lines = sum(len(module.path.read_text(encoding="utf-8").splitlines()) for module in own)
    return f"{lines:7,} in {len(own):3} files {folder}"


def show(title: str, lines: Sequence[str], most: int) -> None:
    print(f"\n{title}: {min(most, len(lines))} of {len(lines)}" if len(lines) > most else f"\n{title}: {len(lines)}")
    for line in lines[:most]:
        print(f"  {line}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=10, help="lines to print under each heading")
    most = parser.parse_args().most
    parsed = list(modules(*FOLDERS))
    tests = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    shipped = [module for module in parsed if not is_below(module.name, ("benchmarks", "tools"))]
    show("Import circles", [" <-> ".join(circle) for circle in circles(import_graph(parsed))], most)
    show("Top folders that import each other", both_ways_at_the_top(parsed), most)
    show("Folders side by side that import each other", both_ways(parsed, nested=False), most)
    show("Folders that import each other, one inside the other", both_ways(parsed, nested=True), most)
    show("Widest folders, in files", widest(parsed), most)
    show("Longest classes, in lines", longest(parsed, ast.ClassDef), most)
    show("Longest functions, in lines", longest(parsed, ast.FunctionDef, ast.AsyncFunctionDef), most)
    show("Constructors with the most parameters", constructors(parsed), most)
    show("Class names used twice", used_twice(class_names(parsed)), most)
    show("File names used twice", used_twice(file_names(parsed)), most)
    show("Shipped modules without a test of their name", untested(shipped, tests), most)
    show("Lines", [size_of(folder, parsed) for folder in FOLDERS], len(FOLDERS))


if __name__ == "__main__":
    main()
