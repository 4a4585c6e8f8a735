"""Turns traces of requests into conversations with text: lengths and shared prefixes as recorded, with filler words.

- Mooncake: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, the names of the prompt's
  512-token blocks. Equal names become equal text.
- Azure: CSV with `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`. Every request is independent.
- BurstGPT: CSV with `Timestamp` (s), `Request tokens`, `Response tokens` and, in later files, `Session ID`. Requests of
  a session become the turns of a conversation, whose history contains the real answers. Failed ones are left out.

Requests are sent at their time in the trace. Requests with the same timestamp (traces have coarse clocks) are spread
evenly up to the next timestamp.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash

from reprise.loadgen.workloads.dialogues import open_text
from reprise.loadgen.workloads.workload import Conversation, Turn

_MOONCAKE_BLOCK = 512
_MOST_TOKENS = 1 << 30  # more in one request is a mistake


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: Annotated[int, msgspec.Meta(le=_MOST_TOKENS)]
    output_length: Annotated[int, msgspec.Meta(le=_MOST_TOKENS)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] | str] | None = None


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at_s: float
    prompt_tokens: int  # length of the whole prompt, including history
    answer_tokens: int
    session: str = ""  # empty if unknown
    block_names: tuple[int, ...] = ()


def read(path: Path) -> list[TraceRequest]:
    """Read a trace, sorted by time, with the first request at 0. Raises ValueError if the file has none of these
    formats, OSError."""
    text = open_text(path)
    try:
        requests = _mooncake(text) if text.lstrip().startswith("{") else _table(text)
    except ValueError as error:
        raise ValueError(f"{path} is not a trace that can be read: {error}") from None
    requests = [request for request in requests if request.prompt_tokens > 0 and request.answer_tokens > 0]
    if not requests:
        raise ValueError(f"{path} holds no requests")
    requests.sort(key=lambda request: request.at_s)
    first_s = requests[0].at_s
    return _spread([replace(request, at_s=request.at_s - first_s) for request in requests])


def conversations(requests: list[TraceRequest], *, speed: float) -> list[Conversation]:
    """Convert requests to conversations, due at their recorded times divided by `speed`."""
    sessions: dict[str, list[TraceRequest]] = defaultdict(list)
    for number, request in enumerate(requests):
        sessions[request.session or f"r{number}"].append(request)
    found = []
    for name, rows in sessions.items():
        turns: list[Turn] = []
        history = 0
        for row in rows:
            turns.append(
                Turn(
                    max(1, row.prompt_tokens - history), row.answer_tokens, 0.0, due_s=row.at_s / speed,
                    block_names=row.block_names, block_tokens=_MOONCAKE_BLOCK if row.block_names else 0,
                )
            )  # fmt: skip
            history = row.prompt_tokens + row.answer_tokens
        found.append(Conversation(name, "", rows[0].at_s / speed, tuple(turns)))
    return found


def _mooncake(text: str) -> list[TraceRequest]:
    decoder = msgspec.json.Decoder(_MooncakeRow)
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            with _in_line(number):
                row = decoder.decode(line)
                names = tuple(map(_block_name, row.hash_ids or ()))
                found.append(TraceRequest(row.timestamp / 1e3, row.input_length, row.output_length, "", names))
    return found


@contextmanager
def _in_line(number: int) -> Iterator[None]:
    """Add the line number to a ValueError that the `with` block raises."""
    try:
        yield
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors too
        raise ValueError(f"line {number}: {error}") from None


def _block_name(name: int | str) -> int:
    return name if isinstance(name, int) else xxhash.xxh3_64_intdigest(name.encode()) >> 1


def _table(text: str) -> list[TraceRequest]:
    rows = csv.DictReader(StringIO(text))
    try:
        names = rows.fieldnames or ()
        if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(names):
            make = _azure
        elif {"Timestamp", "Request tokens", "Response tokens"} <= set(names):
            make = _burst
        else:
            raise ValueError(f"its columns are {', '.join(sorted(names)) or 'none'}")
        found = []
        for row in rows:
            with _in_line(rows.line_num):
                found.append(make(row))
    except csv.Error as error:
        raise ValueError(f"line {rows.line_num + 1}: {error}") from None
    return found


def _azure(row: Mapping[str, str | None]) -> TraceRequest:
    return TraceRequest(_seconds(row["TIMESTAMP"]), _tokens(row, "ContextTokens"), _tokens(row, "GeneratedTokens"))


def _burst(row: Mapping[str, str | None]) -> TraceRequest:
    tokens = _tokens(row, "Request tokens"), _tokens(row, "Response tokens")
    return TraceRequest(_number(row, "Timestamp"), *tokens, row.get("Session ID") or "")


def _tokens(row: Mapping[str, str | None], column: str) -> int:
    tokens = _number(row, column)
    if tokens > _MOST_TOKENS:
        raise ValueError(f"{column} of {tokens:g} tokens")
    return int(tokens)


def _number(row: Mapping[str, str | None], column: str) -> float:
    try:
        number = float(row[column] or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{column} is {row[column]!r}, which is no number")
    return number


def _seconds(stamp: str | None) -> float:
    try:
        when = datetime.fromisoformat(stamp or "")
    except ValueError:
        raise ValueError(f"TIMESTAMP is {stamp!r}, which is no time") from None
    return (when.replace(tzinfo=None) - datetime(2000, 1, 1)).total_seconds()  # noqa: DTZ001  # only differences matter


def _spread(requests: list[TraceRequest]) -> list[TraceRequest]:
    groups = [list(group) for _, group in groupby(requests, key=lambda request: request.at_s)]
    spread = []
    for group, following in zip(groups, [*groups[1:], None], strict=True):
        width_s = following[0].at_s - group[0].at_s if following else 0.0
        spread += [
            replace(request, at_s=request.at_s + width_s * place / len(group)) for place, request in enumerate(group)
        ]
    return spread
