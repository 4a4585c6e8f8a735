"""Describes the KV context of a request while it waits or runs: what it consists of, and a record for each phase.

Only the class that a record's docstring names writes it; others read it.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey, KeyDomain
from reprise.cache.blocks.lineage import Lineage
from reprise.cache.blocks.match import RememberedMatch
from reprise.cache.blocks.rows import ContextRows
from reprise.cache.blocks.table import SessionName
from reprise.cache.blocks.truncate import CutRules, Range
from reprise.cache.moves import BlockLoad
from reprise.cache.stats import MissReason


@dataclass(slots=True)
class Cuts:
    """The parts of the conversation that the context lacks. Written while the context has no pages: `attention` by the
    Keeper, all else by the ContextOpener and the Recaller."""

    rules: CutRules
    stream: list[int]  # the conversation as the client sent it, without generated tokens and with nothing cut
    ranges: list[Range] = field(default_factory=list)  # ranges of the stream and the tokens generated after it
    by_client: list[Range] = field(default_factory=list)  # the part of `ranges` that the client dropped itself
    # keys of the stream's full blocks; filled only if there are cuts
    sent_keys: list[BlockKey] = field(default_factory=list)
    is_new: bool = False  # this turn makes a cut; tokens between the last full block and the cut are lost
    moves_history: bool = False  # history cannot be used: its position, or what precedes it, has changed
    shifted_tokens: int = 0  # tokens of history that moved because the client dropped some before them
    attention: dict[BlockKey, float] = field(default_factory=dict)  # this and the next two: see `SessionContext`
    dropped: dict[int, BlockKey] = field(default_factory=dict)
    recalled: set[int] = field(default_factory=set)
    recalled_tokens: int = 0  # the part of `recalled` that was brought back for this turn

    @property
    def num_tokens(self) -> int:
        return sum(b - a for a, b in self.ranges)


@dataclass(slots=True)
class Reuse:
    """The part of a context that may be taken from the cache, and the reasons why the rest may not. Written by the
    Matcher, and by the parts that learn that a stored copy is of no use: Loads, Parking, the Lifecycle."""

    open_hint: BlockKey | None = None  # an open block that the request can continue, whatever its key chains on
    open_place: int = 0  # number of full blocks before `open_hint`; none before it was computed for this request
    # first token to compute instead of load, because loading it was judged slower or failed
    recompute_from: int | None = None
    skips_disk: bool = False  # a load or fetch was too late once, so blocks that are only on disk are computed instead
    # blocks that could not be read for it, and why: they are computed, unless another tier has them, and their copies
    # stay. Those that there was no memory to decode are computed wherever they are.
    unread: dict[BlockKey, str] = field(default_factory=dict)
    miss_reason: MissReason | None = None  # reason why blocks from `recompute_from` on are computed
    lost_lineage: bool = False  # a block that a truncation kept is gone, and with it all blocks after it
    remembered: RememberedMatch | None = None  # what was found stored while it waits; gone once it has pages


@dataclass(slots=True)
class Waiting:
    """The computations and fetches that a request waits for before it is admitted. Written by Siblings, Loads and
    Parking."""

    block: BlockKey | None = None  # while another request computes it, or a fetch brings it
    fetch_due_s: float | None = None  # time until which it waits for a fetch that was not done when its turn came
    was_fetched: bool = False  # a fetch was ordered for it because its blocks have to be in DRAM


class LoadState(Enum):
    """The state of a load, explained in the table of `Loads`."""

    WANTED = auto()
    RELEASED = auto()
    OUTLIVED = auto()
    FAILED = auto()
    ENDED = auto()


@dataclass(slots=True)
class Load:
    """A load of blocks into the pages of a request. Written by Loads alone."""

    job: int
    context: "RequestContext"
    blocks: tuple[BlockLoad, ...]
    first: int | None  # position of the first token from disk or Redis that could be computed instead; None: none
    state: LoadState = LoadState.WANTED
    seemed_fast: bool = False  # it seemed worth it; otherwise it is to measure the device
    is_given_up: bool = False  # no more is read for it: what the disk has not brought is computed

    @property
    def claimant(self) -> str:
        """The name under which `Siblings` lets other requests wait for the load's blocks: the request id, or a name
        made of the job number once the request has given up the load."""
        return f"load {self.job}" if self.state is LoadState.OUTLIVED else self.context.request_id


class SlotBlock(NamedTuple):
    """A full block of a running context, in the DRAM slot that is pinned for it."""

    key: BlockKey
    slot: int
    position: int  # position for which its keys are rotated when they are read


@dataclass(slots=True)
class Saving:
    """The DRAM slots to which blocks are saved while they are computed. Written by the Saver and, for contexts that HBM
    cannot hold, by Parking."""

    slots: dict[int, int] = field(default_factory=dict)  # block -> the DRAM slot it is being saved to
    unsaved: set[int] = field(default_factory=set)  # blocks for which no slot was free
    # block -> where DRAM has it, pinned; only of a context that HBM cannot hold (`reprise.cache.requests.parking`)
    parked: dict[int, SlotBlock] = field(default_factory=dict)


@dataclass(slots=True)
class Sources:
    """The number of a prompt's tokens that came from each tier, counted at admission. The Placer writes it, but Loads
    writes `brought`."""

    by_tier: dict[str, int] = field(default_factory=dict)  # tier -> prompt tokens
    own_tokens: int = 0  # part of these tokens that only its own session had
    coded_tokens: int = 0  # part of these tokens that came out of a codec
    # blocks that a load which was too late has brought -> the tier they came from
    brought: dict[BlockKey, str] = field(default_factory=dict)


@dataclass(slots=True)
class RequestContext:
    """The context of one waiting or running request: its tokens, the keys of its blocks, and a record of each phase."""

    request_id: str
    session: SessionName
    token_ids: list[int]  # the sequence's own list: grows with sampled tokens, shrinks when it is truncated
    prompt_tokens: int
    lineage: Lineage
    cuts: Cuts
    reuse: Reuse
    waiting: Waiting = field(default_factory=Waiting)
    load: Load | None = None  # the one that it stands on, or whose end it waits for outside of the batch
    rows: ContextRows = field(default_factory=ContextRows)
    saving: Saving = field(default_factory=Saving)
    sources: Sources = field(default_factory=Sources)

    @property
    def conversation(self) -> list[int]:
        """The tokens of the whole conversation with nothing cut: those sent, then those generated."""
        sent = len(self.cuts.stream) - self.cuts.num_tokens
        return self.cuts.stream + self.token_ids[sent:]

    def conversation_keys(self) -> list[BlockKey]:
        """The keys that the full blocks of the conversation would have with nothing cut, for
        `SessionContext.conversation_keys`."""
        if not self.cuts.ranges:
            return self.chain()[: self.prompt_tokens // BLOCK_TOKENS]
        self.cuts.sent_keys = self.domain.chain(self.cuts.stream, self.cuts.sent_keys)
        return self.cuts.sent_keys

    @property
    def session_id(self) -> str:
        return self.session[2]

    @property
    def domain(self) -> KeyDomain:
        return self.lineage.domain

    @property
    def keys(self) -> list[BlockKey]:
        return self.lineage.keys

    def chain(self) -> list[BlockKey]:
        """Return the keys of all full blocks so far."""
        return self.lineage.extend(self.token_ids)
