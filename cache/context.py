"""What KV a session has, and what a running request stands on."""

from dataclasses import dataclass, field

from cache.block import BLOCK_TOKENS, BlockKey, KeyDomain


@dataclass(frozen=True, slots=True)
class Span:
    """Rows start..stop of a block, in the context at this place. Part of a block is in use where a history was cut."""

    key: BlockKey
    start: int
    stop: int


@dataclass(slots=True)
class SessionContext:
    """The context a session's last turn ended with: full blocks in order, then the open one. A claim, not a promise:
    the blocks themselves may be gone, which the cache table knows."""

    spans: list[Span]
    open_key: BlockKey | None
    open_tokens: tuple[int, ...]  # of the open block; also its place in a comparison when its bytes are gone
    last_used_s: float

    @property
    def num_tokens(self) -> int:
        return sum(span.stop - span.start for span in self.spans) + len(self.open_tokens)


@dataclass(slots=True)
class RunningContext:
    """The pages of one running or waiting request. Context row p is row p % page_size of pages[p // page_size]."""

    request_id: str
    tenant: str
    salt: str
    session_id: str
    domain: KeyDomain
    token_ids: list[int]  # the sequence's own list: grows as tokens are sampled
    prompt_tokens: int
    keys: list[BlockKey] = field(default_factory=list)  # of the full blocks of token_ids, computed lazily
    pages: list[int] = field(default_factory=list)  # pinned, in order; empty while waiting
    computed: int = 0  # leading rows that hold KV
    sealed: int = 0  # leading blocks already considered for publishing
    trusted: bool = True  # False: it shares blocks that gave an impossible result, so nothing of it is published
    awaited: BlockKey | None = None  # the block it waits for while another request computes it
    reached: int = 0  # the most it had computed when it was preempted; its KV may be gone, its tokens are known

    def chain(self) -> list[BlockKey]:
        """Keys of all full blocks known so far."""
        if (len(self.keys) + 1) * BLOCK_TOKENS <= len(self.token_ids):
            self.keys = self.domain.chain(self.token_ids, self.keys)
        return self.keys

    def parent_of(self, block: int) -> BlockKey:
        return self.keys[block - 1] if block else self.domain.root
