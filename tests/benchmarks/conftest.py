"""Texts in place of the recorded ones, for benchmarks that read some."""

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.harness.make_model import BUNDLED
from tools.bundled_model.corpus import is_held_out

WORDS = "the a sea town and of in he she was went to old small house with long grey light"
HELD_OUT = [name for name in map(str, range(2000)) if is_held_out(name)]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of drawn words, in which a name is said again."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(0)

    def said(count: int) -> str:
        return " ".join(rng.choices(WORDS.split(), k=count))

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        with gzip.open(folder / name, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    turns = [{"role": role, "content": said(40)} for role in ("user", "assistant") * 3]
    vocabulary = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).get_vocab()
    names = sorted(token[1:] for token in vocabulary if re.fullmatch("Ġ[A-Z][a-z]{4,}", token))[:12]

    def asked(name: str) -> list[dict[str, str]]:
        texts = (f"{said(20)} in {name}", said(40), said(20), f"It is in {name}")
        return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]

    write("dialogues/topical_chat.jsonl.gz", [{"id": key, "turns": turns} for key in HELD_OUT])
    write(
        "dialogues/schema_guided.jsonl.gz",
        [{"id": key, "turns": asked(name)} for key, name in zip(HELD_OUT, names, strict=False)],
    )
    keys = [key for key in map(str, range(2000)) if is_held_out(f"{key}/0")][:2]  # keys of books whose first chapter is
    write("long_docs/books.jsonl.gz", [{"id": key, "text": said(40_000)} for key in keys])
    (folder / "text").mkdir()
    with gzip.open(folder / "text/wikitext2_valid.txt.gz", "wt", encoding="utf-8") as file:
        file.write(said(20_000))
    return folder
