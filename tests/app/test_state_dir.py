import asyncio
import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from reprise.app import state_dir
from reprise.app.main import create_app, make_engine
from reprise.app.state_dir import (
    DamagedSecret,
    SecretKeeper,
    StateDir,
    load_tenant_secret,
    open_state_dir,
    read_tenant_secret,
    weakness,
)
from reprise.app.state_disk import StateDisk
from tests.app.fakes import FakeEngine, in_process, make_settings, until


def test_the_secret_survives_and_is_ours_alone(tmp_path):
    directory = tmp_path / "state"
    with ThreadPoolExecutor(8) as pool:
        secrets = set(pool.map(load_tenant_secret, [directory] * 32))
    assert len(secrets) == 1  # servers that start at once agree
    assert len(secrets.pop()) == 32
    assert stat.S_IMODE((directory / "tenant_secret").stat().st_mode) == 0o600
    assert [path.name for path in directory.iterdir()] == ["tenant_secret"]


def test_a_damaged_secret_is_refused(tmp_path):
    (tmp_path / "tenant_secret").write_bytes(b"short")
    with pytest.raises(ValueError, match="damaged"):
        load_tenant_secret(tmp_path)


@pytest.mark.parametrize("what", ["the directory", "the secret"])
async def test_a_secret_that_is_deleted_is_written_anew(tmp_path, caplog, what):
    directory = tmp_path / "state"
    secret = load_tenant_secret(directory)
    keeping = asyncio.create_task(SecretKeeper(directory, secret).run(look_s=0.005))
    try:
        shutil.rmtree(directory) if what == "the directory" else (directory / "tenant_secret").unlink()
        await until(lambda: "written anew" in caplog.text)
    finally:
        keeping.cancel()
    assert load_tenant_secret(directory) == secret
    assert [path.name for path in directory.iterdir()] == ["tenant_secret"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (directory, directory / "tenant_secret")] == [0o700, 0o600]


def test_a_secret_that_cannot_be_written_anew_is_told_once_and_written_later(tmp_path, caplog):
    directory = tmp_path / "state"
    keeper = SecretKeeper(directory, load_tenant_secret(directory))
    shutil.rmtree(directory)
    directory.write_text("a file where the directory was")
    for _ in range(3):
        keeper.look()
    assert caplog.text.count("cannot be written anew") == 1
    directory.unlink()
    keeper.look()
    assert (directory / "tenant_secret").exists()


async def test_what_a_running_server_has_survives_that_its_directory_is_deleted(tmp_path: Path, model_dir: Path):
    settings = make_settings(tmp_path)
    app = create_app(settings, engine=FakeEngine(directory=model_dir))
    secret = load_tenant_secret(settings.state_dir)
    async with app.router.lifespan_context(app):
        shutil.rmtree(settings.state_dir)
    assert load_tenant_secret(settings.state_dir) == secret
    names = {path.name for path in settings.state_dir.iterdir()}
    assert names == {"tenant_secret", "transcripts.sqlite3", "responses.sqlite3"}


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o707, 0o1777])
def test_a_directory_that_others_may_write_to_is_told_at_the_start(tmp_path, model_dir, caplog, mode):
    settings = make_settings(tmp_path)
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    settings.state_dir.chmod(mode)
    create_app(settings, engine=FakeEngine(directory=model_dir))
    assert f"others may write to {settings.state_dir}, mode {mode:04o}" in caplog.text


def test_a_directory_of_somebody_else_is_told(tmp_path, monkeypatch):
    assert weakness(tmp_path / "not there") is None
    tmp_path.chmod(0o755)
    assert weakness(tmp_path) is None
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    if tmp_path.stat().st_uid == 0:
        assert weakness(tmp_path) is None  # root may do anything anywhere
        os.chown(tmp_path, 1234, -1)
    found, advice = weakness(tmp_path)
    assert "not ours" in found
    assert advice.startswith("chown")


@pytest.mark.parametrize("text", [bytes(range(32)), bytes(range(32)).hex().encode() + b"\n"])
def test_the_secret_of_a_fleet_stands_in_a_file_of_its_own(tmp_path, text):
    file, directory = tmp_path / "secret", tmp_path / "state"
    file.write_bytes(text)
    assert load_tenant_secret(directory, file) == bytes(range(32))
    assert read_tenant_secret(directory, file) == bytes(range(32))
    SecretKeeper(directory, None).look()
    assert list(directory.iterdir()) == [], "none is made"


