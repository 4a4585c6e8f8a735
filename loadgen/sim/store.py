"""Simulates the KV of sessions in tiers, ranked by the server's own eviction policies, with sizes instead of bytes.

Copies are stored as on the server: what a turn computes is saved in DRAM and then written to disk; a block that leaves
DRAM stays on disk, and so does one that is fetched. What moves at once is a granule: a whole session (AttentionStore's
item) or a fixed number of its tokens (the server's blocks).
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey
from reprise.cache.policies.eviction_policy import EvictionPolicy, PolicyFactory
from reprise.cache.policies.lru import LruPolicy
from reprise.cache.returns.return_times import ReturnTimes
from reprise.loadgen.codec import RAW, CodedKV
from reprise.scheduler.line import Line

TIERS = ("hbm", "dram", "disk")
_TOLD = 3  # times the number of sessions that fit into an upper tier


class BrokenBooks(Exception):
    """The tokens, bytes or turns that the simulator has counted do not add up: it has a fault."""


@dataclass(slots=True)
class Granule:
    key: BlockKey
    tokens: int
    opens: bool  # the context: its first block is not coded

    @property
    def raw_tokens(self) -> int:
        return min(self.tokens, BLOCK_TOKENS * self.opens + self.tokens % BLOCK_TOKENS)


@dataclass(slots=True)
class _Context:
    """The KV that a session could have, in granules (the units in which it is stored), some of which may be in no
    tier."""

    granules: list[Granule] = field(default_factory=list)
    first: int = 0  # place of the first granule; places do not change when granules before it are cut
    pins: int = 0
    tokens: int = 0  # sum over all granules


class Tier:
    """One simulated tier. It knows which granules (parts of sessions, see this module) lie in it, and their bytes."""

    def __init__(self, name: str, capacity: float, policy: EvictionPolicy, *, kv: float, codec: CodedKV) -> None:
        """Begin empty. capacity: in bytes. kv: bytes of a token's uncompressed KV."""
        self.name = name
        self.capacity = capacity
        self._kv, self.codec = kv, codec
        self.policy = policy
        self.told: Line[str] = Line()  # the queued sessions that the policy knows of
        self.used = 0.0
        self.evicted = 0.0
        self.refused = 0.0
        self.written = 0.0
        self.sizes: dict[BlockKey, float] = {}

    def __contains__(self, key: BlockKey) -> bool:
        return key in self.sizes

    def size(self, granule: Granule) -> float:
        return self._kv * self.codec.room(granule.tokens, raw_tokens=granule.raw_tokens)

    def remove(self, key: BlockKey) -> None:
        size = self.sizes.pop(key, None)
        if size is not None:
            self.used -= size
            self.policy.remove(key)

    def make_room(
        self,
        size: float,
        pinned: Container[BlockKey],
        *,
        newcomer: str | None = None,
        spare_queued: bool = False,
    ) -> bool:
        """Evict granules (the units in which a simulated tier stores KV) until `size` more bytes fit; if that is
        impossible, change nothing and return False. pinned: never evicted. newcomer: the session that needs the room,
        or None; the policy may refuse it. spare_queued: evict nothing of sessions whose turns wait."""
        excess = self.used + size - self.capacity
        if excess <= 0:
            return True
        if size > self.capacity:
            return False
        count = max(1, int(excess * len(self.sizes) / self.used)) if self.used else 1
        while True:
            victims = self.policy.victims(count, pinned, newcomer=newcomer, spare_queued=spare_queued)
            chosen = 0
            freed = 0.0
            while chosen < len(victims) and freed < excess:
                freed += self.sizes[victims[chosen]]
                chosen += 1
            if freed >= excess:
                break
            if len(victims) < count:
                return False
            count *= 2
        for key in victims[:chosen]:
            self.evicted += self.sizes[key]
            self.remove(key)
        return True

    def put(self, key: BlockKey, size: float) -> None:
        """Add a granule, for which there must be room, or update its size."""
        before = self.sizes.get(key, 0.0)
        self.sizes[key] = size
        self.used += size - before
        self.written += size - before
        self.policy.touch(key)

    def check(self) -> None:
        """Raise BrokenBooks if the sizes do not add up."""
        total = sum(self.sizes.values())
        if abs(total - self.used) > 1e-6 * max(1.0, total) + 1.0:
            raise BrokenBooks(f"{self.name}: {self.used} bytes used, granules of {total}")
        if self.used > self.capacity * (1 + 1e-9) + 1.0:
            raise BrokenBooks(f"{self.name}: {self.used} bytes in {self.capacity}")
        if set(self.policy.victims(len(self.sizes) + 1, ())) != self.sizes.keys():
            raise BrokenBooks(f"{self.name}: the policy ranks other granules than the tier holds")


