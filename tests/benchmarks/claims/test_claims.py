"""Tests that every number which documents claim is the one in its result, and that each can be found."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.claims.__main__ import DETAIL
from benchmarks.claims.pages import missing, of_page, results_page, with_numbers
from benchmarks.claims.read import Claim, claims, value_at
from benchmarks.figures import draw
from benchmarks.harness.result_files import RESULTS, ROOT

FOUND = claims()
PAGES = ("README.md", "docs/limits.md")
# Measured: a number with one of these units. Facts such as the size of a model have others.
MEASURED = re.compile(r"\b\d[\d,.]*\s(?:ms|%|times|tokens a second|µs)(?!\w)")
RESULT = {
    "command": "python -m benchmarks.it",
    "finished": "2026-01-02T03:04:05+00:00",
    "machine": {"cpu": "Intel(R) Xeon(R) Processor @ 2.00GHz", "cores": 2, "commit": "abc"},
    "arms": {"ours": {"ms": 5.26}, "theirs": {"ms": 20.0}, "with 0.5": {"ms": 1}},
    "rows": [{"kind": "a", "turns": 3, "wrong": []}, {"kind": "b", "turns": 4, "wrong": [1]}],
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("arms.ours.ms", 5.26),
        ('arms."with 0.5".ms', 1),
        ("arms.theirs.ms / arms.ours.ms", 20.0 / 5.26),
        ("rows.1.turns", 4),
        ("rows[kind=b].turns", 4),
        ("rows[kind=b].wrong.#", 1),
        ("sum rows.*.turns", 7),
        ("max arms.*.ms", 20.0),
    ],
)
def test_what_a_path_names(path: str, value: float) -> None:
    assert value_at(RESULT, path) == value


@pytest.mark.parametrize("path", ["arms.none.ms", "rows.7.turns", "rows[kind=c].turns", "rows.x", "sum rows.*.none"])
def test_a_number_that_is_not_there_is_an_error(path: str) -> None:
    with pytest.raises(LookupError):
        value_at(RESULT, path)


def one(tmp_path: Path, text: str, held: dict[str, bool] | None = None, **paths: str) -> Claim:
    (tmp_path / "it.json").write_text(json.dumps({**RESULT, "held": held or {}}))
    lines = "".join(f"{name} = '{path}'\n" for name, path in paths.items())
    file = tmp_path / "claims.toml"
    file.write_text(f'[[claim]]\ntheme = "Speed"\ntext = "{text}"\nresult = "it"\npages = ["a.md"]\n{lines}')
    return claims(file, tmp_path)[0]


def test_a_document_gets_the_numbers_of_its_claims_and_keeps_its_lines(tmp_path: Path) -> None:
    claim = one(
        tmp_path, "{ours:.1f} ms instead of {theirs:.0f} ms in a turn", ours="arms.ours.ms", theirs="arms.theirs.ms"
    )
    before = "- **7.7 ms instead\n  of 99 ms** in a turn, and 3 ms instead of 4 ms in none.\n"
    assert [*missing(before, [claim])] == [claim.sentence]
    after = with_numbers(before, [claim])
    assert after == "- **5.3 ms instead\n  of 20 ms** in a turn, and 3 ms instead of 4 ms in none.\n"
    assert [*missing(after, [claim])] == []
    assert with_numbers("Nothing of it.", [claim]) == "Nothing of it."


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({}, "has none"),
        ({"right": True}, ""),
        ({"right": True, "at most 1.1 x": False}, "at most 1.1 x"),
        (dict.fromkeys("abc", False) | {"d": True}, "3 of 4: see `held` in the file"),
    ],
)
def test_the_page_says_where_and_when_it_was_measured_and_what_was_missed(
    tmp_path: Path, held: dict, said: str
) -> None:
    claim = one(tmp_path, "{share:.0%} are wrong", held=held, share="rows[kind=b].wrong.# / rows[kind=b].turns")
    lines = results_page([claim, claim], []).splitlines()
    assert lines.count("- **25 %** are wrong ([it](#it))") == 2
    row = f"| `python -m benchmarks.it` | 2 cores of Intel Xeon | 2026-01-02, abc | {said} |"
    assert lines.count(f'| <a id="it"></a>[it](../benchmarks/results/it.json) {row}') == 1


def test_the_results_page_is_made_of_the_results() -> None:
    written = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert results_page(FOUND, DETAIL) == written, "python -m benchmarks.claims"


@pytest.mark.bench
@pytest.mark.parametrize("name", sorted(draw.PAGES))
def test_the_pages_of_results_are_drawn_from_the_results(name: str, tmp_path: Path) -> None:
    written = (ROOT / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8")
    assert draw.page(name, tmp_path) == written, "make figures"


@pytest.mark.parametrize("page", sorted({page for claim in FOUND for page in claim.pages}))
def test_a_document_says_what_the_results_say(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert [*missing(text, of_page(FOUND, ROOT / page, ROOT))] == [], "python -m benchmarks.claims"


@pytest.mark.parametrize("page", PAGES)
def test_every_measured_number_of_a_document_is_a_claim(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").replace("*", "").split())
    for claim in of_page(FOUND, ROOT / page, ROOT):
        text = re.sub(re.escape(claim.sentence), "", text, flags=re.IGNORECASE)
    assert MEASURED.findall(text) == []


def test_every_result_is_claimed_drawn_or_quoted() -> None:
    """A result that no claim, figure or document reads is deleted."""
    readers = [
        *(path for folder in ("claims", "figures", "paper") for path in (ROOT / "benchmarks" / folder).glob("*")),
        *(path for path in (ROOT / "docs").rglob("*.md") if path.name != "results.md"),
        ROOT / "loadgen" / "sim" / "presets.py",
    ]
    told = "\n".join(path.read_text(encoding="utf-8") for path in readers if path.is_file())
    unread = [file.stem for file in RESULTS.glob("*.json") if not re.search(rf"\b{file.stem}\b", told)]
    assert unread == []
