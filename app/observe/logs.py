"""Formats logs: lines for people, or one JSON object per line for machines. Both name the request they belong to;
neither ever contains a prompt or an answer.

A record's `extra={"fields": {...}}` become fields of the object, and `name=value` after the message of a line.
"""

import logging
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

MAX_LINE = 65_536  # longest line of the engine's output: a longer one is cut into lines of that length

request_id: ContextVar[str] = ContextVar("request_id", default="")  # the request whose task this is

# As `reprise.engine.process.loop` writes its lines.
_ENGINE_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (?P<level>[A-Z]+) (?P<logger>[\w.]+): (?P<message>.*)"
)
_encode = msgspec.json.Encoder(enc_hook=str).encode


class TextFormatter(logging.Formatter):
    """A formatter of lines such as: 2026-01-31 12:00:00,000 INFO app.service: message name=value [req_...]"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items() if value is not None)
        owner = request_id.get()
        return super().formatMessage(record) + fields + (f" [{owner}]" if owner else "")


class JsonFormatter(logging.Formatter):
    """A formatter of objects with "time", "level", "logger", "message", "process": "app", and if any `request_id`,
    fields and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": "app",
        }
        if owner := request_id.get():
            entry["request_id"] = owner
        entry |= {name: value for name, value in _fields(record).items() if value is not None}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _encode(entry).decode()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


class EngineOutput:
    """A writer of the engine process's output, line by line as JSON: parsed log lines, and anything else as a
    message."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._rest = ""

    def __call__(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        while len(self._rest) > MAX_LINE:
            lines.append(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]
        for line in filter(str.strip, lines):
            self._write(self._entry(line) + "\n")

    @staticmethod
    def _entry(line: str) -> str:
        found = _ENGINE_LINE.fullmatch(line)
        if found is None:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            return _encode({"time": now, "level": "INFO", "message": line, "process": "engine"}).decode()
        then = datetime.strptime(found["time"], "%Y-%m-%d %H:%M:%S,%f").astimezone(UTC)  # it writes local time
        parts = {**found.groupdict(), "time": then.isoformat(timespec="milliseconds"), "process": "engine"}
        return _encode(parts).decode()


def configure(log_format: str, stream: TextIO = sys.stderr) -> None:
    """Set up logging for the whole process, in place of any earlier setup. log_format: of the setting with this
    name."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
