"""Reads the texts on which answers are compared: of books, chats and WikiText-2, none of which calibrated anything."""

import gzip
import json
import random
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.harness.models import model_directory
from tools.bundled_model.corpus import documents as corpus_documents
from tools.bundled_model.corpus import is_held_out

Encode = Callable[[str], list[int]]
TEXTS = ("topical_chat", "books", "wikitext2")


def text_options(parser: ArgumentParser, model: str = "smollm2") -> None:
    """Add the options that all programs of this folder have. model: default of --model."""
    parser.add_argument("--data", type=Path, required=True, help="directory with dialogues/, long_docs/ and text/")
    parser.add_argument("--model", type=model_directory, default=model, help="bundled, smollm2, or a directory")
    parser.add_argument("--threads", type=int, help="of torch; its own choice by default")


def encoder(model: Path) -> Encode:
    """Return a function that converts a text to token ids, without special tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def as_chat(turns: Sequence[dict[str, str]]) -> str:
    """Render turns as ChatML."""
    return "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in turns)


def chats(data: Path) -> Iterator[list[dict[str, str]]]:
    """Yield the turns of each recorded chat."""
    with gzip.open(data / "dialogues/topical_chat.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["turns"]


def books(data: Path) -> Iterator[str]:
    """Yield the text of each book."""
    with gzip.open(data / "long_docs/books.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def wikitext(data: Path) -> str:
    """Return WikiText-2's validation text."""
    with gzip.open(data / "text/wikitext2_valid.txt.gz", "rt", encoding="utf-8") as lines:
        return lines.read()


def documents(data: Path) -> Iterator[str]:
    """Yield parts of books, chats and WikiText-2 in turn."""
    chat, wiki = "".join(map(as_chat, chats(data))), wikitext(data)
    for number, book in enumerate(text for text in books(data) if len(text) > 100_000):
        yield book[len(book) // 2 :][:40_000]
        for text in (chat, wiki):
            if len(part := text[number * 30_000 : (number + 1) * 30_000]) == 30_000:
                yield part


def texts_of(data: Path, encode: Encode, lengths: Sequence[int]) -> list[Tensor]:
    """Return a text [tokens] of each length, in that order: the beginning of the next document that is long enough.
    There are fewer if documents run out."""
    found: list[Tensor] = []
    for document in documents(data):
        if len(found) == len(lengths):
            break
        length = lengths[len(found)]
        if len(ids := encode(document)[:length]) == length:
            found.append(torch.tensor(ids))
    return found


def held_out(data: Path, name: str, encode: Encode) -> list[list[int]] | None:
    """Return the token ids of each document of a corpus that the bundled model was not trained on; None if the corpus
    is missing."""
    try:
        if name == "wikitext2":
            return [encode(wikitext(data))]
        return [encode(text) for key, text in corpus_documents(data, name) if is_held_out(key)]
    except FileNotFoundError:
        return None


def draw_windows(documents_ids: Sequence[Sequence[int]], length: int, count: int, seed: int) -> list[list[int]]:
    """Return `count` windows of `length` tokens from documents that are laid end to end. If these have fewer windows,
    they are laid end to end again in another order, and so on. Raises ValueError if they are too short for one
    window."""
    rng = random.Random(seed)
    order = list(range(len(documents_ids)))
    windows: list[list[int]] = []
    while len(windows) < count:
        ids = [token for place in order for token in documents_ids[place]]
        starts = range(0, len(ids) - length + 1, length)
        if not starts:
            raise ValueError(f"{len(ids)} tokens are too few for a window of {length}")
        if len(starts) >= count:  # spread over the whole text
            starts = range(0, len(ids) - length + 1, (len(ids) - length) // max(1, count - 1))
        windows += [ids[start : start + length] for start in starts]
        rng.shuffle(order)
    return windows[:count]
