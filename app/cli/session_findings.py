"""Tells, for `reprise doctor --session`, why a conversation's last turns were computed again."""

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from reprise.app.cli.finding import Finding, Level
from reprise.app.conversations.divergence import hidden_by
from reprise.app.conversations.outline_table import SessionReport, reports_of
from reprise.engine.messages import given_salt, is_exact


def look_at_session(transcripts: Path, session_id: str) -> Iterator[Finding]:
    """Report for a session's name, with every key and salt, what is recorded and why its turns were computed again.
    transcripts: the file with the transcripts."""
    try:
        reports = reports_of(transcripts, session_id)
    except OSError:
        yield Finding("session", Level.FAIL, f"there is no {transcripts}", "give --cache.disk_dir as the server has it")
        return
    except sqlite3.Error as error:
        yield Finding(
            "session", Level.FAIL, f"{transcripts} cannot be read: {error}", "start the server once, then ask"
        )
        return
    if not reports:
        advice = "a conversation is recorded with its first answer, and deleted cache.ttl_s after its last use"
        yield Finding("session", Level.WARN, f"nothing is recorded under {session_id}", advice)
    for report in reports:
        yield _of(report)
    if reports and (hidden := hidden_by([report.tenant for report in reports], reports[0].tenant)) is not None:
        yield Finding("session", Level.NOTE, hidden)


def _of(report: SessionReport) -> Finding:
    key, _, salt = report.tenant.partition("/")
    name = key + (f", salt {given_salt(salt)}" if given_salt(salt) else "") + (", exact" if is_exact(salt) else "")
    recorded = f"{name}: {report.answers} answer{'' if report.answers == 1 else 's'} recorded"
    if report.why is None or report.left_s is None:
        return Finding("session", Level.OK, f"{recorded}; every turn went on from the one before")
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.left_s))
    why = report.why
    place = why.where if why.message is None else f"{why.where} of message {why.message}"
    found = f"{recorded}; the turn of {at} left the conversation after {why.token:,} tokens, at {place}"
    return Finding("session", Level.NOTE, found, why.sentence)
