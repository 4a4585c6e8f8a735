"""Chooses the replica that serves a turn. A gateway and the fleet simulator run this very code.

A session stays at its home, where its KV lies. A turn that would wait long there moves to another replica, if its first
token then comes earlier by more than four times the seconds of work that the move adds to the fleet. That price is to
keep moves from ending in recomputing, which would make all turns wait and cause more moves. What is known of it, and
what is not, is in docs/decisions/0018-moves-are-priced.md.

Pure: no clock and no I/O. `now` is in seconds of the caller's monotonic clock, the same for all methods of one
`FleetView`.
"""

import random
from collections import deque
from collections.abc import Container
from dataclasses import dataclass
from hashlib import blake2b
from statistics import median
from typing import Literal

Route = Literal["home", "new", "moved", "fallback"]
Reason = Literal["", "wait", "dead", "drain"]
Refusal = Literal["", "guard", "budget"]
Source = Literal["new", "dram", "disk", "redis", "compute"]

STALE_S = 3.0  # a replica whose last beat is older gets nothing: three beats are missing
_HYSTERESIS_S = 0.05
_OCCUPIES = 0.3  # share of an exposed load during which a replica cannot work on others
_REDIS_SHARE = 0.5  # share of Redis' rate that moves may use
_BURST_S = 2.0  # seconds of that rate that may be used at once
_SLICE_S = 0.1  # assignments to one replica within such a slice of time are kept as one
MOST_ASSIGNMENTS = 2 + int(
    STALE_S / _SLICE_S
)  # most assignments to one replica; it gets none after `STALE_S` without a beat


class NoReplica(Exception):
    """No replica may be chosen: none has sent a beat, all are draining, or all were tried."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The part of a replica's state that routing uses, which it reports about once a second. Rates are measured, 0 if
    nothing was measured or there is no such tier."""

    wait_s: float  # time until the prompt of a request that comes now would be started
    s_per_token: float  # time of a prompt's token, with the answers that are computed beside them
    s_per_kilo_pair: float  # time of a thousand pairs of a prompt's token and an earlier token
    kv_bytes_per_token: float
    dram_bytes_per_s: float = 0.0  # into HBM
    disk_bytes_per_s: float = 0.0
    redis_bytes_per_s: float = 0.0
    redis_wait_s: float = 0.0  # time until a load from Redis that is ordered now would begin
    dram_kept_s: float = 0.0  # a session that was used less long ago is expected to be in DRAM or HBM
    disk_kept_s: float = 0.0  # seconds that the KV used last stays on disk
    busy: float = 0.0  # share of the last seconds in which it computed prompts; for `reprise.fleet.scaling`
    draining: bool = False

    def compute_s(self, num_tokens: int, context_len: int) -> float:
        """Return the seconds to compute `num_tokens` of a prompt after `context_len` others."""
        pairs = num_tokens * (context_len + num_tokens / 2) / 1000
        return num_tokens * self.s_per_token + pairs * self.s_per_kilo_pair


@dataclass(frozen=True, slots=True)
class Question:
    """A turn that needs a replica: its session, the sizes of its prompt and history in tokens, and where its KV is."""

    session: str  # its id or a digest: the fall-back hashes it
    new_tokens: int  # tokens of the prompt after the history
    history_tokens: int = 0  # history that is saved somewhere; 0 for a new session
    home: str | None = None  # the replica that last committed the session
    idle_s: float = 0.0  # since it was used last
    redis_tokens: int = 0  # leading tokens of the history whose KV is in Redis


