"""Seeds small faults into a copy of the sources, one at a time, and tells which of them the tests find.

    python -m tools.seed_faults --list                        # the faults, without running anything
    python -m tools.seed_faults --out build/faults.jsonl      # by `make test`'s tests
    python -m tools.seed_faults --out build/faults.jsonl --all    # what those missed, by `make test-all`'s

A fault turns a comparison, swaps `and` and `or`, `min` and `max`, `+` and `-` or two arguments, moves a number by one,
drops a call, or negates a condition. One is drawn in each of `FILES` by a seed, so that the same faults come again.
Tests are tried from near to far: those of the file, of its folder, of its top folder, of what uses it, and only with
--far all of them. A fault that changes nothing noticeable is found by no test: read those that remain.
"""

import argparse
import ast
import builtins
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.import_graph import ROOT

FILES = (
    *("app/conversations/splice.py", "app/conversations/transcripts.py", "fleet/replica/claims.py", "app/http/body.py"),
    *("app/http/event_stream.py", "app/tenancy/bucket.py", "app/tenancy/places.py", "app/tenancy/quotas.py"),
    *("app/text/answer_parser.py", "app/text/detokenizer.py", "app/text/message_bounds.py", "app/turn/generation.py"),
    *("fleet/replica/resume.py", "app/turn/token_limits.py", "cache/blocks/table.py", "cache/blocks/truncate.py"),
    *("cache/look_ahead.py", "cache/moves.py", "cache/policies/lookahead.py", "cache/rates.py"),
    *("cache/requests/load_or_compute.py", "cache/requests/matching.py", "cache/requests/opening.py"),
    *("cache/requests/publishing.py", "cache/requests/saving.py", "cache/returns/return_times.py", "cache/sessions.py"),
    *("cache/storage/extent_file.py", "cache/storage/index.py", "cache/storage/space.py", "cache/tiers/disk.py"),
    *("cache/tiers/slot_tier.py", "cache/tiers/hbm.py", "cache/tiers/pages.py", "cache/transfer/load_queue.py"),
    *("cache/transfer/save_stream.py", "engine/build/room.py", "engine/endings.py", "engine/model/batch.py"),
    *("engine/model/hf_model.py", "engine/process/loop.py", "engine/step/batch_step.py", "engine/step/compute.py"),
    *("engine/drafts/drafter.py", "engine/intake.py", "engine/step/sampler.py", "fleet/directory.py"),
    *("fleet/gateway/relay.py", "fleet/routing.py", "fleet/scaling.py", "kernels/attention/torch_cpu.py"),
    *("kernels/block_writer.py", "kernels/codecs/transform.py", "kernels/packed.py", "kernels/int8_pages/pages.py"),
    *("scheduler/budgets/budget.py", "scheduler/queues/fair_share.py", "scheduler/car/window.py"),
    *("scheduler/running_batch.py", "scheduler/scheduler.py"),
)
HERE = "not gpu and not api and not slow"  # as in the Makefile
# Where parts are tested together with what uses them.
_USERS = {
    "cache": ["tests/scheduler", "tests/engine"],
    "scheduler": ["tests/loadgen/virtual", "tests/engine"],
    "kernels": ["tests/engine"],
    "engine": ["tests/test_faults.py"],
}
_FAST_S, _FAR_S = 900, 3600  # for the tests of one stage
_NOT_COPIED = {
    ".venv",
    ".git",
    ".hypothesis",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    "build",
}  # folders of the top
_TURNED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
_SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Fault:
    """A piece of one file's text and what stands there instead. start, end: offsets in bytes of UTF-8."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    def applied(self, source: bytes) -> bytes:
        """Return the source with the fault in it."""
        assert source[self.start : self.end].decode() == self.before
        return source[: self.start] + self.after.encode() + source[self.end :]


@dataclass(frozen=True)
class Verdict:
    """The verdict of the tests on a fault. found_by: the stage of the first test that failed; empty: none did. test:
    its name; in parentheses: why a stage said nothing."""

    fault: Fault
    found_by: str
    test: str
    seconds: float


def faults_in(file: str, source: str) -> list[Fault]:
    """Return every fault that this file can have, in the order of its text. Skips what runs at import."""
    found: list[Fault] = []
    functions = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    for function in functions:
        if function.name.startswith("__") and function.name != "__init__":
            continue
        for statement in function.body:
            for node in ast.walk(statement):
                found += _faults_at(file, source, node)
    return sorted({(fault.start, fault.kind): fault for fault in found}.values(), key=lambda fault: fault.start)


def _faults_at(file: str, source: str, node: ast.AST) -> Iterator[Fault]:
    def fault(kind: str, part: ast.expr | ast.stmt, after: str) -> Fault:
        start, end = _span(source, part)
        return Fault(file, part.lineno, kind, start, end, source.encode()[start:end].decode(), after)

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = (ast.unparse(part) for part in (node.left, node.comparators[0]))
        yield fault("comparison", node, f"({left}) {_TURNED[type(node.ops[0])]} ({right})")
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield fault("and or", node, "(" + word.join(f"({ast.unparse(value)})" for value in node.values) + ")")
    elif (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add | ast.Sub)
        and not isinstance(node.left, ast.JoinedStr)
    ):
        sign = "-" if isinstance(node.op, ast.Add) else "+"
        yield fault("sign", node, f"(({ast.unparse(node.left)}) {sign} ({ast.unparse(node.right)}))")
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield fault("off by one", node, str(node.value + 1))
    elif isinstance(node, ast.If):
        yield fault("condition", node.test, f"not ({ast.unparse(node.test)})")
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "log." not in ast.unparse(node.value.func):
        yield fault("dropped call", node, "pass")
    elif isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in _SWAPPED:
            yield fault("min max", node.func, _SWAPPED[name])
        elif _may_swap(node):
            first, second = node.args
            yield fault("swapped", node, ast.unparse(ast.Call(node.func, [second, first], node.keywords)))


def _may_swap(call: ast.Call) -> bool:
    """Whether a call takes two values of ours in an order that may matter: not a builtin, and not a sum or product."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    is_ours = not hasattr(builtins, name) and name not in ("add", "equal", "gather", "mul", "get", "setdefault")
    return (
        is_ours
        and len(call.args) == 2
        and all(isinstance(argument, ast.Name | ast.Attribute) for argument in call.args)
    )


