import errno
import fcntl
import hashlib
import os
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from reprise.app.cli import program
from reprise.app.state_dir import load_tenant_secret
from reprise.cache.blocks.stored import SessionRecord, StoredBlock
from reprise.cache.storage.extent_format import ExtentForm, SegmentSizes, checksum, record_key
from reprise.cache.storage.extent_store import ExtentStore
from tests.cache.storage.disk_helpers import forge, make_tier

SEGMENTS = (512, 512)


def reprise(state_dir: Path, *arguments: str, answer: str | None = None) -> Result:
    command = ["cache", *arguments, "--cache.disk_dir", str(state_dir)]
    return CliRunner().invoke(program.cli, command, input=answer, env={"COLUMNS": "200", "NO_COLOR": "1"})


def store(state_dir: Path, fingerprint: bytes, *names: str, pinned: bool = False) -> None:
    """An extent of two blocks (32 and 8 tokens) for each of these sessions."""
    tier = ExtentStore(
        directory=state_dir, capacity_bytes=1 << 30, min_free_bytes=0,
        form=ExtentForm(fingerprint, SegmentSizes(SEGMENTS), record_key(load_tenant_secret(state_dir))),
        read_bytes_per_s=0.0, write_bytes_per_s=0.0, deadline_s=5.0, owner="a running server (pid 4242)",
    )  # fmt: skip
    tier.open()
    for name in names:
        session = SessionRecord("tenant", "", name, b"context", time.time(), pinned, None)
        keys = [hashlib.blake2b(f"{name}/{n}".encode(), digest_size=16).digest() for n in range(3)]
        blocks = [StoredBlock(keys[1], keys[0], bytes(128), False), StoredBlock(keys[2], keys[1], bytes(32), True)]
        segments = [[memoryview(bytes([layer, block]) * 256) for block in range(2)] for layer in range(len(SEGMENTS))]
        checksums = b"".join(map(checksum, chain.from_iterable(segments)))
        tier.write(session, blocks, checksums, segments.__getitem__)
    tier.close()


def records(state_dir: Path) -> list[Path]:
    return sorted(state_dir.glob("kv/*/??/*.kv"))


@pytest.fixture
def two_models(tmp_path: Path) -> Path:
    store(tmp_path, b"one model", "alpha", "beta")
    store(tmp_path, b"other model", "gamma", pinned=True)
    return tmp_path


def test_ls_names_every_session_with_its_size(two_models: Path):
    result = reprise(two_models, "ls")
    assert result.exit_code == 0
    rows = {line.split()[0]: line.split() for line in result.output.splitlines()[1:]}
    assert rows.keys() == {"alpha", "beta", "gamma"}
    assert rows["alpha"][1:4] == ["tenant", "2", "40"]
    assert "pinned" in rows["gamma"]
    assert "pinned" not in rows["alpha"]
    assert len(records(two_models)) == 3  # looking takes nothing away


def test_stats_add_up(two_models: Path):
    result = reprise(two_models, "stats")
    assert result.exit_code == 0
    one, other = (line.split() for line in result.output.splitlines()[1:3])
    assert one[:5] == [b"one model".hex()[:12], "2", "0", "2", "4"]
    assert other[:5] == [b"other model".hex()[:12], "1", "1", "1", "2"]
    assert float(one[6]) == float(other[6]) == 6.0  # rows are this small, so most is header
    assert " of " not in result.output  # how much there may be is found out at a start
    assert "of 8 GiB" in reprise(two_models, "stats", "--cache.disk_gib", "8").output


def test_verify_finds_a_flipped_bit(two_models: Path):
    assert (reprise(two_models, "verify").exit_code, reprise(two_models, "verify").output) == (
        0,
        "3 records checked, 0 damaged\n",
    )
    damaged = records(two_models)[0]
    with damaged.open("r+b") as file:
        file.seek(-4096, 2)
        byte = file.read(1)[0]
        file.seek(-4096, 2)
        file.write(bytes([byte ^ 1]))
    result = reprise(two_models, "verify")
    assert result.exit_code == 1
    assert damaged.stem in result.output
    assert "checksum" in result.output
    assert "3 records checked, 1 damaged" in result.output
    assert "computes damaged KV again" in result.output


def test_verify_tells_a_disk_that_reports_errors_from_damage(two_models: Path, monkeypatch: pytest.MonkeyPatch):
    damaged, unread, _ = records(two_models)
    with damaged.open("r+b") as file:
        file.seek(-4096, 2)
        file.write(bytes(4096))
    inode, preadv = unread.stat().st_ino, os.preadv

    def failing(fd: int, *arguments: Any) -> int:
        if os.fstat(fd).st_ino == inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, *arguments)

    monkeypatch.setattr(os, "preadv", failing)
    result = reprise(two_models, "verify")
    assert result.exit_code == 1
    assert f"{unread.stem}: io: " in result.output
    assert "3 records checked, 1 damaged, 1 not read\n" in result.output
    assert "may be intact" in result.output
    damaged.unlink()
    monkeypatch.undo()
    assert "not read" not in reprise(two_models, "verify").output