@dataclass(frozen=True, slots=True)
class Choice:
    replica: str
    route: Route
    why: Reason = ""  # it moved
    refused: Refusal = ""  # why it stays, although another replica would answer earlier
    cost_s: float = 0.0  # predicted time to the first token


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted seconds to the first token of a turn on one replica, in parts."""

    wait_s: float
    load_s: float  # exposed: what the computation of the other tokens does not hide
    compute_s: float
    source: Source
    redis_bytes: float = 0.0

    @property
    def total_s(self) -> float:
        return self.wait_s + self.load_s + self.compute_s

    @property
    def work_s(self) -> float:
        """Seconds of the replica's time that the turn takes: its computation, and the share of its load during which
        nothing else is computed."""
        return self.compute_s + _OCCUPIES * self.load_s


@dataclass(slots=True)
class _Member:
    beat: Beat
    made_s: float  # when the beat was made
    assigned: deque[tuple[float, float]]  # (when, seconds of work), after the beat
    wait_s: float  # at `as_of_s`: the beat's wait, less the time since, with what was assigned since
    as_of_s: float

    def waits_s(self, now: float) -> float:
        return max(0.0, self.wait_s - max(0.0, now - self.as_of_s))

    def add(self, seconds: float, now: float) -> None:
        self.wait_s, self.as_of_s = self.waits_s(now) + seconds, max(now, self.as_of_s)


class FleetView:
    """A table of the replicas as one gateway knows them: their last beats, and the work it has assigned to them since.

    Single-threaded. Holds one beat of each replica, and at most `MOST_ASSIGNMENTS` sums of what it was assigned since.
    """

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}  # members in the order of their last beats
        self._names: list[str] = []  # the names in `_members`, to draw from
        self._place: dict[str, int] = {}  # name -> its place in `_names`

    def heard(self, name: str, beat: Beat, made_s: float) -> None:
        """Store a replica's beat, made at `made_s`. One that is not newer than the last changes nothing."""
        before = self._members.pop(name, None)
        if before is not None and before.made_s >= made_s:
            self._members[name] = before
            return
        member = _Member(
            beat, made_s, before.assigned if before else deque(maxlen=MOST_ASSIGNMENTS), beat.wait_s, made_s
        )
        while member.assigned and member.assigned[0][0] <= made_s:
            member.assigned.popleft()  # the beat knows of it
        for when_s, seconds in member.assigned:
            member.add(seconds, when_s)
        if before is None:
            self._place[name] = len(self._names)
            self._names.append(name)
        self._members[name] = member

    def lost(self, name: str) -> None:
        """Forget a replica until its next beat: it refused a connection, or its beat was removed."""
        if self._members.pop(name, None) is not None:
            place, last = self._place.pop(name), self._names.pop()
            if last != name:
                self._names[place], self._place[last] = last, place

    def expire(self, now: float) -> list[str]:
        """Forget the replicas whose last beat is older than `STALE_S`. Returns their names."""
        stale = [name for name, member in self._members.items() if now - member.made_s > STALE_S]
        for name in stale:
            self.lost(name)
        return stale

    def assign(self, name: str, seconds: float, now: float) -> None:
        """Count `seconds` of work that a replica was given at time `now`. They count until a later beat of the replica
        includes them."""
        member = self._members[name]
        member.add(seconds, now)
        if member.assigned and int(member.assigned[-1][0] / _SLICE_S) == int(now / _SLICE_S):
            # Under the later time, so that no beat is taken to know of what it does not.
            seconds += member.assigned.pop()[1]
        member.assigned.append((now, seconds))

    @property
    def names(self) -> list[str]:
        """All replicas that have sent a beat, in no order. Not to be changed."""
        return self._names

    def beat(self, name: str) -> Beat | None:
        member = self._members.get(name)
        return None if member is None else member.beat

    def wait_s(self, name: str, now: float) -> float:
        """Return the predicted wait, in seconds, of a request that is sent to a replica now."""
        return self._members[name].waits_s(now)

    def is_open(self, name: str, now: float) -> bool:
        """Return whether a replica takes turns: its last beat is recent, and it is not draining."""
        member = self._members.get(name)
        return member is not None and not member.beat.draining and now - member.made_s <= STALE_S

    def redis_bytes_per_s(self) -> float:
        """The median of the rates at which replicas measured their loads from Redis; 0 if none has measured one."""
        rates = [rate for member in self._members.values() if (rate := member.beat.redis_bytes_per_s) > 0]
        return median(rates) if rates else 0.0

    def cost(self, name: str, question: Question, now: float) -> Cost:
        """Predict what a turn costs on a replica that has sent a beat."""
        member = self._members[name]
        beat, wait_s = member.beat, member.waits_s(now)
        new, history = question.new_tokens, question.history_tokens
        alone_s = beat.compute_s(new, history)
        if not history:
            return Cost(wait_s, 0.0, alone_s, "new")
        if name == question.home:
            size = history * beat.kv_bytes_per_token
            if question.idle_s <= beat.dram_kept_s:
                load_s = size / beat.dram_bytes_per_s if beat.dram_bytes_per_s else 0.0
                return Cost(wait_s, max(0.0, load_s - alone_s), alone_s, "dram")
            if question.idle_s <= beat.disk_kept_s and beat.disk_bytes_per_s:
                return Cost(wait_s, max(0.0, size / beat.disk_bytes_per_s - alone_s), alone_s, "disk")
        recompute = Cost(wait_s, 0.0, beat.compute_s(history + new, 0), "compute")
        loaded = min(question.redis_tokens, history)
        if not loaded or not beat.redis_bytes_per_s:
            return recompute
        size = loaded * beat.kv_bytes_per_token
        compute_s = beat.compute_s(history - loaded + new, loaded)
        load_s = beat.redis_wait_s + size / beat.redis_bytes_per_s
        load = Cost(wait_s, max(0.0, load_s - compute_s), compute_s, "redis", size)
        return min(load, recompute, key=lambda cost: cost.total_s)


