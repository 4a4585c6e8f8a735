"""Defines the values that the streams of a Transfer share: the memory below HBM, and the links to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from reprise.cache.moves import BlockLoad, Remote
from reprise.cache.storage.extent_store import ExtentStore
from reprise.cache.storage.slab import CodedSlab, Slab
from reprise.cache.storage.throttle import Throttle
from reprise.cache.transfer.events import Events
from reprise.cache.transfer.layer_source import LandedSource, Landings

Work = dict[str, tuple[Callable[[], None], int]]
"""Thread name -> its work, and how much lower its priority is than the engine's."""


@dataclass(frozen=True, slots=True)
class Stores:
    """The memory below HBM, from and to which bytes move."""

    slab: Slab  # DRAM's slots of rows
    coded: CodedSlab | None = None  # DRAM's coded slots, with the codec of extents that are coded; None: no codec
    disk: ExtentStore | None = None
    remote: "Callable[[Stores, Events], RemoteStreams] | None" = None  # makes the streams of the tier beyond the disk


@dataclass(frozen=True, slots=True)
class Links:
    """The caps on bytes per second between HBM and DRAM, one for each direction."""

    load: Throttle
    save: Throttle


class RemoteStreams(Protocol):
    """The streams to and from a tier that other servers share. A Transfer owns them; the engine's thread calls the
    methods."""

    work: Work

    def source(self, blocks: Sequence[BlockLoad], landings: Landings, *, is_coded: bool) -> LandedSource:
        """Return the source from which a load reads these blocks. is_coded: whether a codec has compressed them."""
        ...

    def put(self, move: Remote) -> None:
        """Queue a move, whose end an event will report."""
        ...

    def stop(self) -> None:
        """Let the threads finish the queued moves and end."""
        ...

    def close(self) -> None:
        """Close the connections, after the threads have ended."""
        ...
