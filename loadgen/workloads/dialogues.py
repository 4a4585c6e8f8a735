"""Reads files of real conversations: what people said, and how long the answers were.

Formats: ShareGPT's (`{"conversations": [{"from": "human", "value": …}, …]}`), our dialogues (`{"turns": [{"role":
"user", "content": …}, …]}`) and OpenAI's (`{"messages": …}`), as one JSON list or one per line, optionally compressed
with gzip.
"""

import gzip
import json
import random
import zlib
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from reprise.loadgen.workloads.workload import Script, Turn

_CHARACTERS_PER_TOKEN = 4  # for English in common vocabularies


class Dialogues(NamedTuple):
    """A file's conversations in which a person says something that is answered, and the number of all others."""

    scripts: list[Script]
    unusable: int


def read(path: Path) -> Dialogues:
    """Read conversations from a JSON file in ShareGPT's, OpenAI's or our format, as a list or one per line, compressed
    with gzip if its name ends in .gz. A conversation is usable if at least one message of a person in it is answered.
    Raises ValueError if the file is damaged, is not JSON or has no usable conversation, OSError if it cannot be
    read."""
    found = [_script(record) for record in _records(path)]
    scripts = [script for script in found if script]
    if not scripts:
        raise ValueError(f"{path} holds no conversations")
    return Dialogues(scripts, len(found) - len(scripts))


def choose(scripts: list[Script], rng: random.Random, count: int) -> list[Script]:
    """Return `count` scripts (conversations without times) in random order. All are used before any is repeated."""
    return list(islice(cycle(rng.sample(scripts, len(scripts))), count))


def open_text(path: Path) -> str:
    """Read a text file, decompressed if its name ends in .gz. Raises ValueError if it is not one, OSError."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8-sig") as file:
                return file.read()
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8") from None
    except EOFError:
        raise ValueError(f"{path} ends in the middle: is it whole?") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}") from None


def _records(path: Path) -> Iterator[Any]:
    text = open_text(path)
    lines = {1: text} if text.lstrip().startswith("[") else dict(enumerate(text.splitlines(), 1))
    for number, line in lines.items():
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            place = f"line {number + error.lineno - 1}, column {error.colno}"
            raise ValueError(f"{path} is not JSON: {error.msg} in {place}") from None
        if len(lines) == 1 and isinstance(record, list):
            yield from record
        else:
            yield record


def _script(record: Any) -> Script:
    """Convert a record, beginning with the first thing a person says; unanswered messages are left out."""
    if not isinstance(record, dict):
        return ()
    said = record.get("conversations") or record.get("turns") or record.get("messages") or ()
    turns: list[Turn] = []
    question = ""
    for part in said if isinstance(said, list) else ():
        if not isinstance(part, dict):
            continue
        who, text = part.get("from") or part.get("role"), part.get("value") or part.get("content")
        if not isinstance(text, str) or not text.strip():
            continue
        if who in ("human", "user"):
            question = f"{question}\n{text}" if question else text
        elif question and who != "system":
            turns.append(Turn(_tokens(question), _tokens(text), 0.0, question))
            question = ""
    return tuple(turns)


def _tokens(text: str) -> int:
    return max(1, len(text) // _CHARACTERS_PER_TOKEN)
