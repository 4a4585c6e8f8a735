from pathlib import Path

from typer.testing import CliRunner

from reprise.app.cli import program
from reprise.app.cli.finding import Level
from reprise.app.cli.session_findings import look_at_session
from reprise.app.main import TRANSCRIPTS_FILE
from reprise.engine.messages import salt_of
from tests.app.conversations.test_outline_table import WHY, add, asked_for, new
from tests.app.conversations.test_transcript_store import open_store


def test_why_a_turn_left_its_conversation_is_told(tmp_path: Path) -> None:
    store = open_store(tmp_path / TRANSCRIPTS_FILE)
    add(store, "a", new(asked_for(), WHY), now=5.0)
    (finding,) = look_at_session(tmp_path / TRANSCRIPTS_FILE, "s")
    assert finding.level is Level.NOTE
    assert finding.found.startswith("t: 1 answer recorded; the turn of 1970-01-01")
    assert finding.found.endswith("left the conversation after 40 tokens, at content of message 3")
    assert finding.advice == "message 3 was edited"
    done = CliRunner().invoke(
        program.cli, ["doctor", "--session", "s", "--cache.disk_dir", str(tmp_path)], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 0
    assert "message 3 was edited" in done.output
    assert "torch" not in done.output
    store.close()


def test_who_shares_nothing_is_told(tmp_path: Path) -> None:
    store = open_store(tmp_path / TRANSCRIPTS_FILE)
    tenants = ("t", "u", f"t/{salt_of('red', is_exact=True)}")
    for now, tenant in enumerate(tenants):
        add(store, tenant, new(asked_for(tenant=tenant)), now=float(now))
    found = [finding.found for finding in look_at_session(tmp_path / TRANSCRIPTS_FILE, "s")]
    assert found == [
        "t, salt red, exact: 1 answer recorded; every turn went on from the one before",
        "u: 1 answer recorded; every turn went on from the one before",
        "t: 1 answer recorded; every turn went on from the one before",
        "another salt (cache_salt or kv_quality) hides a conversation of this name: salts share nothing",
    ]
    store.forget("s", tenant="t")
    add(store, "again", new(asked_for()), now=9.0)
    assert list(look_at_session(tmp_path / TRANSCRIPTS_FILE, "s"))[-1].found.startswith("another key has")
    store.close()


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    (finding,) = look_at_session(tmp_path / TRANSCRIPTS_FILE, "s")
    assert finding.level is Level.FAIL
    open_store(tmp_path / TRANSCRIPTS_FILE).close()
    (finding,) = look_at_session(tmp_path / TRANSCRIPTS_FILE, "s")
    assert (finding.level, finding.found) == (Level.WARN, "nothing is recorded under s")
    (tmp_path / TRANSCRIPTS_FILE).write_bytes(b"no database" * 1000)
    (finding,) = look_at_session(tmp_path / TRANSCRIPTS_FILE, "s")
    assert finding.level is Level.FAIL
