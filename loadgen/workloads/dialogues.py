"""Files of conversations that people had: what they said, and how long the answers were.

Read are ShareGPT's layout (`{"conversations": [{"from": "human", "value": …}, …]}`), our dialogues
(`{"turns": [{"role": "user", "content": …}, …]}`) and OpenAI's (`{"messages": …}`), as one JSON list or a line each,
also through gzip.
"""

import gzip
import json
import random
import zlib
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from loadgen.workloads.workload import Script, Turn

_CHARACTERS_PER_TOKEN = 4  # English in the usual vocabularies


class Dialogues(NamedTuple):
    """Every conversation of a file in which a person says something that is answered, and how many are none such."""

    scripts: list[Script]
    unusable: int


def read(path: Path) -> Dialogues:
    """Raises ValueError if there is nothing usable, OSError if the file cannot be read."""
    found = [_script(record) for record in _records(path)]
    scripts = [script for script in found if script]
    if not scripts:
        raise ValueError(f"{path} holds no conversations")
    return Dialogues(scripts, len(found) - len(scripts))


def choose(scripts: list[Script], rng: random.Random, count: int) -> list[Script]:
    """`count` of them in random order; all before any comes again."""
    return list(islice(cycle(rng.sample(scripts, len(scripts))), count))


def open_text(path: Path) -> str:
    """A text file, unpacked where its name ends in .gz. Raises ValueError where it is none, OSError."""
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
    """From the first thing a person says on; what nobody answered is left out."""
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
