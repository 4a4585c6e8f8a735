"""Keeps `reprise` the only name of our packages: a checkout has their folders beside it, where Python would find them
again."""

import sys
from collections import defaultdict
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
FOLDERS = tuple(sorted(path.name for path in (ROOT / "reprise").iterdir() if path.is_symlink()))


class Finder(FileFinder):
    """Make an entry of the repository's root: it has tests, benchmarks and tools, but the rest only as `reprise`."""

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        return None if fullname in FOLDERS else super().find_spec(fullname, target)


def hook(path: str) -> Finder:
    if Path(path).resolve() != ROOT:
        raise ImportError("not ours")
    return Finder(path, (SourceFileLoader, SOURCE_SUFFIXES))


def refuse_bare_names() -> None:
    """Refuse bare names in the whole process. Other people's package `kernels` is found where it is installed."""
    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()


def twice() -> list[str]:
    """Files of ours that are loaded under several names, and the names."""
    names: dict[Path, list[str]] = defaultdict(list)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # Packages of others, in the environment inside the checkout, may load a file of theirs twice.
        path = Path(file or "/").resolve()
        if name != "__main__" and path.is_relative_to(ROOT) and ".venv" not in path.parts:
            names[path].append(name)
    return [f"{path.relative_to(ROOT)}: {', '.join(all_)}" for path, all_ in names.items() if len(all_) > 1]


def bare() -> list[str]:
    loaded = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return [
        n
        for n, file in loaded.items()
        if n.split(".")[0] in FOLDERS and file and Path(file).resolve().is_relative_to(ROOT)
    ]
