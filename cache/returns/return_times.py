"""Ranks sessions by how much it is worth to keep them until they return, judged by their past."""

from collections.abc import Callable, Hashable, Sequence
from math import exp, inf, log, log2, nextafter

from reprise.cache.returns.ranking import Ranking
from reprise.cache.returns.survival import NUM_BINS, ReturnModel, bin_end_s, features

_SHORTEST_GAP_S = 0.01  # a turn that comes sooner is a parallel branch, not a return
_OWN_WEIGHT = 0.3  # weight of the newest gap in a session's means: of its gaps, and of its punctuality
_COMMON_WEIGHT = 0.05  # weight of the newest return in the punctuality of all sessions
PUNCTUAL = 0.25  # share of the gap by which a punctual return may be off
_GIVEN_UP_GAPS = 4.0  # gaps after which a session is not merely late with all others
# Ages, in gaps, at which the nearness of a punctual return is reconsidered.
_CHECKED_GAPS = (0.5, 1 - PUNCTUAL, 1 + PUNCTUAL)
_STEPS_PER_DOUBLING = 4  # steps per doubling by which values are told apart: estimates are no better
_NEVER = -inf
_SESSIONS_AT_ONCE = 8  # most sessions reconsidered per event: the others wait, in order, for later events


class _Rhythm:
    """A record of how regular a session's turns are: the mean gap between them, and how many gaps were punctual, that
    is close to that mean."""

    __slots__ = ("gap", "punctual")

    def __init__(self) -> None:
        self.gap: float | None = None  # mean gap between its turns
        self.punctual = 0.0  # share of gaps close to that mean

    def learn(self, gap: float, usual: float) -> bool | None:
        """Learn a gap between two turns. usual: the share of punctual gaps among all sessions. Returns whether this gap
        was punctual; None for the first gap."""
        if self.gap is None:
            self.gap, self.punctual = gap, usual
            return None
        was_punctual = abs(gap - self.gap) <= PUNCTUAL * self.gap
        self.punctual += _OWN_WEIGHT * (was_punctual - self.punctual)
        self.gap = exp(log(self.gap) + _OWN_WEIGHT * (log(gap) - log(self.gap)))
        return was_punctual


class SessionReturn:
    """The facts by which it is guessed when one session returns, and its rank by them. Only `ReturnTimes` changes
    it."""

    __slots__ = (
        *(
            "age_bin",
            "by_time",
            "by_turns",
            "due",
            "features",
            "grown",
            "last_gap_s",
            "name",
            "order",
            "prompt",
            "tokens",
            "turn",
        ),
        *("rank", "used_s", "used_turn", "value"),
    )

    def __init__(self, name: Hashable, order: int) -> None:
        self.name = name
        self.order = order  # number of the last use among all sessions' uses; unique
        self.value = 0.0  # expected hits per second of space
        self.used_s: float | None = None
        self.used_turn = 0  # number of that turn among all sessions' turns
        self.by_time, self.by_turns = _Rhythm(), _Rhythm()  # measured in seconds, and in turns of all sessions
        self.last_gap_s: float | None = None
        self.turn = -1
        self.prompt: int | None = None  # tokens of the last turn's prompt
        self.grown: int | None = None  # tokens by which that prompt exceeded the context before it
        self.tokens: int | None = None  # tokens of the context
        self.features: tuple[int, ...] = ()
        self.age_bin = 0
        self.due: tuple[float, int, SessionReturn] | None = None  # its entry in the list of sessions to reconsider
        self.rank: tuple[float, float, int] = (_NEVER, _NEVER, order)
        """A sort key, ascending by worth; sessions of about the same worth sort by expected return, latest first; then
        by last use, oldest first."""

    def put_in_rank(self) -> bool:
        """Update `rank` from the session's worth, its last use and its usual gap. Returns whether it has changed."""
        before, expected_s = self.rank, _NEVER
        if self.used_s is not None and self.by_time.gap is not None:
            expected_s = -(self.used_s + self.by_time.gap)
        self.rank = (_steps(self.value), expected_s, self.order)
        return self.rank != before


