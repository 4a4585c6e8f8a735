"""Replays a recorded sequence of requests through one tier of blocks, to measure what each eviction policy would hit.

The rule models no server: when a request arrives, its leading blocks that are in the tier are hits; then all of its
blocks are inserted or touched, from last to first; then the policy makes room. No load fails, nothing is pinned, no
request waits. For policies that look at sessions, sessions are inferred from the blocks (`SessionFinder`).

A block of the trace covers several blocks of the server, and a codec may compress these. Two kinds of trace blocks take
more room then, because one of their server blocks stays raw: the first block of a prompt, and a block that the prompt
does not fill. Apart from that a block that is not full takes as much room as a full one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from reprise.cache.blocks.keys import BLOCK_TOKENS as SERVER_BLOCK_TOKENS
from reprise.cache.blocks.keys import BlockKey
from reprise.cache.policies import POLICIES
from reprise.cache.policies.belady import BeladyPolicy
from reprise.cache.policies.eviction_policy import EvictionPolicy
from reprise.cache.returns.return_times import ReturnTimes
from reprise.loadgen.codec import RAW, CodedKV
from reprise.loadgen.workloads.traces import TraceRequest

BLOCK_TOKENS = 512  # size of a block in the published traces
DEFAULT = "lookahead"  # the server's policy for all its tiers
CEILINGS = ("belady", "unbounded")
ANSWER_S_PER_TOKEN = 0.03  # assumed, because traces do not record when answers ended
_MOST_SESSIONS = 20_000  # like a server, which forgets old sessions


@dataclass(frozen=True, slots=True)
class HitRate:
    """The blocks and tokens of a trace's requests, and how many of them one policy hits at one capacity."""

    policy: str
    capacity_tokens: int | None  # tokens of raw KV that would fit; None: unlimited
    blocks: int
    hit_blocks: int
    tokens: int
    hit_tokens: int

    @property
    def block_hit_rate(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0


class SessionFinder:
    """A part that assigns requests to sessions from the past alone. A request continues the session whose last full
    block is in its prompt; of several such sessions the one whose block comes latest in the prompt. The first block,
    which all may share, does not count. Only the end of a session can be continued; a second branch from the same place
    is a new session. A server knows sessions from its transcripts."""

    def __init__(self) -> None:
        self._at_end: dict[int, int] = {}  # last full block -> session
        self._ends: dict[int, int] = {}  # session -> its last full block, in the order of the last use
        self._sessions = 0

    def find(self, full_blocks: Sequence[int]) -> int | None:
        """Return the number of the session that a request belongs to, and record the request as the session's newest.
        full_blocks: names of the prompt's full blocks. None if there are fewer than two."""
        if len(full_blocks) < 2:
            return None
        known = next((block for block in reversed(full_blocks[1:]) if block in self._at_end), None)
        if known is None:
            session = self._sessions
            self._sessions += 1
        else:
            session = self._at_end.pop(known)
            del self._ends[session]
        self._at_end[full_blocks[-1]] = session
        self._ends[session] = full_blocks[-1]
        return session

    def forget_oldest(self, most: int) -> int | None:
        """Drop and return the session unused for longest, if there are more than `most`."""
        if len(self._ends) <= most:
            return None
        oldest = next(iter(self._ends))
        del self._at_end[self._ends.pop(oldest)]
        return oldest


class _Uses:
    """The future uses of blocks, for Belady's policy."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self._next: dict[BlockKey, float] = {}
        self._later: list[list[float]] = []  # per request and block: the number of the next request with the block
        for number in range(len(requests) - 1, -1, -1):
            keys = [_key(name) for name in requests[number].block_names]
            self._later.append([self._next.get(key, math.inf) for key in keys])
            self._next.update(dict.fromkeys(keys, float(number)))
        self._later.reverse()

    def arrive(self, number: int, keys: Sequence[BlockKey]) -> None:
        """Note for each block of the arriving request the number of the next request that has it, infinity if there is
        none. number: place of the arriving request in the sequence. keys: its blocks."""
        self._next.update(zip(keys, self._later[number], strict=True))

    def next_use(self, key: BlockKey) -> float:
        return self._next[key]


def hit_blocks(
    requests: Sequence[TraceRequest],
    policy: str,
    capacity_tokens: float | None,
    returns: ReturnTimes | None = None,
    codec: CodedKV = RAW,
) -> list[int]:
    """Return how many of each request's blocks were hit. policy: a key of `POLICIES`, "default" for the server's own,
    or one of `CEILINGS`. capacity_tokens: size of the tier, as the tokens of uncompressed KV that fit into it; None:
    unlimited. returns: what is known of when sessions return; None: only what is learned during the replay. codec: the
    codec of the tier's blocks."""
    uses = _Uses(requests) if policy == "belady" else None
    returns = ReturnTimes() if returns is None else returns
    if uses is not None:
        chosen: EvictionPolicy = BeladyPolicy(uses)
    else:
        chosen = POLICIES[{"default": DEFAULT, "unbounded": "fifo"}.get(policy, policy)](returns)
    room = math.inf if capacity_tokens is None or policy == "unbounded" else capacity_tokens
    return list(_replay(requests, chosen, returns, _Tier(chosen, room, codec), uses))


def hit_rate(
    requests: Sequence[TraceRequest],
    policy: str,
    capacity_tokens: int | None,
    first: int = 0,
    codec: CodedKV = RAW,
) -> HitRate:
    """Return what one policy hits of a trace. policy: a key of `POLICIES`, "default" for the server's own, or one of
    `CEILINGS`, which are upper bounds. Requests before number `first` warm up and are not counted. capacity_tokens:
    size of the tier, as the tokens of uncompressed KV that fit into it. Raises KeyError for an unknown policy."""
    hits = hit_blocks(requests, policy, capacity_tokens, codec=codec)
    bounded = capacity_tokens is not None and policy != "unbounded"
    counted = requests[first:]
    return HitRate(
        policy=policy,
        capacity_tokens=capacity_tokens if bounded else None,
        blocks=sum(len(request.block_names) for request in counted),
        hit_blocks=sum(hits[first:]),
        tokens=sum(request.prompt_tokens for request in counted),
        hit_tokens=sum(
            min(hit * BLOCK_TOKENS, request.prompt_tokens) for hit, request in zip(hits[first:], counted, strict=True)
        ),
    )


class _Tier:
    """Blocks and the room they take, in raw tokens."""

    def __init__(self, policy: EvictionPolicy, room: float, codec: CodedKV) -> None:
        self._policy, self._room = policy, room
        # By how many of the server's blocks in it stay raw: a prompt's first, and its open one.
        self._sizes = [codec.room(BLOCK_TOKENS, raw_tokens=raw * SERVER_BLOCK_TOKENS) for raw in range(3)]
        self._blocks: dict[BlockKey, float] = {}
        self._used = 0.0

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._blocks

    def insert(self, key: BlockKey, *, opens: bool, full: bool) -> None:
        """Insert or touch a block. opens: it is the first block of a prompt. full: the prompt fills it. The codec
        leaves a part of a block raw if it opens a prompt, and a part if it is not full."""
        self._policy.touch(key)
        if key not in self._blocks:
            self._blocks[key] = size = self._sizes[opens + (not full)]
            self._used += size

    def make_room(self) -> None:
        """Evict blocks until the others fit."""
        excess = self._used - self._room
        if excess <= 0:
            return
        for key in self._policy.victims(math.ceil(excess / self._sizes[0]), ()):
            if self._used <= self._room:
                break
            self._policy.remove(key)
            self._used -= self._blocks.pop(key)


def _replay(
    requests: Sequence[TraceRequest], policy: EvictionPolicy, returns: ReturnTimes, tier: _Tier, uses: _Uses | None
) -> Iterator[int]:
    """Yield the hits of each request, in blocks."""
    finder = SessionFinder()
    answers: list[tuple[float, int, int, int]] = []  # a heap of (time of completion, number, session, tokens)
    newest: dict[int, int] = {}  # session -> the number of its last request
    for number, request in enumerate(requests):
        keys = [_key(name) for name in request.block_names]
        yield next((place for place, key in enumerate(keys) if key not in tier), len(keys))
        while answers and answers[0][0] <= request.at_s:
            at_s, asked, session, tokens = heappop(answers)
            if newest.get(session) == asked:
                returns.answered(session, at_s, tokens)
        # A block that is not full gets another name when the next turn fills it, so no session owns it.
        full = min(len(keys), request.prompt_tokens // BLOCK_TOKENS)
        found = finder.find(request.block_names[:full])
        if found is not None:
            returns.used(found, request.at_s, request.prompt_tokens)
            for place, key in enumerate(keys[:full]):
                policy.own(key, found, place)
            newest[found] = number
            tokens = request.prompt_tokens + request.answer_tokens
            heappush(answers, (request.at_s + request.answer_tokens * ANSWER_S_PER_TOKEN, number, found, tokens))
        if uses is not None:
            uses.arrive(number, keys)
        for place in reversed(range(len(keys))):
            tier.insert(keys[place], opens=place == 0, full=place < full)
        tier.make_room()
        if (oldest := finder.forget_oldest(_MOST_SESSIONS)) is not None:
            policy.forget(oldest)
            returns.forget(oldest)
            newest.pop(oldest, None)


def _key(name: int) -> BlockKey:
    return BlockKey(name.to_bytes(8, "big"))