@pytest.mark.parametrize("text", [b"", b"short", b"0" * 63, b"x" * 64, b"0" * 66])
def test_what_holds_no_secret_is_refused(tmp_path, text):
    file = tmp_path / "secret"
    file.write_bytes(text)
    with pytest.raises(DamagedSecret, match="openssl rand -hex 32"):
        load_tenant_secret(tmp_path / "state", file)
    with pytest.raises(FileNotFoundError):
        load_tenant_secret(tmp_path / "state", tmp_path / "none")


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk on which nothing is found, because every look hangs until the event is set."""
    mended = threading.Event()

    def hanging(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == "disk-question" and not mended.is_set():
                mended.wait()
                raise OSError(errno.EIO, "nobody waits for this any more")
            return real(*args, **kwargs)

        return call

    for name in ("stat", "mkdir", "open"):
        monkeypatch.setattr(os, name, hanging(getattr(os, name)))
    monkeypatch.setattr(state_dir, "PATIENCE_S", 0.1)
    yield mended
    mended.set()


def test_beside_a_state_directory_that_hangs_a_process_has_a_temporary_one(
    tmp_path: Path, hung: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    state = open_state_dir(tmp_path / "state")
    assert (state.path.is_dir(), state.path.is_relative_to(tmp_path)) == (True, False)
    assert (len(state.secret), state.is_own_secret) == (32, False)
    assert state.problem is not None
    assert f"{tmp_path / 'state'} does not answer" in state.problem
    assert state.problem in caplog.text
    shutil.rmtree(state.path)


def test_a_secret_that_lies_elsewhere_stays(tmp_path: Path, hung: threading.Event) -> None:
    file = tmp_path / "secret"
    file.write_bytes(bytes(range(32)))
    state = open_state_dir(tmp_path / "state", file)
    assert (state.secret, state.is_own_secret) == (bytes(range(32)), True)
    assert state.problem is not None
    shutil.rmtree(state.path)
    with pytest.raises(FileNotFoundError):
        open_state_dir(tmp_path / "state", tmp_path / "none")


async def test_a_server_answers_beside_a_state_directory_that_hangs(
    tmp_path: Path, model_dir: Path, hung: threading.Event
) -> None:
    settings = make_settings(tmp_path / "state")
    async with in_process(FakeEngine(directory=model_dir), settings) as running:
        assert (await running.chat()).status_code == 200
        assert not (tmp_path / "state").exists()
        shown = running.app.state.state_dir
        assert shown.problem is not None
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC])
def test_a_secret_that_cannot_be_written_yet_is_written_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr("reprise.app.state_dir._publish", refuse)
        state = open_state_dir(tmp_path / "state")
        assert (state.path, state.problem, state.is_own_secret) == (tmp_path / "state", None, True)
        disk = StateDisk()
        keeper = SecretKeeper(state.path, state.secret, disk, is_written=state.is_secret_written)
        keeper.look()
        assert disk.state == ("full" if code == errno.ENOSPC else "read_only")
    keeper.look()
    assert "deleted" not in caplog.text, "it was never there"
    assert open_state_dir(tmp_path / "state").secret == state.secret


def test_a_disk_that_takes_no_writes_is_found_out_before_anything_is_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk = StateDisk()
    keeper = SecretKeeper(tmp_path, load_tenant_secret(tmp_path), disk)
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.TemporaryFile", refuse)
        keeper.look()
        assert disk.state == "full"
    keeper.look()
    assert disk.state == "used", "there is room again, and nothing was to be written"


@pytest.mark.parametrize(("code", "is_told"), [(errno.EIO, False), (errno.ESTALE, False), (errno.EACCES, True)])
def test_a_disk_that_fails_is_done_without_and_missing_rights_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, is_told: bool
) -> None:
    def refuse(*_: Any, **__: Any) -> bytes:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("reprise.app.state_dir.read_tenant_secret", refuse)
    if is_told:
        with pytest.raises(PermissionError):
            open_state_dir(tmp_path)
        return
    state = open_state_dir(tmp_path)
    assert state.problem is not None
    assert os.strerror(code) in state.problem
    shutil.rmtree(state.path)


def test_without_the_installations_secret_the_engine_has_no_disk(tmp_path: Path) -> None:
    settings = make_settings(tmp_path / "state", cache={"disk_gib": 1})
    config = make_engine(settings, StateDir(tmp_path / "other", bytes(32), "it hangs", is_own_secret=False))._config
    assert (config.cache.disk_bytes, config.cache.disk_dir) == (0, str(tmp_path / "other"))
    config = make_engine(settings, StateDir(tmp_path / "other", bytes(32), "it hangs"))._config
    assert (config.cache.disk_bytes, config.cache.disk_dir) == (1 << 30, str(tmp_path / "state"))


def test_beside_a_disk_that_hangs_when_it_is_written_the_secret_is_the_installations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = load_tenant_secret(tmp_path)
    mended, real = threading.Event(), os.fsync

    def hanging(descriptor: int) -> None:
        mended.wait()
        real(descriptor)

    monkeypatch.setattr(state_dir, "PATIENCE_S", 0.1)
    monkeypatch.setattr(os, "fsync", hanging)
    state = open_state_dir(tmp_path)
    mended.set()
    assert (state.secret, state.is_own_secret, state.path == tmp_path) == (secret, True, False)
    assert state.problem is not None
    assert "stored KV is used when it answers" in state.problem
    shutil.rmtree(state.path)
