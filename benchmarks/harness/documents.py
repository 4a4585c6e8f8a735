"""Texts on which answers are compared: of books, chats and WikiText-2, none of which calibrated anything."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path


def documents(data: Path) -> Iterator[str]:
    """Yield texts of the three kinds in turn."""
    with gzip.open(data / "long_docs/books.jsonl.gz", "rt", encoding="utf-8") as lines:
        books = [text[len(text) // 2 :] for line in lines if len(text := json.loads(line)["text"]) > 100_000]
    with gzip.open(data / "dialogues/topical_chat.jsonl.gz", "rt", encoding="utf-8") as lines:
        turns = [turn for line in lines for turn in json.loads(line)["turns"]]
    chat = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)
    with gzip.open(data / "text/wikitext2_valid.txt.gz", "rt", encoding="utf-8") as lines:
        wiki = lines.read()
    for number, book in enumerate(books):
        yield book[:40_000]
        for text in (chat, wiki):
            if len(part := text[number * 30_000 : (number + 1) * 30_000]) == 30_000:
                yield part
