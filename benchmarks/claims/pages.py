"""Writes docs/results.md of all claims, and puts their numbers into the documents that repeat them."""

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.claims.read import Claim

MOST_AIMS = 2  # most missed aims that a row names
_NUMBER = r"[\d,.]*\d(?: %)?"
_HEAD = """# Results

Every number is read from the file named after it, in `benchmarks/results/`, by `python -m benchmarks.claims`, which
also puts it into the documents that repeat it. A file holds the command, the versions, the machine, the rounds or their
spread, and under `held` its aims and whether each is met. Machines of two cores are shared virtual ones. What `--data`
names is [told](measuring.md#the-data-of-the-programs). A commit that ends in `-dirty` had changes beside it that were
not committed.
"""


def results_page(claims: Sequence[Claim], detail: Sequence[tuple[str, str]]) -> str:
    """Return the text of docs/results.md. detail: (title, address) of each page with tables and plots."""
    lines = [_HEAD, *(f"- [{title}]({address})" for title, address in detail)]
    for theme, together in groupby(claims, key=lambda claim: claim.theme):
        lines += [
            "",
            f"## {theme}",
            "",
            *(f"- {claim.marked} ([{claim.result}](#{claim.result}))" for claim in together),
        ]
    lines += ["", "## How they were measured", ""]
    lines += ["The programs are named as they are called now; a file may know one by an older name.", ""]
    lines += ["| file | measured by | on | date, commit | aims missed |", "|---|---|---|---|---|"]
    lines += [_row(claim) for claim in {claim.result: claim for claim in claims}.values()]
    return "\n".join(lines) + "\n"


def _row(claim: Claim) -> str:
    name = (
        f'<a id="{claim.result}"></a>[{claim.result}](../benchmarks/results/{claim.result}.json)'  # sentences lead here
    )
    return f"| {name} | `{claim.command}` | {claim.machine} | {claim.date}, {claim.commit} | {_missed(claim)} |"


def _missed(claim: Claim) -> str:
    """Return the aims of a claim's result that do not hold, or how many, where a table has no room for them."""
    if not claim.num_aims:
        return "has none"
    if len(claim.missed) > MOST_AIMS:
        return f"{len(claim.missed)} of {claim.num_aims}: see `held` in the file"
    return "; ".join(claim.missed).replace("|", "\\|")


def with_numbers(text: str, claims: Iterable[Claim]) -> str:
    """Return the text of a document, with the present numbers put into each sentence that has the words of a claim.
    Line breaks and emphasis stay. A sentence that says the same in other words is not changed."""
    for claim in claims:
        parts = claim.marked.split("**")
        pattern = "".join(_NUMBER if n % 2 else f"({_words(part)})" for n, part in enumerate(parts))
        text = re.sub(f"(?i){pattern}", functools.partial(_between, numbers=parts[1::2]), text)
    return text


def _between(found: re.Match[str], numbers: Sequence[str]) -> str:
    """Return the words that were found, with these numbers between them."""
    return "".join(word + number for word, number in zip(found.groups(), [*numbers, ""], strict=True))


def missing(text: str, claims: Iterable[Claim]) -> Iterator[str]:
    """Yield the sentence of each claim that a document does not contain with the same words and numbers. Line breaks,
    emphasis and capitals do not count."""
    words = _bare(text)
    return (claim.sentence for claim in claims if _bare(claim.sentence) not in words)


def _bare(text: str) -> str:
    """Return a text without emphasis and line breaks, its first letters small."""
    return " ".join(text.replace("*", "").split()).lower()


def _words(text: str) -> str:
    """Return what matches these words with any line breaks and emphasis between them."""
    return re.sub(r"(?:\\ )+", lambda _: r"[\s*]+", re.escape(text))


def of_page(claims: Iterable[Claim], page: Path, root: Path) -> list[Claim]:
    """Return the claims that the document `page` has to repeat. root: the checkout, to which the claims' paths are
    relative."""
    return [claim for claim in claims if str(page.relative_to(root)) in claim.pages]
