"""Finds the session of a turn in the directory, and asks the routing policy which replica serves it."""

import time
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from reprise.app.conversations.digests import digest
from reprise.app.settings.sections import ANY_NAME
from reprise.fleet.directory_redis import DirectoryUnavailable
from reprise.fleet.gateway.turn import Turn
from reprise.fleet.identify import CHARS_PER_TOKEN, runs_at
from reprise.fleet.keys import SessionName
from reprise.fleet.members import Members
from reprise.fleet.records import Heartbeat, Record
from reprise.fleet.routing import Question, Router

MAX_PINS = 1 << 16  # conversations of which a gateway remembers where it sent them last
MAX_FINGERPRINTS = 4  # models of one name, as while a fleet changes from one to the next


class Sessions(Protocol):
    """The part of `reprise.fleet.directory.Directory` used here. Both methods raise DirectoryUnavailable."""

    async def find(self, tenant: str, chains: Sequence[bytes], *, fingerprint: str) -> Record | None: ...
    async def look(self, name: SessionName, *, fingerprint: str) -> Record | None: ...


@dataclass(frozen=True, slots=True)
class Route:
    """The replica that a turn goes to and the reasons for choosing it, as words that metrics and the answer's headers
    show."""

    replica: str
    route: str  # "home", "new", "moved", "adopted" (a known session whose home has let go of it), "fallback"
    why: str  # the reason of a move: "wait", "dead", "drain", "refused", "asked"
    refused: str  # why it did not move: "guard", "budget"
    epoch: int  # the session's epoch when it was looked up; 0: no replica has it


@dataclass(slots=True)
class Found:
    """The session that a turn continues, as far as the directory knows it, and the turn's sizes by which a replica is
    chosen."""

    question: Question
    session_id: str | None  # the client's name for it, or that of the session that its messages go on with
    epoch: int
    foreign: frozenset[str]  # replicas that do not serve this model, or not this version of it
    is_known: bool  # the directory was asked and answered
    wanted: str = ""  # replica to which an operator has moved it


