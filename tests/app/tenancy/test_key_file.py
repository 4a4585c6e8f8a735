import asyncio
import contextlib
import logging
import os
import stat
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from reprise.app.cli.program import cli
from reprise.app.tenancy.key_file import KeyFileError, add_key, follow_keys, load_keys, remove_key
from reprise.app.tenancy.keyring import Key, KeyLimits, Keyring, digest_of
from tests.app.fakes import until

HASH = "a" * 64
DEFAULT = KeyLimits(requests=2, requests_per_minute=3, tokens_per_minute=4, sessions=5, cache_bytes=6)


def write(path, text, mode=0o600):
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_a_key_is_shown_once_and_kept_as_a_hash(tmp_path):
    path = tmp_path / "secrets" / "keys.toml"
    key = add_key(path, "alice", admin=True)
    add_key(path, "bob-2", admin=False)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in path.read_text()
    first, second = load_keys(path, DEFAULT)
    assert (first.digest, first.is_admin, first.limits) == (digest_of(key), True, DEFAULT)
    assert not second.is_admin
    with pytest.raises(KeyFileError, match="already"):
        add_key(path, "alice", admin=False)
    for name in ("", "a b", "a]\n[b", "x" * 65):
        with pytest.raises(KeyFileError, match="letters"):
            add_key(path, name, admin=False)


def test_limits_of_its_own_are_a_keys_and_zero_is_none(tmp_path):
    text = f'[a]\nsha256 = "{HASH}"\nrequests = 9\nsessions = 0\ncache_gib = 0.5\n'
    (key,) = load_keys(write(tmp_path / "keys", text), DEFAULT)
    expected = KeyLimits(requests=9, requests_per_minute=3, tokens_per_minute=4, sessions=0, cache_bytes=1 << 29)
    assert key.limits == expected
    assert not key.is_exact


def test_a_key_may_want_all_of_its_kv_exact(tmp_path):
    (key,) = load_keys(write(tmp_path / "keys", f'[a]\nsha256 = "{HASH}"\nkv_quality = "exact"\n'), DEFAULT)
    assert key.is_exact
    keyring = Keyring([key])
    (tenant,) = keyring._keys
    assert keyring.is_exact(tenant)
    assert not keyring.is_exact("another")


