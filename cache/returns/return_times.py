"""Which sessions are worth their space until they come back, as far as their past tells."""

from collections.abc import Callable, Hashable, Sequence
from math import exp, inf, log, log2, nextafter

from cache.returns.ranking import Ranking
from cache.returns.survival import NUM_BINS, ReturnModel, bin_end_s, features

_SHORTEST_GAP_S = 0.01  # what comes sooner is a parallel branch of the same turn, not a return
_OWN_WEIGHT = 0.3  # of the newest gap in a session's own mean, and of whether it was punctual
_COMMON_WEIGHT = 0.05  # of whether the newest return of any session was punctual
PUNCTUAL = 0.25  # of the gap: so far off is still punctual
_GIVEN_UP = 4.0  # gaps after which a session is not merely late with all others
# Ages, in gaps, at which the nearness of a punctual return is reconsidered.
_CHECKS = (0.5, 1 - PUNCTUAL, 1 + PUNCTUAL)
_STEPS = 4  # by which values are told apart, per doubling: estimates are no better
_NEVER = -inf
_AT_ONCE = 8  # sessions reconsidered per event: the rest waits, in order, for the next ones


class _Rhythm:
    """How regularly a session comes, by one clock."""

    __slots__ = ("gap", "punctual")

    def __init__(self) -> None:
        self.gap: float | None = None  # between turns, in the mean
        self.punctual = 0.0  # the share of gaps near that mean

    def learn(self, gap: float, usual: float) -> bool | None:
        """usual: the share that is punctual among all. Whether this gap was; None: it could not be foretold."""
        if self.gap is None:
            self.gap, self.punctual = gap, usual
            return None
        was_punctual = abs(gap - self.gap) <= PUNCTUAL * self.gap
        self.punctual += _OWN_WEIGHT * (was_punctual - self.punctual)
        self.gap = exp(log(self.gap) + _OWN_WEIGHT * (log(gap) - log(self.gap)))
        return was_punctual


class SessionReturn:
    """What is known of the return of one session. Changed by `ReturnTimes` alone."""

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
        self.order = order  # of the last use among all; unique
        self.value = 0.0  # expected hits per second of space
        self.used_s: float | None = None
        self.used_turn = 0  # the number of that turn among all sessions'
        self.by_time, self.by_turns = _Rhythm(), _Rhythm()  # in seconds, and in turns of all sessions
        self.last_gap_s: float | None = None
        self.turn = -1
        self.prompt: int | None = None  # tokens of the last turn's
        self.grown: int | None = None  # what it had more than there was
        self.tokens: int | None = None  # of the context
        self.features: tuple[int, ...] = ()
        self.age_bin = 0
        self.due: tuple[float, int, SessionReturn] | None = None  # when it is reconsidered
        self.rank: tuple[float, float, int] = (_NEVER, _NEVER, order)
        """Ascending: what is worth least first; among what is worth about the same, who is expected last, then the
        oldest use."""

    def put_in_rank(self) -> bool:
        """By what is known of it now. Whether the rank is another one."""
        before, expected_s = self.rank, _NEVER
        if self.used_s is not None and self.by_time.gap is not None:
            expected_s = -(self.used_s + self.by_time.gap)
        self.rank = (_steps(self.value), expected_s, self.order)
        return self.rank != before