class _Pinned:
    """The granules of sessions that run or are being loaded, as a container."""

    def __init__(self) -> None:
        self.counts: dict[BlockKey, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self.counts


class SimulatedStore:
    """All tiers. Sessions are given by name, `now` in virtual seconds. Single-threaded."""

    def __init__(
        self,
        *,
        policy: PolicyFactory,
        kv_bytes_per_token: float,
        disk_codec: CodedKV,
        granule_tokens: int,
        eviction_window: bool,
        hbm_bytes: float,
        dram_bytes: float,
        disk_bytes: float,
    ) -> None:
        self._kv = kv_bytes_per_token
        self._granule_tokens = granule_tokens
        sizes = {"hbm": hbm_bytes, "dram": dram_bytes, "disk": disk_bytes}
        # In raw bytes, like the mean session.
        self._window_bytes = dram_bytes + disk_bytes * disk_codec.ratio if eviction_window else math.inf
        self._returns = ReturnTimes()
        self.tiers = {
            name: Tier(
                name, sizes[name], policy(self._returns), kv=self._kv, codec=disk_codec if name == "disk" else RAW
            )
            for name in TIERS
            if sizes[name] > 0
        }
        self._lowest = next((name for name in reversed(TIERS) if name in self.tiers), None)
        self._contexts: dict[str, _Context] = {}
        self._tokens = 0  # sum over all contexts
        self._pinned = _Pinned()
        self._keys = 0
        self._used_s: dict[str, float] = {}  # session -> last access, in the order of the last access

    @property
    def mean_session_bytes(self) -> float:
        """Mean raw size of the sessions in the lowest tier; 0 while there are none."""
        if self._lowest is None or not self._contexts:
            return 0.0
        tier = self.tiers[self._lowest]
        if not self._granule_tokens:
            return tier.used * tier.codec.ratio / len(tier.sizes) if tier.sizes else 0.0
        return self._tokens * self._kv / len(self._contexts)

    # --- what is here -------------------------------------------------------------------------------------------------

    def found(self, session: str, dropped: int, most: int) -> dict[str, int]:
        """Return tier -> number of leading tokens found there after the first `dropped`, at most `most` in all tiers.
        Each token counts once, in the fastest tier that has it."""
        tokens = dict.fromkeys(self.tiers, 0)
        context = self._contexts.get(session)
        for granule in context.granules if context else ():
            here = max(0, granule.tokens - dropped)
            dropped -= min(dropped, granule.tokens)
            if not here:
                continue
            tier = self._fastest(granule.key)
            if tier is None or most <= 0:
                break
            tokens[tier] += min(most, here)
            most -= here
        return tokens

    def _fastest(self, key: BlockKey) -> str | None:
        return next((name for name, tier in self.tiers.items() if key in tier), None)

    # --- events -------------------------------------------------------------------------------------------------------

    def arrived(self, session: str, now: float, prompt_tokens: int) -> None:
        """Record that a turn of the session has arrived, from which policies learn when sessions return."""
        self._used_s.pop(session, None)
        self._used_s[session] = now
        self._returns.used(session, now, prompt_tokens)

    def hit(self, session: str) -> None:
        """Mark the session's granules (the units in which KV is stored) as used now, in all tiers. The first granule is
        marked last, so that the session's tail is evicted before its beginning."""
        context = self._contexts.get(session)
        for granule in reversed(context.granules) if context else ():
            for tier in self.tiers.values():
                if granule.key in tier:
                    tier.policy.touch(granule.key)

    def pin(self, session: str) -> None:
        """Protect the session's granules from eviction, because it is being loaded or runs. Each `pin` needs an
        `unpin`."""
        context = self._contexts.setdefault(session, _Context())
        context.pins += 1
        if context.pins == 1:
            self._pinned.counts.update((granule.key, 1) for granule in context.granules)

    def unpin(self, session: str) -> None:
        context = self._contexts[session]
        context.pins -= 1
        if context.pins == 0:
            for granule in context.granules:
                del self._pinned.counts[granule.key]

    def cut(self, session: str, num_tokens: int) -> None:
        """Drop the first `num_tokens` tokens of the context, a whole number of granules. The rest keeps its KV."""
        context = self._contexts.get(session)
        while context and context.granules and num_tokens > 0:
            head = context.granules[0]
            if self._granule_tokens and num_tokens < head.tokens:
                raise ValueError("a cut goes between two granules")
            if num_tokens < head.tokens:
                head.tokens -= num_tokens
                head.opens = False
                self._count(context, -num_tokens)
                for tier in self.tiers.values():
                    if head.key in tier:
                        size = tier.size(head)
                        tier.used += size - tier.sizes[head.key]
                        tier.sizes[head.key] = size
                return
            num_tokens -= head.tokens
            self._drop_head(context)

    def invalidate(self, session: str) -> None:
        """Drop everything that is saved of the session, because it cannot be used any more."""
        context = self._contexts.get(session)
        while context and context.granules:
            self._drop_head(context)

    def _count(self, context: _Context, num_tokens: int) -> None:
        context.tokens += num_tokens
        self._tokens += num_tokens

    def _drop_head(self, context: _Context) -> None:
        head = context.granules.pop(0)
        context.first += 1
        self._count(context, -head.tokens)
        for tier in self.tiers.values():
            tier.remove(head.key)
        self._pinned.counts.pop(head.key, None)

    def save(self, session: str, kv_tokens: int, reused_tokens: int, now: float) -> float:
        """Save the KV of a turn's context of `kv_tokens` tokens, of which the turn has computed all but the first
        `reused_tokens`. Returns the bytes to write to disk."""
        if not self.tiers:
            return 0.0
        disk = self.tiers.get("disk")
        before = disk.written if disk is not None else 0.0
        context = self._contexts.setdefault(session, _Context())
        fresh = self._grow(session, context, kv_tokens, reused_tokens)
        self._used_s.pop(session, None)
        self._used_s[session] = now
        self._returns.answered(session, now, kv_tokens)
        for name, tier in self.tiers.items():
            lowest = name == self._lowest
            for granule in reversed(fresh if name != "hbm" else context.granules):
                self._insert(tier, granule, newcomer=None if lowest else session, spare_queued=lowest)
        return disk.written - before if disk is not None else 0.0

    def _grow(self, session: str, context: _Context, kv_tokens: int, reused_tokens: int) -> list[Granule]:
        """Extend a context's granules (the units in which KV is stored) to `kv_tokens`. Returns in order those with
        rows beyond the first `reused_tokens`, which this turn has computed."""
        most = self._granule_tokens or kv_tokens
        fresh: list[Granule] = []
        start = 0
        self._count(context, kv_tokens - context.tokens)
        for granule in context.granules:
            grown = min(most, kv_tokens - start)
            if grown != granule.tokens or start + granule.tokens > reused_tokens:
                granule.tokens = grown
                fresh.append(granule)
            start += grown
        while start < kv_tokens:
            self._keys += 1
            granule = Granule(BlockKey(self._keys.to_bytes(8, "big")), min(most, kv_tokens - start), not start)
            place = context.first + len(context.granules)
            for tier in self.tiers.values():
                tier.policy.own(granule.key, session, place)
            context.granules.append(granule)
            if context.pins:
                self._pinned.counts[granule.key] = 1
            fresh.append(granule)
            start += granule.tokens
        return fresh

    def _insert(self, tier: Tier, granule: Granule, *, newcomer: str | None, spare_queued: bool) -> bool:
        size = tier.size(granule)
        before = tier.sizes.get(granule.key, 0.0)
        own = granule.key not in self._pinned.counts
        if own:
            self._pinned.counts[granule.key] = 1  # the copy that it replaces must not be evicted for it
        fits = tier.make_room(size - before, self._pinned, newcomer=newcomer, spare_queued=spare_queued)
        if own:
            del self._pinned.counts[granule.key]
        if fits:
            tier.put(granule.key, size)
        else:
            tier.refused += size
            tier.remove(granule.key)  # an older copy lacks rows
        return fits

    def is_missing_in_dram(self, session: str) -> bool:
        """Return whether a fetch would bring anything from disk into DRAM. False for a session that is loading or
        running."""
        context = self._contexts.get(session)
        if context is not None and not context.pins:
            dram, disk = self.tiers["dram"].sizes, self.tiers["disk"].sizes
            for granule in context.granules:
                if granule.key not in dram and granule.key in disk:
                    return True
        return False

    def fetch(self, session: str) -> float:
        """Put into DRAM what only the disk has of a session, as far as its policy makes room. Returns the bytes of KV,
        uncompressed, that the caller has to let the disk read; 0 if there is no room."""
        dram, disk = self.tiers["dram"], self.tiers["disk"]
        moved = 0.0
        for granule in self._contexts[session].granules:
            if granule.key in disk and granule.key not in dram:
                size = dram.size(granule)
                if not dram.make_room(size, self._pinned, newcomer=session):
                    break
                dram.put(granule.key, size)
                moved += size
        return moved

    @property
    def looks_ahead(self) -> bool:
        """Whether some tier's eviction policy uses the order of the waiting sessions; LRU does not."""
        return any(not isinstance(tier.policy, LruPolicy) for tier in self.tiers.values())

    def look_ahead(self, waiting: Sequence[str], now: float) -> None:
        """Tell the eviction policies which sessions wait, next first. A tier above the lowest is told only of the first
        ones, a few times as many as it can hold, because a policy walks through all that it is told of."""
        mean = self.mean_session_bytes
        for name, tier in self.tiers.items():
            told_bytes = _TOLD * tier.capacity + mean if name != self._lowest else self._window_bytes
            most = int(told_bytes / mean) if told_bytes < math.inf else None
            before, tier.told = tier.told, tier.told.followed_by(waiting[:most])
            change = tier.told.since(before)
            tier.policy.look_ahead(tier.told.members, (*change.joined, *change.left))
        self._returns.advance(now)

    def leave_hbm(self, session: str) -> None:
        """Remove a session that begins to run from the tier "hbm", which counts only sessions that do not run. Its KV
        now belongs to the running turn."""
        context = self._contexts.get(session)
        for granule in context.granules if context else ():
            self.tiers["hbm"].remove(granule.key)

    def shrink_hbm(self, capacity: float) -> None:
        """Evict granules from HBM until it holds at most `capacity`, because running turns need the room."""
        tier = self.tiers["hbm"]
        tier.capacity = capacity
        if tier.used > capacity and not tier.make_room(0.0, ()):
            raise BrokenBooks("HBM holds granules that no policy lets go")

    def forget(self, session: str) -> None:
        """Drop a session that has ended or expired."""
        context = self._contexts.pop(session, None)
        self._used_s.pop(session, None)
        self._tokens -= context.tokens if context else 0
        for granule in context.granules if context else ():
            for tier in self.tiers.values():
                tier.remove(granule.key)
        for tier in self.tiers.values():
            tier.policy.forget(session)
        self._returns.forget(session)

    def expire(self, before_s: float) -> list[str]:
        """Forget the sessions last accessed before the time `before_s`, except those in use. Returns their names."""
        expired = []
        for session, used_s in self._used_s.items():
            if used_s > before_s:
                break
            context = self._contexts.get(session)
            if context is None or not context.pins:
                expired.append(session)
        for session in expired:
            self.forget(session)
        return expired

    def check(self) -> None:
        """Raise BrokenBooks if the sizes do not add up."""
        for tier in self.tiers.values():
            tier.check()
        known = {granule.key: granule for context in self._contexts.values() for granule in context.granules}
        for tier in self.tiers.values():
            for key, size in tier.sizes.items():
                if key not in known or abs(tier.size(known[key]) - size) > 1.0:
                    raise BrokenBooks(f"{tier.name}: a granule of {size} bytes belongs to nobody, or has another size")
        if self._pinned.counts:
            raise BrokenBooks(f"{len(self._pinned.counts)} granules are pinned at the end")