class Finder:
    """A router of turns. One per gateway, on its event loop.

    Without the directory a turn goes where this gateway sent the conversation last, else to the replica that every
    gateway finds by hashing. A wrong route costs a load, never an answer.
    """

    def __init__(
        self,
        *,
        directory: Sessions,
        members: Members,
        router: Router,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._members = members
        self._router = router
        self._clock = clock
        self._pins: OrderedDict[str, str] = OrderedDict()  # conversation -> replica
        self._foreign: dict[tuple[str, str], frozenset[str]] = {}  # (model, fingerprint) -> who does not serve it
        self._foreign_of_s = 0.0  # the table of members that it was made of

    async def find(self, turn: Turn) -> Found:
        """Find the session of a turn. Never fails. If the directory does not answer, or has no record of the session,
        the length of the history is estimated from the request's text, and the home is the replica to which this
        gateway sent the conversation last."""
        fingerprints = self._fingerprints(turn.model)
        record, fingerprint, is_known = None, "", True
        try:
            for fingerprint in fingerprints:
                record = await self._look(turn, fingerprint)
                if record is not None:
                    break
        except DirectoryUnavailable:
            is_known = False
        pinned = self._pins.get(_pin(turn))
        home, talk = pinned, turn.conversation
        history_tokens = talk.history_chars // CHARS_PER_TOKEN
        idle_s, redis_tokens, epoch, wanted, session_id = 0.0, 0, 0, "", turn.session_id
        if record is not None:
            session_id = record.session_id
            home = record.home or None
            history_tokens, idle_s, redis_tokens = record.tokens, record.idle_s, record.redis_tokens
            epoch, wanted = record.epoch, record.wanted
        question = Question(
            session=_pin(turn),
            new_tokens=max(1, talk.new_chars // CHARS_PER_TOKEN),
            history_tokens=history_tokens,
            home=home,
            idle_s=idle_s,
            redis_tokens=redis_tokens,
        )
        foreign = self._others(turn.model, fingerprint if record is not None else "")
        return Found(question, session_id, epoch, foreign, is_known, wanted)

    def choose(self, turn: Turn, found: Found, *, tried: set[str]) -> Route:
        """Choose the replica for a turn. found: what `find` has returned for it. tried: the replicas that have failed
        it. Raises NoReplica."""
        now = self._clock()
        excluded: Container[str] = tried | found.foreign
        wanted, question = found.wanted, found.question
        if wanted and wanted not in excluded and self._router.view.is_open(wanted, now):
            route = Route(wanted, "home" if wanted == question.home else "moved", "asked", "", found.epoch)
        elif found.is_known or question.home is not None:
            choice = self._router.choose(question, now, excluded=excluded)
            is_adopted = choice.route == "new" and found.epoch > 0
            route = Route(
                choice.replica, "adopted" if is_adopted else choice.route, choice.why, choice.refused, found.epoch
            )
        else:
            choice = self._router.fall_back(question.session, now, excluded=excluded)
            route = Route(choice.replica, choice.route, "", "", 0)
        self._keep_pin(turn, route.replica)
        return route

    def any_replica(self, key: str, *, tried: Container[str] = ()) -> str:
        """Return a replica for a request that any replica can answer, chosen by a hash of `key`: the same key gives the
        same replica as long as that one takes turns. tried: replicas to leave out. Raises NoReplica."""
        return self._router.fall_back(key, self._clock(), excluded=tried).replica

    async def home_of(self, tenant: str, session_id: str) -> str | None:
        """Return the home of a session without a salt, which is the replica that claimed it last. None if it is not
        known or takes no turns."""
        try:
            for fingerprint in self._fingerprints(""):
                record = await self._directory.look(SessionName(tenant, session_id), fingerprint=fingerprint)
                if record is not None and self._router.view.is_open(record.home, self._clock()):
                    return record.home
        except DirectoryUnavailable:
            pass
        home = self._pins.get(_name_of(tenant, "", session_id))
        return home if home is not None and self._router.view.is_open(home, self._clock()) else None

    def cannot_serve(self, model: str) -> frozenset[str]:
        """Return the replicas that serve only other models than `model`. If no replica serves `model`, return none: any
        of them may then answer that there is no such model."""
        return self._others(model, "")

    def runs_at(self, response_id: str) -> str | None:
        """Return the replica at which a response runs in the background, read from the response's id; None if the id
        names no replica of the fleet."""
        return runs_at(response_id, self._members.beats)

    async def _look(self, turn: Turn, fingerprint: str) -> Record | None:
        if turn.session_id is None:
            return await self._directory.find(turn.tenant, turn.conversation.answers, fingerprint=fingerprint)
        name = SessionName(turn.tenant, turn.session_id, turn.salt)
        return await self._directory.look(name, fingerprint=fingerprint)

    def _fingerprints(self, model: str) -> list[str]:
        """Return the fingerprints of the models that a name may mean; all if no replica serves that name, so that a
        replica refuses."""
        beats = self._members.beats
        named = [beats[name] for name in _serving(model, beats) if beats[name].fingerprint]
        found = dict.fromkeys(beat.fingerprint for beat in named or beats.values() if beat.fingerprint)
        return list(found)[:MAX_FINGERPRINTS]

    def _others(self, model: str, fingerprint: str) -> frozenset[str]:
        """Return the replicas that cannot serve this model with this fingerprint; none if no replica serves it."""
        if self._foreign_of_s != self._members.refreshed_s:
            self._foreign.clear()
            self._foreign_of_s = self._members.refreshed_s
        key = (model, fingerprint)
        if key not in self._foreign:
            beats = self._members.beats
            serving = {name for name in _serving(model, beats) if fingerprint in ("", beats[name].fingerprint)}
            foreign = frozenset(beats.keys() - serving) if serving else frozenset()
            if not any(_has_name(beats[name], model) for name in serving):
                return foreign  # not kept: clients may ask for any number of names
            self._foreign[key] = foreign
        return self._foreign[key]

    def _keep_pin(self, turn: Turn, replica: str) -> None:
        key = _pin(turn)
        self._pins[key] = replica
        self._pins.move_to_end(key)
        if len(self._pins) > MAX_PINS:
            self._pins.popitem(last=False)


def _has_name(beat: Heartbeat, model: str) -> bool:
    return beat.model == model or model in beat.aliases


def _serving(model: str, beats: Mapping[str, Heartbeat]) -> list[str]:
    """Return the replicas that serve a model: those that have its name, else those whose model takes any name. model:
    "" where a request names none, which is the name of no model."""
    named = [name for name, beat in beats.items() if _has_name(beat, model)]
    return named or [name for name, beat in beats.items() if model and ANY_NAME in beat.aliases]


def _pin(turn: Turn) -> str:
    """Return a name for a turn's conversation that is the same for all its turns, on every gateway. While the directory
    does not answer, it decides the replica."""
    given = turn.session_id
    return _name_of(turn.tenant, turn.salt, turn.conversation.opening if given is None else given)


def _name_of(tenant: str, salt: str, conversation: str | bytes) -> str:
    """Return a digest of tenant, salt and conversation. It has a constant length; clients may name their conversations
    with megabytes."""
    return digest("pin", tenant, salt, conversation).hex()