def test_a_key_may_have_a_target_for_first_tokens(tmp_path):
    text = f'[a]\nsha256 = "{HASH}"\nttft_ms = 500\n[b]\nsha256 = "{"b" * 64}"\n'
    keys = load_keys(write(tmp_path / "keys", text), DEFAULT)
    keyring = Keyring(keys)
    assert [key.ttft_ms for key in keys] == [500.0, None]
    assert [keyring.ttft_ms(tenant) for tenant in (HASH[:16], "b" * 16, "another")] == [500.0, None, None]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o604, 0o666])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path, mode):
    path = write(tmp_path / "keys", f'[a]\nsha256 = "{HASH}"\n', mode)
    with pytest.raises(KeyFileError, match="chmod 600"):
        load_keys(path, DEFAULT)
    with pytest.raises(KeyFileError, match="chmod 600"):
        add_key(path, "b", admin=False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no keys"),  # an empty file must not mean that no keys are needed
        ("# nobody yet\n", "no keys"),
        ("[a\n", "not TOML"),
        ("[a]\n", "a.sha256"),
        (f'sha256 = "{HASH}"\n', "sha256"),
        ('[a]\nsha256 = "sk-plain-text-key"\n', "a.sha256"),
        (f'[a]\nsha256 = "{HASH}"\nadmn = true\n', "a.admn"),
        (f'[a]\nsha256 = "{HASH}"\nadmin = "yes"\n', "a.admin"),
        (f'[a]\nsha256 = "{HASH}"\nsessions = -1\n', "a.sessions"),
        (f'[a]\nsha256 = "{HASH}"\ncache_gib = nan\n', "a.cache_gib"),
        *((f'[a]\nsha256 = "{HASH}"\nttft_ms = {bad}\n', "a.ttft_ms") for bad in ("0", "-1", "nan", "600001", '"1"')),
        (f'[a]\nsha256 = "{HASH}"\n[b]\nkey = "x"\n', "b."),
        ("a = " + "[" * 5000, "not TOML"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, text, says):
    with pytest.raises(KeyFileError) as error:
        load_keys(write(tmp_path / "keys", text), DEFAULT)
    assert says in str(error.value)
    assert "sk-plain" not in str(error.value)
    assert HASH not in str(error.value)


def test_no_file_is_refused(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(KeyFileError, match=r"cannot read|is no file"):
            load_keys(path, DEFAULT)


def test_the_program_makes_keys_and_does_not_serve_without_them(tmp_path):
    path = tmp_path / "keys.toml"
    made = CliRunner().invoke(cli, ["keys", "add", "alice", "--file", str(path)])
    assert made.exit_code == 0
    key = made.stdout.strip()
    assert load_keys(path, DEFAULT)[0].digest == digest_of(key)
    again = CliRunner().invoke(cli, ["keys", "add", "alice", "--file", str(path)])
    assert again.exit_code == 1
    path.chmod(0o644)
    served = CliRunner().invoke(cli, ["serve", "--server.keys_file", str(path), "--cache.disk_dir", str(tmp_path)])
    assert served.exit_code == 1
    assert "chmod 600" in served.stderr.replace("\n", " ")


NAMES = st.from_regex(r"[A-Za-z0-9_\-]{1,8}", fullmatch=True)
LINES = st.sampled_from(["# a note", "", "requests = 3", "  sessions = 1  # few", "admin = true"])


@given(names=st.lists(NAMES, min_size=1, max_size=5, unique=True), lines=st.lists(LINES, max_size=5), data=st.data())
def test_a_key_leaves_and_nothing_else_does(tmp_path_factory, names, lines, data):
    own = "\n".join(dict.fromkeys(lines))
    path = write(
        tmp_path_factory.mktemp("keys") / "keys.toml",
        "".join(f'# {name}\n[ {name} ]  # [x]\nsha256 = "{HASH}"\n{own}\n' for name in names),
    )
    before = tomllib.loads(path.read_text())
    gone = data.draw(st.sampled_from(names))
    remove_key(path, gone)
    assert tomllib.loads(path.read_text()) == {name: table for name, table in before.items() if name != gone}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [other.name for other in path.parent.iterdir()] == [path.name]
    with pytest.raises(KeyFileError, match="no key"):
        remove_key(path, gone)


@pytest.mark.parametrize("text", [f'a = {{ sha256 = "{HASH}" }}\n', f'a.sha256 = "{HASH}"\n'])
def test_what_is_no_table_of_its_own_is_left_alone(tmp_path, text):
    path = write(tmp_path / "keys", text)
    with pytest.raises(KeyFileError, match="by hand"):
        remove_key(path, "a")
    assert path.read_text() == text


async def test_a_file_is_followed_and_a_bad_one_changes_nothing(tmp_path, caplog):
    caplog.set_level(logging.INFO, "reprise.app.tenancy.key_file")
    path = tmp_path / "keys.toml"
    first = add_key(path, "alice", admin=False)
    handed: list[list[Key]] = []
    following = asyncio.create_task(follow_keys(path, DEFAULT, handed.append, look_s=0.005))
    try:
        await until(lambda: handed)
        assert [key.digest for key in handed[0]] == [digest_of(first)]
        second = add_key(path, "bob", admin=True)
        await until(lambda: len(handed) == 2)
        assert [key.digest for key in handed[1]] == [digest_of(first), digest_of(second)]
        good = path.read_text()
        for spoil in (lambda: path.write_text("[alice"), lambda: path.chmod(0o644), path.unlink):
            caplog.clear()
            spoil()
            await until(lambda: "stay as they were" in caplog.text)
        assert len(handed) == 2
        write(path, good)
        remove_key(path, "alice")
        await until(lambda: [key.digest for key in handed[-1]] == [digest_of(second)])
        remove_key(path, "bob")
        await until(lambda: handed[-1] == [])  # the last one, too
        assert second not in caplog.text
    finally:
        following.cancel()


async def test_a_fifo_in_its_place_holds_up_neither_the_next_keys_nor_the_end(tmp_path, caplog):
    path = tmp_path / "keys.toml"
    add_key(path, "alice", admin=False)
    handed: list[list[Key]] = []
    following = asyncio.create_task(follow_keys(path, DEFAULT, handed.append, look_s=0.005))
    try:
        await until(lambda: handed)
        path.unlink()
        os.mkfifo(path, 0o600)
        await until(lambda: "is no file" in caplog.text)
        path.rename(tmp_path / "fifo")
        key = add_key(path, "bob", admin=False)
        await until(lambda: [key.digest for key in handed[-1]] == [digest_of(key)])
    finally:
        following.cancel()
        for fifo in (path, tmp_path / "fifo"):
            with contextlib.suppress(OSError):  # whoever waits for a writer gets one
                os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))


def test_the_program_takes_keys_out(tmp_path):
    path = tmp_path / "keys.toml"
    add_key(path, "alice", admin=False)
    assert CliRunner().invoke(cli, ["keys", "remove", "alice", "--file", str(path)]).exit_code == 0
    assert path.read_text().strip() == ""
    assert CliRunner().invoke(cli, ["keys", "remove", "alice", "--file", str(path)]).exit_code == 1
