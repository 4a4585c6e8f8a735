"""All that needs a GPU, in one call of at most nine minutes on a machine that may have no network.

    python -m benchmarks.gpu_day --out DIR [--until 540] [--only ceilings truth ...] [--without-stamp]
    python -m benchmarks.gpu_day --out DIR --dry [--stamp]
    python -m benchmarks.gpu_day --merge DIR

Sections are processes, whose items have time limits of their own: what hangs or dies costs its item. Figures come
before the long tail. The folder gets four files at most: results.jsonl and tests.jsonl, a line as soon as it is there,
log.txt with what was printed, and REPORT.md, which is printed last.

The dry form runs every item on the CPU with tiny shapes, so that what waits for a GPU does not rot. `make
gpu-day-preflight` does that with the versions of torch and transformers that the card's machine has, and leaves a
stamp; without it, or after a change, the day does not begin. What the machine is given beside the sources: that stamp
(build/gpu_day_preflight/stamp.json), and what `carried` names. `--merge` writes a day's results where they are kept.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_day.carried import FOLDER
from benchmarks.gpu_day.merge import merge
from benchmarks.gpu_day.report import report
from benchmarks.gpu_day.stamp import ROOT, tree_hash, versions, why_refused, write_stamp
from benchmarks.gpu_day.supervisor import Supervisor

# Modules of this folder -> seconds, in the order of what is to be known first; 540 in all.
SECTIONS = {
    "ceilings": 25.0,
    "truth": 45.0,
    "turns": 150.0,
    "unsaved": 40.0,
    "attention": 45.0,
    "kernels": 45.0,
    "peers": 80.0,
    "gpu_tests": 90.0,
    "memcheck": 20.0,
}
_ALL_S = 540.0
_DRY_PATIENCE = 5.0  # a CPU compiles kernels at its first day, on processors that others use too
_REPORT_S = 3.0  # kept for the report
_ENVIRONMENT = {
    "USE_HUB_KERNELS": "NO",  # transformers would take our package `kernels` for the hub's
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONFAULTHANDLER": "1",
}


def day(out: Path, only: Sequence[str], until_s: float, carried: Path, *, dry: bool) -> Supervisor:
    """Run the sections one after the other. Time that one section does not use is added to that of the next. only:
    names of the sections to run; empty: all. until_s: seconds for all sections and the report. carried: the folder of
    files that are not of this project (`benchmarks.gpu_day.carried`). dry: run on the CPU, with tiny shapes."""

    def command(section: str, skip: Sequence[str]) -> list[str]:
        module = [sys.executable, "-m", "benchmarks.gpu_day.worker", section, "--device", "cpu" if dry else "cuda"]
        return [*module, "--carried", str(carried), "--out", str(out), "--skip", *skip]

    if dry:
        os.environ["OMP_NUM_THREADS"] = "1"  # threads that wait for each other take long where others compute
    os.environ.update({name: value for name, value in _ENVIRONMENT.items() if name not in os.environ})
    end_s = time.monotonic() + until_s - _REPORT_S
    supervisor = Supervisor(out, command, end_s, patience=_DRY_PATIENCE if dry else 1.0)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    supervisor.say("day", "start", commit=commit.stdout.strip(), tree=tree_hash(ROOT), versions=versions(), dry=dry)
    saved_s = 0.0
    for section, limit_s in SECTIONS.items():
        if only and section not in only:
            continue
        began_s = time.monotonic()
        supervisor.run(section, limit_s + saved_s)
        saved_s = max(0.0, saved_s + limit_s - (time.monotonic() - began_s))
        print(f"{section}: {time.monotonic() - began_s:.0f} s", flush=True)
    return supervisor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory for results")
    parser.add_argument(
        "--merge", type=Path, metavar="DIR", help="write the results of this folder where they are kept"
    )
    parser.add_argument("--until", type=float, default=_ALL_S, help="seconds for all sections together")
    parser.add_argument("--only", nargs="+", default=[], choices=SECTIONS, metavar="SECTION")
    parser.add_argument("--carried", type=Path, default=ROOT / FOLDER, help="directory of what is not of this project")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--stamp", action="store_true", help="with --dry: leave a stamp if all was well")
    parser.add_argument("--without-stamp", action="store_true", help="begin without a preflight")
    given = parser.parse_args()
    if given.merge is not None:
        merge(given.merge)
        return
    if given.out is None or (given.stamp and (not given.dry or given.only)):
        parser.error("--out is missing, or --stamp is not with --dry and all sections")
    if not given.dry and not given.without_stamp and (why := why_refused()):
        parser.error(f"{why}; --without-stamp begins all the same")
    out: Path = given.out.resolve()
    ran = day(out, given.only, given.until, given.carried.resolve(), dry=given.dry)
    text = report(out, "GPU day, dry" if given.dry else "GPU day")
    (out / "REPORT.md").write_text(text, encoding="utf-8")
    print(text)
    if given.stamp and not ran.failures:
        write_stamp()
    sys.exit(bool(ran.failures))


if __name__ == "__main__":
    main()
