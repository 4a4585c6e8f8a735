"""The training text of the bundled model: dialogues and public-domain books, rendered, split and tokenized.

Files are read from a data directory given on the command line (`dialogues/*.jsonl.gz`, `long_docs/books.jsonl.gz`);
none of their text is part of the repository.
"""

import gzip
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]
VOCAB_SIZE = 4096

# Half of the dialogues open with a fitting system message, so that the system role has a meaning after training.
SYSTEM_PROMPTS = {
    "topical_chat": (
        "You are a friendly person who likes to chat.",
        "You are a helpful assistant. Keep the conversation going.",
        "Chat with the user about everyday topics.",
    ),
    "schema_guided": (
        "You are a helpful assistant.",
        "You are an assistant that helps people find and book things.",
        "Help the user with their request. Ask when something is missing.",
    ),
    "taskmaster4": ("You take orders in a coffee shop.", "You are a friendly barista."),
}

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(slots=True)
class Source:
    """The token ids of one source, as documents laid end to end, and the places where documents start."""

    name: str
    ids: np.ndarray  # [tokens] uint16
    starts: np.ndarray  # [documents] int64


def is_held_out(document_id: str) -> bool:
    """Whether a document belongs to the held-out 2 %, chosen by a hash so that every run agrees."""
    return hashlib.blake2b(document_id.encode(), digest_size=2).digest()[0] < 5


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def render_dialogue(turns: list[dict[str, str]], system: str | None) -> str:
    """Render a whole dialogue as ChatML, as CHAT_TEMPLATE does."""
    messages = ([{"role": "system", "content": system}] if system else []) + turns
    body = "".join(f"{TURN_START}{m['role']}\n{m['content'].strip()}{TURN_END}\n" for m in messages)
    return body + END_OF_TEXT


def documents(data: Path, source: str) -> Iterator[tuple[str, str]]:
    """Yield (id, rendered text) of every document of a source."""
    if source == "books":
        for row in _rows(data / "long_docs" / "books.jsonl.gz"):
            # Chapters count as documents; otherwise the held-out part of 134 books would be only two or three books.
            for number, chapter in enumerate(row["text"].split("\n## ")):
                yield f"{row['id']}/{number}", chapter.strip() + END_OF_TEXT
        return
    rng = random.Random(source)
    for row in _rows(data / "dialogues" / f"{source}.jsonl.gz"):
        system = rng.choice(SYSTEM_PROMPTS[source]) if rng.random() < 0.5 else None
        yield row["id"], render_dialogue(row["turns"], system)


SOURCES = ("books", "schema_guided", "topical_chat", "taskmaster4")


def train_tokenizer(data: Path) -> Tokenizer:
    """Train a byte-level BPE of VOCAB_SIZE on a sample with more dialogue than books."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    limits = {"books": 6_000_000, "schema_guided": 6_000_000, "topical_chat": 5_000_000, "taskmaster4": 1_000_000}

    def sample() -> Iterator[str]:
        for source in SOURCES:
            room = limits[source]
            texts = [text for key, text in documents(data, source) if not is_held_out(key)]
            random.Random(0).shuffle(texts)
            for text in texts:
                for special in SPECIAL_TOKENS:
                    text = text.replace(special, "\n")
                yield text
                room -= len(text)
                if room < 0:
                    break

    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(), trainer)
    return tokenizer


def load_sources(data: Path, tokenizer: Tokenizer, held_out: bool) -> dict[str, Source]:
    """Tokenize the training part or the held-out part of every source."""
    sources = {}
    for name in SOURCES:
        texts = [text for key, text in documents(data, name) if is_held_out(key) == held_out]
        encoded = [np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch_fast(texts)]
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
        sources[name] = Source(name, np.concatenate(encoded), np.cumsum(lengths) - lengths)
    return sources


def sample_batch(
    sources: dict[str, Source], weights: dict[str, float], batch: int, length: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw windows, int64 [batch, length + 1]; half of them begin where a document begins."""
    names = list(weights)
    chosen = rng.choice(len(names), size=batch, p=np.array([weights[n] for n in names]))
    out = np.empty((batch, length + 1), dtype=np.int64)
    for row, index in enumerate(chosen):
        source = sources[names[index]]
        last = len(source.ids) - length - 1
        start = rng.integers(last) if rng.random() < 0.5 else min(rng.choice(source.starts), last)
        out[row] = source.ids[start : start + length + 1]
    return out