def test_verify_tells_of_records_that_are_none_any_more(two_models: Path):
    damaged = records(two_models)[0]
    with damaged.open("r+b") as file:
        file.truncate(100)
    result = reprise(two_models, "verify")
    assert result.exit_code == 1
    assert damaged.stem in result.output
    assert "3 records checked, 1 damaged" in result.output


def test_verify_misses_a_file_that_the_index_names(two_models: Path):
    gone = records(two_models)[0]
    gone.unlink()
    result = reprise(two_models, "verify")
    assert (result.exit_code, f"{gone.stem}: missing" in result.output) == (1, True)
    assert "3 records checked, 1 damaged" in result.output


def test_verify_tells_a_record_that_somebody_else_wrote(two_models: Path):
    forged = records(two_models)[0]
    forge(forged, lambda header: header)
    for _ in range(2):  # looking takes nothing away
        result = reprise(two_models, "verify")
        assert (result.exit_code, f"{forged.stem}: forged" in result.output) == (1, True)
        assert "3 records checked, 1 damaged" in result.output


@pytest.mark.parametrize("secret", [None, bytes(32)])
def test_without_the_secret_that_they_were_written_with_no_record_is_believed(two_models: Path, secret: bytes | None):
    file = two_models / "tenant_secret"
    own = file.read_bytes()
    file.unlink()
    if secret is not None:
        file.write_bytes(secret)
    result = reprise(two_models, "verify")
    assert (result.exit_code, "3 records checked, 3 damaged" in result.output) == (1, True)
    assert file.exists() == (secret is not None)
    file.write_bytes(own)
    assert reprise(two_models, "verify").exit_code == 0


def test_a_damaged_secret_ends_the_program(two_models: Path):
    (two_models / "tenant_secret").write_bytes(b"short")
    result = reprise(two_models, "verify")
    assert (result.exit_code, "is damaged" in result.output) == (1, True)


def test_a_model_of_which_no_header_is_left_is_damaged_and_can_be_cleared(two_models: Path):
    for record in records(two_models):
        with record.open("r+b") as file:
            file.write(bytes(4))
    for _ in range(2):  # looking takes nothing away
        result = reprise(two_models, "verify")
        assert (result.exit_code, "3 records checked, 3 damaged" in result.output) == (1, True)
    result = reprise(two_models, "clear", "--yes")
    assert (result.exit_code, records(two_models)) == (0, [])
    assert "3 records deleted" in result.output
    assert reprise(two_models, "verify").exit_code == 0


def test_clear_asks_and_then_takes_all(two_models: Path):
    assert reprise(two_models, "clear", answer="n\n").exit_code == 1
    unasked = reprise(two_models, "clear")
    assert (unasked.exit_code, "--yes agrees" in unasked.stderr) == (1, True)
    assert len(records(two_models)) == 3
    result = reprise(two_models, "clear", "--yes")
    assert (result.exit_code, records(two_models)) == (0, [])
    assert "3 records deleted" in result.output
    assert "No sessions" in reprise(two_models, "ls").output


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "clear"])
def test_a_directory_in_use_is_left_alone(two_models: Path, command: str, monkeypatch: pytest.MonkeyPatch):
    with (two_models / "kv" / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = reprise(two_models, command)
    assert result.exit_code == 1
    assert result.output == f"reprise: {two_models} is in use by a running server (pid 4242); stop it first\n"
    assert len(records(two_models)) == 3


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "clear"])
def test_an_empty_directory_is_no_error_and_a_missing_one_is(tmp_path: Path, command: str):
    arguments = [command, "--yes"] if command == "clear" else [command]
    assert reprise(tmp_path, *arguments).exit_code == 0
    result = reprise(tmp_path / "nothing", *arguments)
    assert (result.exit_code, "there is no directory" in result.output) == (1, True)
    assert not (tmp_path / "nothing").exists()


def test_a_directory_in_use_without_records_is_no_empty_one(tmp_path: Path):
    tier = make_tier(tmp_path)
    tier.open()
    try:
        assert "is in use by a running server" in reprise(tmp_path, "ls").output
    finally:
        tier.close()
    assert "No sessions" in reprise(tmp_path, "ls").output


def test_ls_shows_whole_ids(tmp_path: Path):
    store(tmp_path, b"one model", "a" * 128)
    command = ["cache", "ls", "--cache.disk_dir", str(tmp_path)]
    shown = CliRunner().invoke(program.cli, command, env={"COLUMNS": "60", "NO_COLOR": "1"}).output
    assert "a" * 128 in shown
    assert b"one model".hex()[:12] in shown


def test_a_header_that_cannot_be_read_hides_nothing_else(two_models: Path):
    records(two_models)[0].write_bytes(b"garbage")
    result = reprise(two_models, "ls")
    assert result.exit_code == 0
    assert "beta" in result.output


def test_a_bad_setting_exits_with_two(tmp_path: Path):
    result = reprise(tmp_path, "ls", "--cache.disk_gb", "1")
    assert result.exit_code == 2
    assert "did you mean cache.disk_gib" in " ".join(result.output.split())
