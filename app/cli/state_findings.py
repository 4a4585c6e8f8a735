"""The findings of `reprise doctor` about the directory in which a server keeps KV, transcripts and its secret: whether
it answers, has room, is fast enough and is closed to others."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from reprise.app.cli.expected_sizes import Expected
from reprise.app.cli.finding import Finding, Level
from reprise.app.settings.settings import GIB, MIB, Settings
from reprise.app.state_dir import weakness
from reprise.engine.build.resources import within

STATE_TIMEOUT_S = 20.0  # longest wait for the disk with the directory
DISK_TRIAL_BYTES = 16 * MIB
SLOW_DISK_BYTES_PER_S = 50e6


def look_at_state(
    settings: Settings, expected: Expected | None, used_by: Callable[[Path], str | None]
) -> list[Finding]:
    """Return the findings about the state directory and its disk. expected: sizes that a server will use; None if they
    are not known. used_by: returns the name of the server that uses a directory."""
    try:
        return within(STATE_TIMEOUT_S, lambda: list(_state(settings, expected, used_by)))
    except TimeoutError:
        advice = "a server serves without what is stored there, and uses it when it answers"
        return [Finding("state", Level.WARN, f"{settings.state_dir} does not answer", advice)]
    except OSError as error:
        problem = f"{settings.state_dir} cannot be looked at: {error.strerror or error}"
        return [Finding("state", Level.WARN, problem, "mount or mend its disk, or choose another --cache.disk_dir")]


def _state(settings: Settings, expected: Expected | None, used_by: Callable[[Path], str | None]) -> Iterator[Finding]:
    directory = settings.state_dir
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        advice = "choose another one with --cache.disk_dir"
        problem = "cannot be written to" if existing.is_dir() else f"cannot be made: {existing} is a file"
        yield Finding("state", Level.FAIL, f"{directory} {problem}", advice)
        return
    owner = _owner(directory, used_by)
    free = shutil.disk_usage(existing).free
    for_kv_gib = settings.cache.disk_gib if isinstance(settings.cache.disk_gib, float) else 0.0  # auto always fits
    wanted = (for_kv_gib + settings.cache.disk_min_free_gib) * GIB
    has = f"{directory}, {free / GIB:.1f} GiB free"
    if settings.cache.disk_gib == "auto" and expected is not None:
        has += f", {expected.sizes.disk / GIB:.1f} of it for KV"
    if owner:
        advice = "another server needs another --cache.disk_dir, and `reprise cache` has to wait"
        yield Finding("state", Level.NOTE, f"{has}, in use by {owner}", advice)
    elif settings.cache.disk_gib != 0 and free < settings.cache.disk_min_free_gib * GIB:
        advice = "free some space, or lower cache.disk_min_free_gib: nothing would be kept on disk"
        yield Finding("state", Level.WARN, has, advice)
    elif free < wanted:
        advice = "cache.disk_gib and cache.disk_min_free_gib want more; what does not fit leaves earlier"
        yield Finding("state", Level.NOTE, has, advice)
    else:
        yield Finding("state", Level.OK, has)
    if settings.cache.disk_gib != 0:
        yield _disk_speed(existing)
    if (weak := weakness(directory)) is not None:
        yield Finding("state", Level.WARN, *weak)
    secret = directory / "tenant_secret"
    if secret.is_file() and secret.stat().st_mode & 0o077:
        yield Finding("secret", Level.WARN, f"others may read {secret}", f"chmod 600 {secret}")


def _owner(directory: Path, used_by: Callable[[Path], str | None]) -> str | None:
    try:
        return used_by(directory)
    except OSError:  # the directory of another user; whether it can be written to is reported elsewhere
        return None


def _disk_speed(directory: Path) -> Finding:
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".reprise-doctor-") as file:
            start_s = time.perf_counter()
            file.write(os.urandom(DISK_TRIAL_BYTES))
            file.flush()
            os.fsync(file.fileno())
            speed = DISK_TRIAL_BYTES / (time.perf_counter() - start_s)
    except OSError as error:
        return Finding("disk", Level.FAIL, f"cannot write: {error.strerror}", "choose another --cache.disk_dir")
    if speed < SLOW_DISK_BYTES_PER_S:
        return Finding("disk", Level.NOTE, f"writes {speed / 1e6:.0f} MB/s", "loading may cost more than recomputing")
    return Finding("disk", Level.OK, f"writes {speed / 1e6:.0f} MB/s")