def _span(source: str, node: ast.expr | ast.stmt) -> tuple[int, int]:
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def drawn(files: Sequence[str], seed: int) -> list[Fault]:
    """Return one fault of each file; all kinds are equally likely, however often one is possible."""
    chosen = []
    for file in files:
        chance = random.Random(f"{seed} {file}")
        possible = faults_in(file, (ROOT / file).read_text(encoding="utf-8"))
        kind = chance.choice(sorted({fault.kind for fault in possible}))
        chosen.append(chance.choice([fault for fault in possible if fault.kind == kind]))
    return chosen


def stages(file: str, far: bool, near: bool = False) -> list[tuple[str, list[str]]]:
    """Return the names of the stages for a fault in this file, and the tests of each, from near to far. near: only
    those of the file and its folder."""
    path = Path(file)
    folder = Path("tests") / path.parent
    own = [str(folder / f"test_{path.name}")] if (ROOT / folder / f"test_{path.name}").exists() else []
    found = [("its file", own), ("its folder", [str(folder)] if (ROOT / folder).is_dir() else [])]
    if near:
        return [(name, tests) for name, tests in found if tests]
    found.append(("its top folder", [f"tests/{path.parts[0]}"]))
    if path.parts[0] in _USERS:
        found.append(("its users", _USERS[path.parts[0]]))
    found.append(("all", ["tests"] if far else []))
    given: list[tuple[str, list[str]]] = []
    for name, tests in found:
        if tests and tests not in [earlier for _, earlier in given]:
            given.append((name, tests))
    return given


