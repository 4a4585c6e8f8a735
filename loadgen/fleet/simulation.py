"""Simulates a fleet on a virtual clock: simulated servers, gateways that get their beats a little late and route with
the real class, a directory of sessions, and Redis. Replicas may be killed, drained and added.

Simplifications: the directory and the network take no time. A gateway learns of a death when it sends something there.
A turn that was interrupted is sent to another replica at once, with the tokens said so far if its answer had begun.
"""

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reprise.fleet.routing import Beat, Choice, FleetView, Question, Router, rendezvous
from reprise.fleet.scaling import Limits, Signals, WaitWindow, wanted
from reprise.loadgen.fleet.simulated_redis import RedisLink, SimulatedRedis
from reprise.loadgen.sim.machine import Config, Machine
from reprise.loadgen.sim.simulated_server import SimulatedServer
from reprise.loadgen.sim.turn import LiveSession, LiveTurn, TurnRecord
from reprise.loadgen.workloads.workload import Conversation

_BEAT_PHASES = 10  # replicas do not beat at the same time
_FOR_EVER_S = 1e9
_SCALING_S = 10.0
_START_S = 60.0  # from the wish for a replica until it serves


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """A fleet and the events in its run. Times in seconds of the virtual clock; math.inf: never."""

    replicas: int
    machine: Machine
    server: Config
    redis_bytes_per_s: float = 0.0  # rate of all instances together; 0: no Redis for KV
    link_bytes_per_s: float = 3e9  # rate of a replica's link
    redis_bytes: float = math.inf
    gateways: int = 1
    beat_s: float = 1.0
    until_s: float = math.inf  # no turn is sent later
    kill_s: float = math.inf  # replica r0, at once
    drain_s: float = math.inf  # replica r0: gets nothing new, and leaves when its turns have ended
    scaling: Limits | None = None  # adds and drains replicas
    seed: int = 0


@dataclass(slots=True)
class _Home:
    """The directory's entry of a session."""

    replica: str
    used_s: float
    tokens: int


class _Replica:
    def __init__(self, name: str, server: SimulatedServer, link: RedisLink | None) -> None:
        self.name = name
        self.server = server
        self.link = link
        self.wake_s = math.inf  # when `server` is looked at next
        self.is_alive = True
        self.draining = False
        self._busy = (0.0, 0.0)  # (virtual time, seconds of prefills) at the last beat
        self._evicted: dict[str, tuple[float, float]] = {}  # tier -> (virtual time, bytes) a while ago
        self._kept_s: dict[str, float] = {}

    def beat(self, now: float) -> Beat:
        server, machine = self.server, self.server.machine
        slowdown = server.slowdown
        since_s, before = self._busy
        busy = (server.prefill_s + server.stalled_s - before) / (now - since_s) if now > since_s else 0.0
        self._busy = now, server.prefill_s + server.stalled_s
        return Beat(
            wait_s=server.expected_wait_s(now),
            s_per_token=machine.costs.s_per_token * slowdown,
            s_per_kilo_pair=machine.costs.s_per_kilo_pair * slowdown,
            kv_bytes_per_token=machine.kv_bytes_per_token,
            dram_bytes_per_s=machine.dram_to_hbm,
            disk_bytes_per_s=machine.disk_to_dram,
            redis_bytes_per_s=1.0 / self.link.s_per_byte if self.link is not None else 0.0,
            redis_wait_s=self.link.wait_s(now) if self.link is not None else 0.0,
            dram_kept_s=self._kept("dram", now),
            disk_kept_s=self._kept("disk", now),
            busy=min(1.0, busy),
            draining=self.draining,
        )

    def _kept(self, name: str, now: float) -> float:
        """Estimate how many seconds a session stays in a tier after its last use: as long as evictions take to replace
        all that the tier holds; for ever while nothing is evicted. name: of the tier."""
        tier = self.server.store.tiers.get(name)
        if tier is None:
            return 0.0
        since_s, before = self._evicted.setdefault(name, (now, tier.evicted))
        if now - since_s >= 10.0:
            left = tier.evicted - before
            self._kept_s[name] = tier.capacity * (now - since_s) / left if left else _FOR_EVER_S
            self._evicted[name] = now, tier.evicted
        return self._kept_s.get(name, _FOR_EVER_S)


