"""Measures again what documents claim, where the result is stale: from sources with changes, or of too long ago.

    python -m benchmarks.claims.evidence --list       # what is stale, and why
    python -m benchmarks.claims.evidence [NAME ...]   # measure it again, one program after the other; hours

Each result is measured by its own command, on sources without changes and only while the machine is idle; with --busy
also beside other programs, for results that hold no times. Commit the results afterwards, and write the documents with
`python -m benchmarks.claims`.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console

from benchmarks.claims.read import Claim, claims
from benchmarks.harness.result_files import ROOT, commit

MOST_COMMITS = 60  # a result of an older commit may tell of another program
IDLE_LOAD = 0.5  # per core
_WAIT_S, _LOOK_S = 1800.0, 15.0


def staleness(result_commit: str) -> str:
    """Return why a result that was measured at `result_commit` should be measured again; empty if it is fresh."""
    if result_commit.endswith("-dirty"):
        return "from sources with changes"
    known = subprocess.run(
        ["git", "-C", str(ROOT), "rev-list", "--count", f"{result_commit}..HEAD"], capture_output=True, text=True
    )
    if known.returncode or not _is_ancestor(result_commit):
        return f"from {result_commit}, which is no ancestor"
    count = int(known.stdout)
    return f"from {count} commits ago" if count > MOST_COMMITS else ""


def _is_ancestor(result_commit: str) -> bool:
    words = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", result_commit, "HEAD"]
    return not subprocess.run(words, capture_output=True).returncode


def stale(found: Sequence[Claim], names: Sequence[str] = ()) -> dict[str, tuple[str, str]]:
    """Return the stale results among those from which the claims `found` take their numbers: name -> (command that
    measures it, why it is stale). names: return exactly these results instead, stale or not."""
    results = {claim.result: claim for claim in found}
    if names:
        return {name: (results[name].command, "named") for name in names}
    reasons = {name: (claim.command, staleness(claim.commit)) for name, claim in results.items()}
    return {name: (command, reason) for name, (command, reason) in reasons.items() if reason}


def wait_until_idle(load: Callable[[], float] = lambda: os.getloadavg()[0]) -> bool:
    """Wait until the machine has little other load. Returns False if that takes longer than half an hour. load: returns
    the load average."""
    ends_s = time.monotonic() + _WAIT_S
    while load() > IDLE_LOAD * (os.cpu_count() or 1):
        if time.monotonic() > ends_s:
            return False
        time.sleep(_LOOK_S)
    return True


def main() -> int:
    """Run the programs. Returns the number of them that failed, as the exit status."""
    parser = argparse.ArgumentParser(description="Measure again what documents claim, where the result is stale.")
    parser.add_argument("names", nargs="*", help="of results; default: the stale ones")
    parser.add_argument("--list", action="store_true", help="only say what is stale, and why")
    parser.add_argument("--busy", action="store_true", help="do not wait until the machine is idle")
    given = parser.parse_args()
    console = Console(highlight=False)
    wanted = stale(claims(), given.names)
    for name, (command, reason) in wanted.items():
        console.print(f"{name}: {reason}\n  {command}")
    if given.list:
        return 0
    if str(commit()).endswith("-dirty"):
        console.print("The sources have changes: commit them first.")
        return 1
    failed = 0
    for number, (name, (command, _)) in enumerate(wanted.items(), 1):
        console.rule(f"{number} of {len(wanted)}: {name}")
        if not given.busy and not wait_until_idle():
            console.print("The machine is busy with something else.")
            return failed + 1
        words = shlex.split(command)
        began_s = time.monotonic()
        status = subprocess.run([sys.executable, *words[1:]], cwd=ROOT).returncode
        console.print(f"{name}: exit status {status} after {time.monotonic() - began_s:.0f} s")
        failed += status not in (0, 1)  # 1: measured, and something does not hold
    return failed


if __name__ == "__main__":
    sys.exit(main())