class ReturnTimes:
    """A ranking of sessions by the expected hits per second that their space is held, estimated as the better of two
    guesses.

    The first guess looks at all sessions (`survival.ReturnModel`, trained here on which sessions return and which do
    not). The second looks at the session alone, because programs keep their intervals: a return is expected one gap
    after the last use, and if a share p of earlier returns was punctual, the guess is p squared / (the time until
    then). Gaps are averaged as logarithms, since they spread over orders of magnitude. They are measured by two clocks,
    and the clock with the higher guess is used: seconds, which programs keep to, and turns of all sessions, because
    sessions that take turns return in order, however slow the machine is.

    A rank is computed at each turn, at the end of its answer, and whenever the session enters a new bin of age (time
    since its last use), whose widths grow about logarithmically. Before anything is learned, all turns are worth the
    same and the oldest use ranks first. A session that was never used is worth nothing.

    An event costs logarithmic time, however many sessions enter a new bin at once: at most `_SESSIONS_AT_ONCE` of them
    are reconsidered with each event, and the others keep their rank until later.

    All tiers of a hierarchy share one object: their policies `listen` and are told whose rank has changed.
    """

    def __init__(self) -> None:
        self._model = ReturnModel()
        self._now_s = -inf
        self._uses = 0
        self._turns = 0  # turns of all sessions
        self._punctual = {"by_time": 0.5, "by_turns": 0.5}  # shares of all returns whose gap could be predicted
        self._due: Ranking[tuple[float, int, SessionReturn]] = Ranking()
        self._sessions: dict[Hashable, SessionReturn] = {}
        self._listeners: list[Callable[[Sequence[SessionReturn]], None]] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def listen(self, heard: Callable[[Sequence[SessionReturn]], None]) -> None:
        """Register `heard`, which is called with the sessions whose rank has changed, from within `used`, `answered`
        and `advance`."""
        self._listeners.append(heard)

    def of(self, name: Hashable) -> SessionReturn:
        """Return the record of a session, making one if the session is new."""
        session = self._sessions.get(name)
        if session is None:
            self._uses += 1
            session = self._sessions[name] = SessionReturn(name, self._uses)
        return session

    def gap_s(self, name: Hashable) -> float | None:
        """Return the mean seconds between a session's turns; None if that is not known."""
        session = self._sessions.get(name)
        return None if session is None else session.by_time.gap

    def rank(self, name: Hashable) -> tuple[float, float, int]:
        """Return a session's rank, ascending by worth: (logarithm of its worth, minus its expected return in seconds,
        order of last use). An unknown session has the rank of a new one."""
        session = self._sessions.get(name)
        return self.newcomer_rank() if session is None else session.rank

    def forget(self, name: Hashable) -> None:
        """Drop a session. An unknown one is ignored."""
        session = self._sessions.pop(name, None)
        if session is not None:
            self._schedule(session, None)

    def used(self, name: Hashable, now: float, prompt_tokens: int | None = None) -> None:
        """Record that a turn of the session has arrived, with a prompt of `prompt_tokens` (None: unknown). Must be
        called once per turn, because the gaps between calls predict the next turn."""
        session = self.of(name)
        changed = self._advance(now)
        now = self._now_s
        gap_s = None if session.used_s is None else now - session.used_s
        if gap_s is None or gap_s >= _SHORTEST_GAP_S:
            self._turns += 1
            if gap_s is not None:
                self._learn_return(session, gap_s)
                session.last_gap_s = gap_s
                self._learn_gap("by_time", session.by_time, gap_s)
                self._learn_gap("by_turns", session.by_turns, self._turns - session.used_turn)
            session.turn += 1
            session.used_s, session.used_turn = now, self._turns
            session.grown = None
            if prompt_tokens is not None:
                if session.tokens is not None:
                    session.grown = prompt_tokens - session.tokens
                session.prompt = session.tokens = prompt_tokens
        self._uses += 1
        self._schedule(session, None)
        session.order = self._uses
        session.age_bin = 0
        session.features = features(
            turn=session.turn, prompt_tokens=session.prompt, grown_tokens=session.grown, answer_tokens=None
        )
        if self._value(session):
            changed.append(session)
        self._tell(changed)

    def answered(self, name: Hashable, now: float, num_tokens: int) -> None:
        """Record that the turn has ended and the session's context has `num_tokens` tokens. Ignores an unknown
        session."""
        session = self._sessions.get(name)
        if session is None:
            return
        changed = self._advance(now)
        answer = None if session.prompt is None else max(0, num_tokens - session.prompt)
        session.tokens = num_tokens
        if session.used_s is not None:
            session.features = features(
                turn=session.turn, prompt_tokens=session.prompt, grown_tokens=session.grown, answer_tokens=answer
            )
            if self._value(session):
                changed.append(session)
        self._tell(changed)

    def advance(self, now: float) -> None:
        """Set the time to `now`. Sessions that have not returned by then may change their rank."""
        self._tell(self._advance(now))

    def _tell(self, changed: Sequence[SessionReturn]) -> None:
        if changed:
            for heard in self._listeners:
                heard(changed)

    def _advance(self, now: float) -> list[SessionReturn]:
        """Advance the clock to `now`. Returns the sessions whose rank has changed because they have not returned."""
        self._now_s = max(self._now_s, now)
        changed: list[SessionReturn] = []
        for _ in range(_SESSIONS_AT_ONCE):
            due = self._due.first
            if due is None or due[0] > self._now_s:
                break
            session = due[2]
            assert session.used_s is not None
            if due[0] >= session.used_s + bin_end_s(session.age_bin):
                self._pass_bin(session)
            if self._value(session):
                changed.append(session)
        return changed

    def newcomer_rank(self) -> tuple[float, float, int]:
        """Return the rank that a new session would have if it came now, ascending by worth: (logarithm of its worth,
        -inf because the time of its return is unknown, order of last use)."""
        first = features(turn=0, prompt_tokens=None, grown_tokens=None, answer_tokens=None)
        return (_steps(self._model.value(first, None, 0)), _NEVER, self._uses + 1)

    def _pass_bin(self, session: SessionReturn) -> None:
        self._model.learn(session.features, session.last_gap_s, session.age_bin, False)
        session.age_bin += 1

    def _learn_return(self, session: SessionReturn, gap_s: float) -> None:
        # in case the session was reconsidered late
        while session.age_bin < NUM_BINS and bin_end_s(session.age_bin) <= gap_s:
            self._pass_bin(session)
        if session.age_bin < NUM_BINS:
            self._model.learn(session.features, session.last_gap_s, session.age_bin, True)

    def _learn_gap(self, clock: str, rhythm: _Rhythm, gap: float) -> None:
        was_punctual = rhythm.learn(gap, self._punctual[clock])
        if was_punctual is not None:
            self._punctual[clock] += _COMMON_WEIGHT * (was_punctual - self._punctual[clock])

    def _value(self, session: SessionReturn) -> bool:
        """Compute the session's worth at the current time, and schedule the next reconsideration. Returns whether its
        rank has changed."""
        assert session.used_s is not None
        session.value, again_s = 0.0, inf
        if session.age_bin < NUM_BINS:
            session.value = self._model.value(session.features, session.last_gap_s, session.age_bin)
            again_s = session.used_s + bin_end_s(session.age_bin)
        if (gap_s := session.by_time.gap) is not None and (gap_turns := session.by_turns.gap) is not None:
            age_s = (self._now_s - session.used_s) / gap_s
            ages = [(session.by_time, age_s)]
            if (
                age_s < _GIVEN_UP_GAPS
            ):  # after that, the count of turns says nothing: it stands still while no session comes
                ages.append((session.by_turns, (self._turns - session.used_turn) / gap_turns))
                again_s = min(again_s, session.used_s + _GIVEN_UP_GAPS * gap_s)
            for rhythm, age in ages:
                if age < _CHECKED_GAPS[-1]:
                    # Squared, because the better of two guesses is biased upwards, and by chance one in five of
                    # people's gaps is as long as the gaps before it.
                    sure = rhythm.punctual * rhythm.punctual
                    session.value = max(session.value, sure / (gap_s * max(1 - age, PUNCTUAL)))
                    check = next(check for check in _CHECKED_GAPS if check > age)
                    again_s = min(again_s, self._now_s + (check - age) * gap_s)
        # Far from zero, rounding may swallow a short wait; the clock must get past it nevertheless.
        self._schedule(session, None if again_s == inf else max(again_s, nextafter(self._now_s, inf)))
        return session.put_in_rank()

    def _schedule(self, session: SessionReturn, when_s: float | None) -> None:
        if session.due is not None:
            if when_s == session.due[0]:
                return
            self._due.remove(session.due)
        session.due = None if when_s is None else (when_s, session.order, session)
        if session.due is not None:
            self._due.add(session.due)


def shared_rank(ranks: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the rank of a block that several sessions own. ranks: those of the sessions, ascending; the first number
    of each is the logarithm of the session's worth. The block's worth is the sum of the sessions'. The other numbers,
    which break ties, are those of the highest rank. The result is never below any of `ranks`."""
    if len(ranks) == 1:
        return ranks[0]
    return (_steps(sum([2.0 ** (rank[0] / _STEPS_PER_DOUBLING) for rank in ranks])), *ranks[-1][1:])


def _steps(value: float) -> float:
    return round(_STEPS_PER_DOUBLING * log2(value)) if value else _NEVER