class FleetSimulation:
    """A simulated run. Deterministic: chance comes from the workload and `config.seed`.

    histories: session id -> tokens of history that a conversation has at the start. Each such session has a home (a
    replica), which is chosen by hashing, whatever the routing policy is. The home has the history's KV, and Redis has
    none of it.
    """

    def __init__(
        self, conversations: Sequence[Conversation], config: FleetConfig, *, histories: Mapping[str, int] | None = None
    ) -> None:
        self.config = config
        self.histories = histories or {}
        self.now = 0.0
        self.redis = (
            SimulatedRedis(
                bytes_per_s=config.redis_bytes_per_s,
                link_bytes_per_s=config.link_bytes_per_s,
                kv_bytes_per_token=config.machine.kv_bytes_per_token,
                capacity_bytes=config.redis_bytes,
            )
            if config.redis_bytes_per_s
            else None
        )
        self.replicas: dict[str, _Replica] = {}  # replicas that have left are among them
        self.routes: Counter[str] = Counter()  # route, and "moved: why", and "refused: why"
        self.asked_s: dict[tuple[str, int], float] = {}  # when an interrupted turn came first
        self.resumed: set[tuple[str, int]] = set()  # turns whose answers had begun when they were interrupted
        self.sizes: list[tuple[float, int]] = []  # (time, replicas that serve), at every change
        self._rng = random.Random(config.seed)
        self._homes: dict[str, _Home] = {}
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []  # a heap
        self._pushed = 0
        self._views: list[FleetView] = [FleetView() for _ in range(config.gateways)]
        self._routers = [Router(view=view, rng=random.Random(config.seed + n)) for n, view in enumerate(self._views)]
        self._window = WaitWindow(most=100_000)
        self._busy: dict[str, float] = {}
        self._left = len(conversations)
        for router in self._routers:
            router.set_redis_rate(config.redis_bytes_per_s / config.gateways, 0.0)
        for _ in range(config.replicas):
            self._add_replica(None)
        for conversation in sorted(conversations, key=lambda one: -one.start_s):  # the next to come was used last
            session = LiveSession(conversation, context=self.histories.get(conversation.session_id, 0))
            if session.context:
                self._settle(session)
            self._push(conversation.start_s, self._send, session)
        for phase in range(_BEAT_PHASES):
            self._push(config.beat_s * phase / _BEAT_PHASES, self._beat, phase)
        self._push(config.kill_s, self._kill, "r0")
        self._push(config.drain_s, self._drain, "r0")
        if config.scaling is not None:
            self._push(_SCALING_S, self._scale, config.scaling)

    def run(self) -> None:
        """Run until all conversations have ended. Raises NoReplica if none is left to serve."""
        while self._left:
            self.now, _, handle, argument = heapq.heappop(self._events)
            handle(argument)

    @property
    def records(self) -> list[TurnRecord]:
        """All turns that were started, by time of arrival."""
        found = [record for replica in self.replicas.values() for record in replica.server.records]
        return sorted(found, key=lambda record: record.arrived_s)

    def ttft_s(self, record: TurnRecord) -> float:
        """Return the seconds to a turn's first token as its client saw them: counted from the turn's first arrival,
        even if the turn was interrupted and sent to another replica."""
        return record.first_token_s - self.asked_s.get((record.session_id, record.turn), record.arrived_s)

    def _settle(self, session: LiveSession) -> None:
        """Give a conversation that has begun before the run a home with its KV."""
        name = rendezvous(session.name, list(self.replicas))
        store = self.replicas[name].server.store
        store.arrived(session.name, self.now, session.context - 1)
        store.save(session.name, session.context - 1, 0, self.now)
        self._homes[session.name] = _Home(name, self.now, session.context - 1)

    # --- events -------------------------------------------------------------------------------------------------------

    def _push(self, when_s: float, handle: Callable[[Any], None], argument: Any) -> None:
        if when_s < math.inf:
            self._pushed += 1
            heapq.heappush(self._events, (when_s, self._pushed, handle, argument))

    def _send(self, session: LiveSession) -> None:
        """Send the next turn of a conversation, as its client."""
        if self.now > self.config.until_s:
            self._left -= 1
            return
        gateway = self._rng.randrange(len(self._views))
        view, question = self._views[gateway], self._question(session)
        tried: list[str] = []
        while True:
            choice = self._routers[gateway].choose(question, self.now, excluded=tried)
            replica = self.replicas[choice.replica]
            if replica.is_alive:
                break
            view.lost(choice.replica)  # the connection was refused
            tried.append(choice.replica)
        self._count(choice)
        replica.server.advance(self.now)
        replica.server.submit(session, self.now)
        self._look_later(replica)

    def _question(self, session: LiveSession) -> Question:
        said = session.conversation.turns[session.turn]
        home = self._homes.get(session.name)
        if home is None:
            return Question(session.name, said.prompt_tokens)
        return Question(
            session=session.name,
            new_tokens=said.prompt_tokens,
            history_tokens=home.tokens,
            home=home.replica,
            idle_s=self.now - home.used_s,
            redis_tokens=self.redis.found(session.name, self.now) if self.redis is not None else 0,
        )

    def _count(self, choice: Choice) -> None:
        self.routes[choice.route] += 1
        if choice.why:
            self.routes[f"moved: {choice.why}"] += 1
        if choice.refused:
            self.routes[f"refused: {choice.refused}"] += 1

    def _wake(self, replica: _Replica) -> None:
        """Let a server do what is due."""
        if replica.wake_s == self.now and replica.is_alive:
            replica.wake_s = math.inf
            replica.server.advance(math.nextafter(max(self.now, replica.server.now), math.inf))
            self._look_later(replica)

    def _look_later(self, replica: _Replica) -> None:
        when_s = max(self.now, replica.server.next_event_s)
        if when_s != replica.wake_s:
            replica.wake_s = when_s
            self._push(when_s, self._wake, replica)

    def _ended(self, name: str, turn: LiveTurn) -> None:
        """Note that a turn has ended at a replica, which becomes its session's home, and schedule the client's next
        turn."""
        session, done_s = turn.live, turn.record.done_s
        self._homes[session.name] = _Home(name, done_s, session.context - 1)
        if session.turn < len(session.conversation.turns):
            said = session.conversation.turns[session.turn]
            self._push(max(done_s + said.think_s, said.due_s), self._send, session)
        else:
            self._left -= 1

    def _beat(self, phase: int) -> None:
        """Send the beats of every replica whose number modulo _BEAT_PHASES is `phase` to the gateways, so that beats
        are spread over the period. A draining replica without turns leaves the fleet instead."""
        for number, replica in enumerate(self.replicas.values()):
            if number % _BEAT_PHASES == phase and replica.is_alive:
                if replica.draining and not replica.server.unfinished():
                    self._leave(replica)
                    continue
                beat = replica.beat(self.now)
                for view in self._views:
                    view.heard(replica.name, beat, self.now)
                if self.config.scaling is not None and not replica.draining:
                    self._window.add([beat.wait_s], self.now)
                    self._busy[replica.name] = 0.9 * self._busy.get(replica.name, beat.busy) + 0.1 * beat.busy
        self._push(self.now + self.config.beat_s, self._beat, phase)

    # --- replicas come and go -----------------------------------------------------------------------------------------

    def _add_replica(self, _: None) -> None:
        name = f"r{len(self.replicas)}"
        link = RedisLink(self.redis, len(self.replicas)) if self.redis is not None else None
        server = SimulatedServer(
            (), self.config.machine, self.config.server, remote=link, ended=lambda turn: self._ended(name, turn)
        )
        server.now = self.now
        replica = self.replicas[name] = _Replica(name, server, link)
        for view in self._views:
            view.heard(name, replica.beat(self.now), self.now)
        self._count_replicas()

    def _count_replicas(self) -> None:
        self.sizes.append((self.now, len(self._serving())))

    def _serving(self) -> list[_Replica]:
        return [replica for replica in self.replicas.values() if replica.is_alive and not replica.draining]

    def _leave(self, replica: _Replica) -> None:
        replica.is_alive = False
        for view in self._views:
            view.lost(replica.name)

    def _drain(self, name: str) -> None:
        self.replicas[name].draining = True
        self._count_replicas()

    def _kill(self, name: str) -> None:
        """End a replica. What it has not uploaded is lost, and its turns continue elsewhere."""
        replica = self.replicas[name]
        replica.server.advance(self.now)
        replica.is_alive = False
        self._count_replicas()
        if self.redis is not None:
            self.redis.lose(int(name.removeprefix("r")), self.now)
        for turn, said in replica.server.unfinished():
            record, session = turn.record, turn.live
            key = session.name, record.turn
            self.asked_s.setdefault(key, record.arrived_s)
            session.context = record.history_tokens
            if 0 < said < record.answer_tokens and record.first_token_s <= self.now:
                self.resumed.add(key)
                turns = list(session.conversation.turns)
                was = turns[session.turn]
                turns[session.turn] = replace(
                    was, prompt_tokens=was.prompt_tokens + said, answer_tokens=record.answer_tokens - said
                )
                session.conversation = replace(session.conversation, turns=tuple(turns))
            elif record in replica.server.records:
                replica.server.records.remove(record)  # no client has seen anything of it
            self._push(self.now, self._send, session)

    def _scale(self, limits: Limits) -> None:
        serving = self._serving()
        coming = sum(1 for _, _, handle, _ in self._events if handle == self._add_replica)
        busy = [self._busy.get(replica.name, 0.0) for replica in serving]
        signals = Signals(
            replicas=len(serving) + coming, wait_p90_s=self._window.p90_s(), busy=sum(busy) / max(1, len(busy))
        )
        wish = wanted(signals, limits)
        for _ in range(wish - len(serving) - coming):
            self._push(self.now + _START_S, self._add_replica, None)
        if wish < len(serving) and not coming:
            idlest = min(serving, key=lambda replica: self._busy.get(replica.name, 0.0))
            idlest.draining = True
            self._count_replicas()
        self._push(self.now + _SCALING_S, self._scale, limits)
