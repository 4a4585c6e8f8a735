"""Result files: where committed ones lie, what is said in each about the machine that made it, and the colours they are
drawn in.
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
QUICK = ROOT / "build" / "quick"  # results of small forms; never committed
DOCS = ROOT / "docs"
PACKAGES = ("reprise-llm", "torch", "transformers", "openai", "fastapi", "uvicorn", "pyzmq")
_NO_SOURCES = (":!benchmarks/results", ":!docs", ":!README.md")
_FEATURES = {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16"}  # they decide which kernels run
BLUE, GREY = "#2563eb", "#9ca3af"

_FLEET = ("faults", "homes", "kills", "moves")
_MOVED = {
    **{f"benchmarks.fidelity.{name}": f"benchmarks.texts {name}" for name in ("codecs", "packed_weights", "selectors")},
    **{f"benchmarks.fidelity.fleet_{name}": f"benchmarks.fleet {name}" for name in _FLEET},
    "benchmarks.truncation.truncation": "benchmarks.speed.truncation",
    "benchmarks.truncation.keeping": "benchmarks.texts keeping",
}
"""Programs by the name under which committed results were made, and their names since."""


def load(name: str) -> dict[str, Any]:
    """Return a committed result. Raises FileNotFoundError."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def read_result(file: Path) -> dict[str, Any] | None:
    """Read a result; None if there is no such file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def write_result(file: Path, result: Mapping[str, Any]) -> None:
    """Write a result to a file, with the command, the time and the machine. Paths become relative to the checkout. The
    file's folder is made if it is missing."""
    record = {
        "benchmark": file.stem,
        "command": command_line(sys.argv),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        **result,
    }
    text = json.dumps(record, indent=2, ensure_ascii=False).replace(f"{ROOT}{os.sep}", "")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n", encoding="utf-8")


def command_line(words: list[str]) -> str:
    """Return the command of this process as it is typed in the checkout. words: `sys.argv`."""
    relative = [os.path.relpath(word, ROOT) if os.path.isabs(word) else word for word in words]
    module = relative[0].removesuffix(".py").replace(os.sep, ".").removesuffix(".__main__")
    return " ".join(["python", "-m", module, *relative[1:]])


def command_of(result: dict[str, Any]) -> str:
    """Return the command that measures a result now; its program may have been renamed since."""
    command = str(result["command"])
    for before, now in _MOVED.items():
        command = re.sub(rf"-m {re.escape(before)}(?= |$)", f"-m {now}", command)
    return command


def describe_machine() -> dict[str, Any]:
    """Return the hardware, versions and commit of this machine."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cpu_features": sorted(
            _FEATURES & {word for line in lines if line.startswith("flags") for word in line.split()}
        ),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader"),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _installed(name) for name in PACKAGES},
        "commit": commit(),
    }


def commit() -> str | None:
    """Return the commit of the sources, with -dirty if a source has changed. Results and documents do not count as
    sources, because several are measured and drawn before they are committed together."""
    found = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--", ".", *_NO_SOURCES)
    return f"{found}-dirty" if found and changed else found


def _installed(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _output(*command: str) -> str | None:
    """Return what a program prints, or None where there is no such program."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
