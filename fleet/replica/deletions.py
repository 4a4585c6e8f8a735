"""Deletes here the sessions that were deleted in the fleet, also while this server was not running."""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from reprise.app.state_disk import DiskAway, StateDisk
from reprise.fleet.directory import Directory
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.keys import SessionName
from reprise.fleet.records import Forgotten, Heard

MAX_REMEMBERED = 10_000  # deletions that are written again after a flush
PROVEN_AT_ONCE = 256  # sessions of which one question asks
EVER = 1 << 62  # an epoch after all others
SAVE_EVERY = 60_000_000  # epochs, which are microseconds, between two writes of the file without a deletion
_MAX_FILE_BYTES = 64

log = logging.getLogger(__name__)


class Copies(Protocol):
    """The part of `reprise.fleet.replica.copies.Copies` used here. Its methods raise ApiError while the engine cannot
    be asked."""

    async def names(self) -> set[SessionName]:
        """Return the sessions of which this server has anything."""
        ...

    async def delete_older(self, tenant: str, session_id: str, epoch: int) -> None:
        """Delete the copies of this id, with any salt, unless they were begun after the deletion that has this epoch.
        Waits for requests of the session to end."""
        ...

    @property
    def hides_some(self) -> bool:
        """Whether this server has copies that it neither uses nor deletes before its next start."""
        ...


class Deletions:
    """A part that carries out the fleet's deletions here. It stores on disk the epoch (a number that grows with every
    claim and deletion) up to which all deletions were carried out, `since`. One per replica, on its event loop."""

    def __init__(self, *, path: Path, directory: Directory, copies: Copies, disk: StateDisk | None = None) -> None:
        """Set up. path: of the file. disk: the file's."""
        self.since = self._saved = _read(path)  # all deletions up to this epoch have been carried out
        self.is_caught_up = False  # all that was deleted before this server's start have been carried out
        self._path = path
        self._thread = (disk or StateDisk()).thread("disk-deletions")
        self._directory = directory
        self._copies = copies
        self._remembered: OrderedDict[str, Forgotten] = OrderedDict()

    async def carry_out(self, heard: Heard, *, fingerprint: str) -> None:
        """Carry out the deletions in the directory's answer to a beat (`heard`), and report each of them to the
        directory as carried out. Then raise `since`, the epoch up to which all deletions were carried out here. If the
        directory no longer remembers all deletions after `since`, also delete the sessions here that one of them may
        have concerned: those without a record, or first claimed after `since`.

        fingerprint: that of the served model. Raises ApiError or DirectoryUnavailable; then `since` stays as it was, so
        that the answer to the next beat contains the same deletions again. Must not be called again before it has
        returned.
        """
        if not heard.reaches_back:
            await self._clear(fingerprint)
        if heard.forgotten:
            await self._delete(heard.forgotten)
        self.since = heard.forgotten[-1].epoch if heard.has_more else max(self.since, heard.epoch)
        if heard.forgotten or not heard.reaches_back or self.since - self._saved > SAVE_EVERY:
            await self.save()
        self.is_caught_up |= not heard.has_more

    async def save(self) -> None:
        """Write `since`, the epoch up to which deletions were carried out, to disk. A disk that does not answer is no
        error: the directory then sends the same deletions again. While copies are hidden nothing is written: the next
        start, which finds them, then carries out those deletions before it takes requests."""
        if self.since != self._saved and not self._copies.hides_some:
            self._saved = self.since
            with contextlib.suppress(DiskAway):  # the directory sends them once more
                await asyncio.to_thread(self._thread.run, partial(_write, self._path, self.since))

    async def publish_again(self) -> None:
        """Write the deletions that were carried out here to the directory again, after it has lost its data. Raises
        DirectoryUnavailable."""
        await self._directory.remember(list(self._remembered.values()))

    async def _delete(self, deletions: Sequence[Forgotten]) -> None:
        name_of = self._directory.keys.name
        here = {(name.tenant, name.session_id) for name in await self._copies.names()}
        named = {name_of(*pair): pair for pair in here}
        for deletion in deletions:
            self._remembered[deletion.name] = deletion
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)
            if (pair := named.get(deletion.name)) is not None:
                await self._copies.delete_older(*pair, deletion.epoch)
            with contextlib.suppress(DirectoryUnavailable):
                await self._directory.acknowledge(deletion.epoch)

    async def _clear(self, fingerprint: str) -> None:
        """Delete every session here that a deletion may concern which the directory has forgotten. A session stays only
        if it still has a record whose first claim came no later than the last deletion carried out here: a deletion
        after that would have removed the record."""
        here = sorted(await self._copies.names(), key=lambda name: (name.tenant, name.session_id, name.salt))
        gone: dict[tuple[str, str], None] = {}
        for start in range(0, len(here), PROVEN_AT_ONCE):
            names = here[start : start + PROVEN_AT_ONCE]
            begun = await self._directory.begun(names, fingerprint=fingerprint)
            gone |= {
                (name.tenant, name.session_id): None
                for name, epoch in zip(names, begun, strict=True)
                if epoch is None or epoch > self.since
            }
        if gone:
            log.warning("away for longer than deletions are remembered: %d of %d sessions leave", len(gone), len(here))
        for pair in gone:
            await self._copies.delete_older(*pair, EVER)


def _read(path: Path) -> int:
    """Return the stored epoch up to which deletions were carried out; 0 if there is none that can be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        text = file.read(_MAX_FILE_BYTES).strip()
        return int(text) if text.isdigit() and len(text) < 20 else 0
    return 0


def _write(path: Path, epoch: int) -> None:
    """Store the epoch up to which deletions were carried out. A failure is not raised: the directory sends them once
    more."""
    try:
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(str(epoch), encoding="ascii")
        fresh.replace(path)
    except OSError as error:
        log.warning("cannot keep which deletions were carried out: %s", error)
