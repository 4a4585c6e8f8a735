"""Defines the findings of `reprise doctor`."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"  # works, but could be better
    WARN = "warn"  # will work badly, or not for long
    FAIL = "fail"  # will not work


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    level: Level
    found: str
    advice: str = ""
