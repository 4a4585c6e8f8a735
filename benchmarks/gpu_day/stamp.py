"""The stamp of a preflight: the dry form was green on this very tree, under the versions of the card's machine.

No second of a card is to be spent on an import error. `make gpu-day-preflight` writes it; the day reads it.
"""

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
STAMP = ROOT / "build" / "gpu_day_preflight" / "stamp.json"
_FOLDERS = ("app", "benchmarks", "cache", "engine", "fleet", "kernels", "loadgen", "model", "scheduler", "tests")
_SUFFIXES = (".py", ".lua")
_RESULTS = "benchmarks/results/"  # what a day writes is not what it runs
_PACKAGES = ("torch", "transformers", "triton")


def tree_hash(root: Path) -> str:
    """Return a hash of the names and contents of all files that a day may run."""
    found = hashlib.sha256()
    files = [path for folder in _FOLDERS for path in (root / folder).rglob("*") if path.suffix in _SUFFIXES]
    for path in sorted([*files, *root.glob("pyproject.toml")]):
        name = path.relative_to(root).as_posix()
        if name.startswith(_RESULTS) or "node_modules" in path.parts or not path.is_file():
            continue
        content = path.read_bytes()
        found.update(f"{name} {len(content)}\n".encode() + content)
    return found.hexdigest()


def versions() -> dict[str, str]:
    """Return package -> installed version, without its build (+cu130), of the packages on which a day depends."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = "none"
    return found


def write_stamp(path: Path = STAMP, root: Path = ROOT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"tree": tree_hash(root), "versions": versions()}, indent=1) + "\n", encoding="utf-8")


def why_refused(path: Path = STAMP, root: Path = ROOT) -> str:
    """Return why a day must not begin; empty if a preflight has passed on these very files with these versions."""
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "no preflight has run (make gpu-day-preflight)"
    if stamp.get("tree") != tree_hash(root):
        return "the preflight ran on other sources (make gpu-day-preflight)"
    if stamp.get("versions") != versions():
        return f"the preflight ran with {stamp.get('versions')}, and here are {versions()}"
    return ""