def failing_test(copy: Path, tests: list[str], everything: bool, limit_s: float, without: Sequence[str] = ()) -> str:
    """Return the first test that fails in the copy; empty: none does; in parentheses: why that is not known. A run that
    lasts too long says nothing: the machine may be busy."""
    chosen = HERE if everything else f"{HERE} and not dear"
    profile = ["--hypothesis-profile", "ci"] if everything else []
    left = [f"--deselect={test}" for test in without]
    words = ["-x", "-m", chosen, "-p", "no:cacheprovider", "--tb=no", "-rfE", *profile, *left, *tests]
    environment = {**os.environ, "PYTHONPATH": str(copy), "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / ".hypothesis")}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"(did not end in {limit_s:.0f} s)"
    if process.returncode in (0, 5):  # 5: nothing was chosen
        return ""
    lines = [line for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].split(" - ")[0].split(" ", 1)[1] if lines else f"(ended with {process.returncode})"


def judge(fault: Fault, copy: Path, everything: bool, far: bool, near: bool = False) -> Verdict:
    """Try the tests on the copy with the fault in it, and mend the copy. A test that also fails without the fault says
    nothing of it, and the next one that fails is asked."""
    path, started = copy / fault.file, time.monotonic()
    sound = path.read_bytes()
    unreliable: list[str] = []
    unknown = ""
    for name, tests in stages(fault.file, far, near):
        limit_s = _FAR_S if everything or name == "all" else _FAST_S
        tests = [test for test in tests if (copy / test).exists()]
        while tests:
            path.write_bytes(fault.applied(sound))
            try:
                test = failing_test(copy, tests, everything, limit_s, unreliable)
            finally:
                path.write_bytes(sound)
            if not test or test.startswith("("):
                unknown = test or unknown
                break
            if not failing_test(copy, [test], everything, limit_s):
                return Verdict(fault, name, test, time.monotonic() - started)
            unreliable.append(test)
    return Verdict(fault, "", unknown, time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description="Seed faults, and tell which of them the tests find.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="show the faults, and run nothing")
    parser.add_argument("--all", action="store_true", help="only what --out says was not found, by all tests")
    parser.add_argument("--far", action="store_true", help="try all tests where those of the top folder find nothing")
    parser.add_argument("--near", action="store_true", help="try only the tests of the file and its folder")
    parser.add_argument("--out", type=Path, default=Path("build/faults.jsonl"), help="a line for each fault")
    parser.add_argument("--go-on", action="store_true", help="leave out what --out has a line for")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th fault from the i-th on, for runs side by side")
    given = parser.parse_args()
    part, parts = (int(word) for word in given.part.split("/"))
    faults = drawn(FILES, given.seed)[part::parts]
    if given.list:
        for fault in faults:
            print(f"{fault.file}:{fault.line} {fault.kind}: {fault.before!r} -> {fault.after!r}")
        return
    out: Path = given.out
    if given.all:
        judged = [json.loads(line) for line in out.read_text().splitlines()]
        missed = [Fault(**row["fault"]) for row in judged if not row["found_by"]]
        faults, out = missed, out.with_suffix(".all.jsonl")
    if given.go_on and out.exists():
        done = [Fault(**json.loads(line)["fault"]) for line in out.read_text().splitlines()]
        faults = [fault for fault in faults if fault not in done]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="reprise-faults-") as directory:
        copy = Path(directory) / "tree"
        shutil.copytree(
            ROOT, copy, symlinks=True, ignore=lambda folder, _: _NOT_COPIED if Path(folder) == ROOT else set[str]()
        )
        found = 0
        with out.open("a" if given.go_on else "w") as file:
            for number, fault in enumerate(faults, 1):
                verdict = judge(fault, copy, given.all, given.far, given.near)
                found += bool(verdict.found_by)
                file.write(json.dumps(asdict(verdict)) + "\n")
                file.flush()
                result = (
                    f"found by {verdict.found_by}: {verdict.test}" if verdict.found_by else f"NOT FOUND {verdict.test}"
                )
                print(
                    f"{number} {fault.file}:{fault.line} {fault.kind}: {result} ({verdict.seconds:.0f} s)", flush=True
                )
        print(f"{found} of {len(faults)} found")


if __name__ == "__main__":
    main()