class TokenBucket:
    """A bucket of the bytes that sessions which move to another replica may load from Redis. Starts full."""

    def __init__(self) -> None:
        self._rate = self._left = self._as_of_s = 0.0

    def set_rate(self, bytes_per_s: float, now: float) -> None:
        """Set how many bytes per second the bucket gains."""
        self.fill(now)
        first = not self._rate
        self._rate = bytes_per_s
        self._left = bytes_per_s * _BURST_S if first else min(self._left, bytes_per_s * _BURST_S)

    def fill(self, now: float) -> float:
        """Add the bytes that the bucket has gained since the last call. Returns how many it has now; negative if it
        owes some."""
        passed_s = max(0.0, now - self._as_of_s)
        self._left = min(self._rate * _BURST_S, self._left + passed_s * self._rate)
        self._as_of_s = max(now, self._as_of_s)
        return self._left

    def take(self, num_bytes: float, now: float, *, owing: bool = False) -> bool:
        """Take bytes if the bucket has them, and return whether they were taken. owing: take them anyway. The bucket
        then owes the missing bytes, at most as many as it can hold."""
        left = self.fill(now)
        if left < num_bytes and not owing:
            return False
        self._left = max(-self._rate * _BURST_S, left - num_bytes)
        return True


class Router:
    """A chooser of the replica for each turn, which counts the work that it assigns. Single-threaded; random draws come
    from `rng`."""

    price = 4.0  # a move must save so many times the work that it adds to the fleet
    looks = 2  # other replicas, drawn at random, that are compared

    def __init__(self, *, view: FleetView, rng: random.Random) -> None:
        self.view = view
        self._rng = rng
        self._budget = TokenBucket()
        self._is_rate_known = False

    def set_redis_rate(self, bytes_per_s: float, now: float) -> None:
        """Set this gateway's share of the rate at which all of Redis delivers, in bytes per second; moves may use half
        of it. Without this call the rate is the median of those that replicas measured for their loads, which never
        exceeds the true one."""
        self._is_rate_known = True
        self._budget.set_rate(_REDIS_SHARE * bytes_per_s, now)

    def choose(self, question: Question, now: float, *, excluded: Container[str] = ()) -> Choice:
        """Choose a replica for a turn. excluded: replicas that were tried for it already. Raises NoReplica."""
        home = question.home
        if home is None or not question.history_tokens:
            return self._anywhere(question, now, excluded, "new", "")
        if home in excluded or not self.view.is_open(home, now):
            beat = self.view.beat(home)
            why: Reason = "drain" if beat is not None and beat.draining and home not in excluded else "dead"
            return self._anywhere(question, now, excluded, "moved", why)
        at_home = self.view.cost(home, question, now)
        if self.hardly_waits(at_home):
            return self.assigned(Choice(home, "home", cost_s=at_home.total_s), at_home, now)
        return self.home_or_other(question, home, at_home, now, excluded)

    def hardly_waits(self, at_home: Cost) -> bool:
        """Return whether a turn stays at home without a comparison with other replicas: its wait there is at most the
        time that it takes to load and compute, plus `_HYSTERESIS_S`. at_home: its cost at home."""
        return at_home.wait_s <= _HYSTERESIS_S + at_home.load_s + at_home.compute_s

    def fall_back(self, session: str, now: float, *, excluded: Container[str] = ()) -> Choice:
        """Choose by rendezvous hashing, which needs no directory: every gateway that knows the same replicas chooses
        the same one. excluded: replicas that were tried already. Raises NoReplica."""
        names = [name for name in self.view.names if name not in excluded and self.view.is_open(name, now)]
        if not names:
            raise NoReplica
        return Choice(rendezvous(session, names), "fallback")

    def _anywhere(self, question: Question, now: float, excluded: Container[str], route: Route, why: Reason) -> Choice:
        """Choose the cheapest of some replicas drawn at random. route, why: reasons to be reported. The bytes that the
        replica must load from Redis are taken from the budget of moves (half of Redis' rate), even if the budget has
        fewer."""
        found = self.cheapest_drawn(question, now, excluded)
        if found is None:
            raise NoReplica
        name, cost = found
        self._budget.take(cost.redis_bytes, now, owing=True)
        return self.assigned(Choice(name, route, why, cost_s=cost.total_s), cost, now)

    def home_or_other(
        self, question: Question, home: str, at_home: Cost, now: float, excluded: Container[str]
    ) -> Choice:
        """Choose between home and other replicas for a turn that would wait at home, and count its work for the chosen
        replica. at_home: its cost at home. excluded: replicas that were tried for it already."""
        if not self._is_rate_known:
            self._budget.set_rate(_REDIS_SHARE * self.view.redis_bytes_per_s(), now)
        found = self.cheapest_drawn(question, now, excluded, home)
        refused: Refusal = ""
        if found is not None:
            name, cost = found
            extra_s = max(0.0, cost.work_s - at_home.work_s)
            if cost.source == "compute" or cost.total_s + _HYSTERESIS_S + self.price * extra_s >= at_home.total_s:
                refused = "guard" if cost.total_s + _HYSTERESIS_S < at_home.total_s else ""
            elif not self._budget.take(cost.redis_bytes, now):
                refused = "budget"
            else:
                return self.assigned(Choice(name, "moved", "wait", cost_s=cost.total_s), cost, now)
        return self.assigned(Choice(home, "home", refused=refused, cost_s=at_home.total_s), at_home, now)

    def cheapest_drawn(
        self, question: Question, now: float, excluded: Container[str], home: str | None = None
    ) -> tuple[str, Cost] | None:
        """Draw up to `looks` replicas at random and return the cheapest for the turn, with its cost; of equally cheap
        ones the first drawn. None if no replica takes turns except `home` and those in `excluded`."""
        best: tuple[str, Cost] | None = None
        for name in self._draw(now, excluded, home):
            cost = self.view.cost(name, question, now)
            if best is None or cost.total_s < best[1].total_s:
                best = name, cost
        return best

    def _draw(self, now: float, excluded: Container[str], home: str | None) -> list[str]:
        """Draw at random as many replicas that take turns as `looks` says, or as many as there are."""

        def is_candidate(name: str) -> bool:
            return name != home and name not in excluded and self.view.is_open(name, now)

        names = self.view.names
        drawn: list[str] = []
        for _ in range(4 * self.looks):  # mostly a few draws are enough, however large the fleet
            if not names:
                return []
            name = names[self._rng.randrange(len(names))]
            if name not in drawn and is_candidate(name):
                drawn.append(name)
                if len(drawn) == self.looks:
                    return drawn
        candidates = [name for name in names if is_candidate(name)]
        return self._rng.sample(candidates, min(self.looks, len(candidates)))

    def assigned(self, choice: Choice, cost: Cost, now: float) -> Choice:
        self.view.assign(choice.replica, cost.work_s, now)
        return choice


def rendezvous(session: str, names: list[str]) -> str:
    """Return the name whose hash with the session is highest: when a replica leaves, only its sessions move. Raises
    ValueError if there are no names."""
    key = blake2b(session.encode(), digest_size=8)

    def weight(name: str) -> bytes:
        found = key.copy()
        found.update(name.encode())
        return found.digest()

    return max(names, key=weight)
