"""Defines the values that are exchanged with the directory, the fleet's records in Redis."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import msgspec

from reprise.fleet import routing
from reprise.fleet.keys import SessionName

MAX_BEAT_BYTES = 16 << 10
MAX_HEAD_BYTES = 1 << 20
MAX_ROW_BYTES = 4 << 20  # one answer of a transcript, with the prompt before it
MAX_ROWS = 4096  # most rows of one session
MAX_TRANSCRIPT_BYTES = 24 << 20  # most of one session; the replica that adopts a longer one tokenizes it anew
FIRST_EPOCH = 1  # older than any that a directory gives out: of copies that were begun before one was heard of
MAX_CHAINS = 64  # most chains of one commit, and of one session: those of its last answers

State = Literal["loading", "ready", "restarting", "draining", "failed", "stopped"]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A beat: what a replica reports about itself to the directory, about once a second."""

    replica: str  # its name, the same after a restart
    boot: str  # another one after every start
    url: str  # under which gateways reach it, without a slash at its end
    fingerprint: str  # hex, of its model; "" while it loads
    model: str  # the name that requests give
    aliases: tuple[str, ...] = ()
    state: State = "loading"
    version: str = ""
    running: int = 0  # sequences
    waiting: int = 0
    load: routing.Beat | None = None  # None: it takes no requests
    sessions: int = 0  # sessions whose home it is
    tiers: Mapping[str, Mapping[str, int]] = {}  # tier -> used_bytes and capacity_bytes; redis: of all replicas


@dataclass(frozen=True, slots=True)
class Member:
    """A replica, as the directory lists it."""

    beat: Heartbeat
    age_s: float  # age of its beat, by Redis' clock


@dataclass(frozen=True, slots=True)
class Roll:
    """The list of all members that sent a beat within the last minutes."""

    born: str  # the data set; another one after a flush
    members: tuple[Member, ...]
    drained: frozenset[str] = frozenset()  # replicas that an operator drains, members or not


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A deletion of a tenant's sessions of one id, which are named by a digest."""

    name: str  # `SessionKeys.name`
    epoch: int  # epoch of its deletion; what was claimed at a later one is a new session of that name


@dataclass(frozen=True, slots=True)
class Heard:
    """The directory's answer to a beat: the deletions that the replica has to carry out."""

    born: str
    epoch: int  # the last one given out; all deletions up to it are in `forgotten`, unless there are more
    forgotten: tuple[Forgotten, ...]  # after the epoch that was asked from, the earliest first
    has_more: bool
    reaches_back: bool  # no deletion after the epoch that was asked from has been trimmed


@dataclass(frozen=True, slots=True)
class Record:
    """The directory's record of a session: which replica is its home, and how large it is. Its head, by which an engine
    can take over the session's KV, is left out."""

    session_id: str
    home: str  # replica that may commit; "" when it has let go
    boot: str
    epoch: int
    turn: int  # number of committed turns
    tokens: int  # length of its context at the last commit
    size_bytes: int  # size of its KV
    redis_tokens: int  # leading tokens of it whose KV is in Redis
    idle_s: float  # since its last use, by Redis' clock
    wanted: str = ""  # the replica to which an operator moves it with its next turn


@dataclass(frozen=True, slots=True)
class Claim:
    """The result of claiming a session: the epoch under which this replica may commit until another replica claims it,
    and what the session's record says of its last committed turn."""

    epoch: int
    turn: int  # 0: nothing was committed, so there is nothing to adopt
    home: str  # before; "" if nobody's
    forgotten: int  # epoch of the last deletion of this name; 0: none is remembered
    tokens: int
    head: bytes  # opaque, the engine's; b"" if there is none or it was damaged
    branches: int  # turns so far that were fenced: their answers are in the transcript, and no turn counts them


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """A report to the directory of the end of a turn, or of a newer head of an ended one (the record by which another
    replica can take over the session)."""

    name: SessionName
    fingerprint: str
    epoch: int  # epoch of the claim; 0: Redis could not be asked for one when the turn began
    since: int  # the last epoch known when the turn began; with a claim, that of the first claim of the session
    base_turn: int  # with epoch 0: the last turn known when it began
    nonce: bytes  # 8 random bytes: a commit that comes twice counts once
    ends_turn: bool = True
    tokens: int = 0
    size_bytes: int = 0
    redis_tokens: int = 0
    ttl_s: float | None = None  # after the last use; None: it is pinned
    head: bytes = b""  # b"" leaves the one that is there
    rows: Mapping[bytes, bytes] = field(default_factory=dict)  # digest of an answer -> its transcript row
    chains: tuple[bytes, ...] = ()  # digests of `reprise.fleet.identify` under which clients will ask


class Outcome(StrEnum):
    """The outcome of a commit. Only COMMITTED means that the session's record was changed."""

    COMMITTED = "committed"
    FENCED = "fenced"  # another replica has claimed it since; the transcript rows are kept as a branch
    GONE = "gone"  # it was deleted or has expired since
    FLUSHED = "flushed"  # the directory has lost its data since


@dataclass(frozen=True, slots=True)
class Committed:
    """The result of a commit. `turn`, `sessions` and `size_bytes` are 0 unless it was committed."""

    outcome: Outcome
    epoch: int = 0
    turn: int = 0
    sessions: int = 0  # the tenant's sessions in the whole fleet
    size_bytes: int = 0  # size of their KV


@dataclass(frozen=True, slots=True)
class Forgetting:
    """A deletion of sessions that replicas have still to carry out."""

    epoch: int
    waiting: tuple[str, ...]  # live members that have not acknowledged
    found: int  # sessions that were there


@dataclass(frozen=True, slots=True)
class Held:
    """The number of sessions and the bytes of KV that a tenant has in the whole fleet, and which sessions may be
    deleted."""

    sessions: int
    size_bytes: int  # size of their KV, counted once however many replicas and tiers have it
    oldest: tuple[str, ...] = ()  # by last use: `SessionKeys.name` of those that may leave, "" for those that stay


@dataclass(frozen=True, slots=True)
class Place:
    """A lease on `count` of the places that a tenant has for running answers, one for each choice of a request. It ends
    when the places are freed or its time is over."""

    tenant: str
    lease: str
    count: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of taking requests or tokens from a tenant's bucket, which fills with its allowance per minute:
    whether there was enough, and what is left."""

    wait_s: float  # 0: it was taken; else nothing was, and this long it takes until there is enough
    level: float  # what is left; negative while overdrawn
