"""All that needs a GPU, in one call of at most ten minutes on a machine that may have no network.

    python -m benchmarks.gpu_day --out DIR [--until 570] [--shape 8b] [--only ceilings tests ...]
    python -m benchmarks.gpu_day --out DIR --dry

Sections are processes, each with a time limit of its own: what hangs costs its section, not the others. A section
writes SECTION.json when it has measured, and SECTION.log says what it printed. REPORT.md has what matters of all. The
dry form runs every section on the CPU with a tiny shape, so that what waits for a GPU does not rot until there is one.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    limit_s: float
    command: tuple[str, ...]


def sections(shape: str, out: Path, *, dry: bool) -> list[Section]:
    """In their order. The model is made where its first reader looks for it."""
    device = "cpu" if dry else "cuda"
    arguments = ("--device", device, "--shape", shape, "--model", str(out.parent / f"model-{shape}"))

    def module(name: str, limit_s: float) -> Section:
        command = (sys.executable, "-m", f"benchmarks.gpu_day.{name}", *arguments, "--out", str(out / f"{name}.json"))
        return Section(name, limit_s, command)

    def pytest(*arguments: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *arguments)

    of_engine = (f"tests/engine/{path}" for path in ("step/test_sampler.py", "model/cuda", "test_on_gpu.py"))
    parallel = ("-n", "1" if dry else "4", "-p", "no:benchmark", "--junitxml", str(out / "tests.xml"))
    found = [
        module("ceilings", 60.0),
        Section("tests", 150.0, pytest(*parallel, "tests/kernels", *of_engine)),
        module("kernels", 60.0),
        module("turns", 240.0),
        module("baseline", 90.0),
    ]
    checker = None if dry else shutil.which("compute-sanitizer")
    if checker is not None:
        checked = (checker, "--tool", "memcheck", "--error-exitcode", "9", *pytest("tests/kernels/test_triton_rows.py"))
        found.append(Section("memcheck", 60.0, checked))
    return found


def run(section: Section, out: Path, limit_s: float) -> str:
    """Returns how it ended."""
    with (out / f"{section.name}.log").open("w", encoding="utf-8") as log:
        started = time.monotonic()
        try:
            status = subprocess.run(section.command, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s).returncode
        except subprocess.TimeoutExpired:
            return f"stopped after {limit_s:.0f} s"
    return f"exit status {status} after {time.monotonic() - started:.0f} s"


def report(out: Path, ends: dict[str, str]) -> str:
    """Markdown: how each section ended, and its figures or the end of its log."""
    lines = ["# GPU day", ""]
    for name, end in ends.items():
        lines += [f"## {name}: {end}", ""]
        found = out / f"{name}.json"
        if found.exists():
            result: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
            lines += [f"- {label}: {value}" for label, value in result.items()]
        if not found.exists() or not end.startswith("exit status 0"):
            log = (out / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
            lines += ["```", *log[-25:], "```"]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for results")
    parser.add_argument("--until", type=float, default=570.0, help="seconds for all sections together")
    parser.add_argument("--shape", default="8b", help="of the random model, see benchmarks.harness.make_model")
    parser.add_argument("--only", nargs="+", help="sections")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with the tiny shape")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("USE_HUB_KERNELS", "NO")
    until = time.monotonic() + arguments.until
    ends: dict[str, str] = {}
    for section in sections("tiny" if arguments.dry else arguments.shape, out, dry=arguments.dry):
        if arguments.only and section.name not in arguments.only:
            continue
        left_s = until - time.monotonic()
        ends[section.name] = run(section, out, min(section.limit_s, left_s)) if left_s > 5 else "no time was left"
        (out / "REPORT.md").write_text(report(out, ends), encoding="utf-8")
        print(f"{section.name}: {ends[section.name]}", flush=True)
    print(report(out, ends))
    sys.exit(any(not end.startswith(("exit status 0", "exit status 5")) for end in ends.values()))


if __name__ == "__main__":
    main()