class ReturnTimes:
    """Ranks sessions by what a second of their space is worth, the better of two guesses. One looks at everybody
    (`survival.ReturnModel`, learned here as sessions come and do not come). The other at the session alone: programs
    come as regularly as they did, so a return one gap after the last use, with the chance that it was punctual before,
    is worth that chance, squared, / the time until then. Gaps are averaged as logarithms: they spread over orders of
    magnitude. They are counted in seconds, as programs keep time, and in turns of all sessions, for whoever takes turns
    with others comes in order, however slow the machine is just now: whichever clock promises more is believed.

    A rank is as of the last turn, of the end of its answer, or of the last bin of age that the session entered, which
    is logarithmically often. Before anything is learned all turns are equal and the oldest use ranks first; who was
    never used is worth nothing.

    An event costs logarithmic time, however many sessions are due together: at most so many are reconsidered with each,
    and who is left keeps the rank that it had.

    One for all tiers of a hierarchy: their policies `listen`, and are told whose rank has changed.
    """

    def __init__(self) -> None:
        self._model = ReturnModel()
        self._now_s = -inf
        self._uses = 0
        self._turns = 0  # of all sessions
        self._punctual = {"by_time": 0.5, "by_turns": 0.5}  # of all returns whose gap could be foretold
        self._due: Ranking[tuple[float, int, SessionReturn]] = Ranking()
        self._sessions: dict[Hashable, SessionReturn] = {}
        self._listeners: list[Callable[[Sequence[SessionReturn]], None]] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def listen(self, heard: Callable[[Sequence[SessionReturn]], None]) -> None:
        """`heard` is called with the sessions whose rank has changed, within `used`, `answered` and `advance`."""
        self._listeners.append(heard)

    def of(self, name: Hashable) -> SessionReturn:
        """What is known of a session; if it was never heard of, from now on."""
        session = self._sessions.get(name)
        if session is None:
            self._uses += 1
            session = self._sessions[name] = SessionReturn(name, self._uses)
        return session

    def rank(self, name: Hashable) -> tuple[float, float, int]:
        """Of a session; that of a newcomer if it was never heard of."""
        session = self._sessions.get(name)
        return self.newcomer_rank() if session is None else session.rank

    def forget(self, name: Hashable) -> None:
        """Forgives a session never heard of."""
        session = self._sessions.pop(name, None)
        if session is not None:
            self._schedule(session, None)

    def used(self, name: Hashable, now: float, prompt_tokens: int | None = None) -> None:
        """A turn of the session arrived with a prompt of so many tokens (None: not known). Called once a turn: the gaps
        between calls tell when the next one comes."""
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
        """The turn is over, and the session's context has so many tokens. Forgives a session never heard of."""
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
        """Time has passed."""
        self._tell(self._advance(now))

    def _tell(self, changed: Sequence[SessionReturn]) -> None:
        if changed:
            for heard in self._listeners:
                heard(changed)

    def _advance(self, now: float) -> list[SessionReturn]:
        """Returns the sessions whose rank has changed because they did not come."""
        self._now_s = max(self._now_s, now)
        changed: list[SessionReturn] = []
        for _ in range(_AT_ONCE):
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
        """The rank of a session never heard of, if it came now."""
        first = features(turn=0, prompt_tokens=None, grown_tokens=None, answer_tokens=None)
        return (_steps(self._model.value(first, None, 0)), _NEVER, self._uses + 1)

    def _pass_bin(self, session: SessionReturn) -> None:
        self._model.learn(session.features, session.last_gap_s, session.age_bin, False)
        session.age_bin += 1

    def _learn_return(self, session: SessionReturn, gap_s: float) -> None:
        while session.age_bin < NUM_BINS and bin_end_s(session.age_bin) <= gap_s:  # in case it is reconsidered late
            self._pass_bin(session)
        if session.age_bin < NUM_BINS:
            self._model.learn(session.features, session.last_gap_s, session.age_bin, True)

    def _learn_gap(self, clock: str, rhythm: _Rhythm, gap: float) -> None:
        was_punctual = rhythm.learn(gap, self._punctual[clock])
        if was_punctual is not None:
            self._punctual[clock] += _COMMON_WEIGHT * (was_punctual - self._punctual[clock])

    def _value(self, session: SessionReturn) -> bool:
        """As of now, and when to look again. Whether its rank has changed."""
        assert session.used_s is not None
        session.value, again_s = 0.0, inf
        if session.age_bin < NUM_BINS:
            session.value = self._model.value(session.features, session.last_gap_s, session.age_bin)
            again_s = session.used_s + bin_end_s(session.age_bin)
        if (gap_s := session.by_time.gap) is not None and (gap_turns := session.by_turns.gap) is not None:
            age_s = (self._now_s - session.used_s) / gap_s
            ages = [(session.by_time, age_s)]
            if age_s < _GIVEN_UP:  # while nobody comes at all, turns do not pass
                ages.append((session.by_turns, (self._turns - session.used_turn) / gap_turns))
                again_s = min(again_s, session.used_s + _GIVEN_UP * gap_s)
            for rhythm, age in ages:
                if age < _CHECKS[-1]:
                    # Squared: the better of two guesses is the one that is too high, and one gap in five of people's is
                    # as long as those before it by chance.
                    sure = rhythm.punctual * rhythm.punctual
                    session.value = max(session.value, sure / (gap_s * max(1 - age, PUNCTUAL)))
                    check = next(check for check in _CHECKS if check > age)
                    again_s = min(again_s, self._now_s + (check - age) * gap_s)
        # Far from zero a short wait may be lost to rounding; the clock must get past it all the same.
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
    """Of a block that sessions of these ranks, ascending, may come for: their values add up, and ties are broken as for
    the best of them. Not below the rank of any."""
    if len(ranks) == 1:
        return ranks[0]
    return (_steps(sum([2.0 ** (rank[0] / _STEPS) for rank in ranks])), *ranks[-1][1:])


def _steps(value: float) -> float:
    return round(_STEPS * log2(value)) if value else _NEVER
