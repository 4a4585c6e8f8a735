"""Implements other ways to choose a replica, for comparison with `reprise.fleet.routing.Router`."""

import math
import random
from collections.abc import Callable, Container
from typing import Protocol

from reprise.fleet.routing import Choice, Cost, FleetView, NoReplica, Question, Router, rendezvous


class Policy(Protocol):
    """A routing policy, as a simulated gateway uses it."""

    def choose(self, question: Question, now: float, *, excluded: Container[str] = ()) -> Choice: ...


class Hashing:
    """A policy of consistent hashing by session, as of a balancer that knows neither load nor KV."""

    def __init__(self, view: FleetView) -> None:
        self._view = view
        self._chosen: dict[str, str] = {}  # the choices among the names in `_among`
        self._among: list[str] = []

    def choose(self, question: Question, now: float, *, excluded: Container[str] = ()) -> Choice:
        if self._among != self._view.names:
            self._among, self._chosen = list(self._view.names), {}
        name = self._chosen.get(question.session)
        if name is None or name in excluded or not self._view.is_open(name, now):
            names = [name for name in self._among if self._view.is_open(name, now) and name not in excluded]
            if not names:
                raise NoReplica
            name = self._chosen[question.session] = rendezvous(question.session, names)
        return Choice(name, "home" if name == question.home else "moved" if question.home else "new")


class RoundRobin:
    """A policy that sends every turn to the next replica."""

    def __init__(self, view: FleetView) -> None:
        self._view = view
        self._turn = 0

    def choose(self, question: Question, now: float, *, excluded: Container[str] = ()) -> Choice:
        names = self._view.names
        for _ in range(len(names)):
            self._turn += 1
            name = names[self._turn % len(names)]
            if name not in excluded and self._view.is_open(name, now):
                return Choice(name, "home" if name == question.home else "moved" if question.home else "new")
        raise NoReplica


class Sticky(Router):
    """A policy that never moves a session away from its home (the replica that last served it) while that takes turns
    at all."""

    def home_or_other(
        self, question: Question, home: str, at_home: Cost, now: float, excluded: Container[str]
    ) -> Choice:
        return self.assigned(Choice(home, "home", cost_s=at_home.total_s), at_home, now)


class Cheapest(Router):
    """A policy that takes the replica with the earliest predicted first token, of a session's home and two others. The
    work that a move adds to the fleet does not count."""

    def home_or_other(
        self, question: Question, home: str, at_home: Cost, now: float, excluded: Container[str]
    ) -> Choice:
        found = self.cheapest_drawn(question, now, excluded, home)
        if found is not None and found[1].total_s < at_home.total_s - 0.05:
            return self.assigned(Choice(found[0], "moved", "wait", cost_s=found[1].total_s), found[1], now)
        return self.assigned(Choice(home, "home", cost_s=at_home.total_s), at_home, now)


class FourLooks(Router):
    """A Router that compares a session's home with four replicas drawn at random, instead of two."""

    looks = 4


class CheapMoves(Router):
    """A Router for which a move must save as many seconds of waiting as the seconds of work that it adds, not four
    times as many."""

    price = 1.0


class EagerMoves(FourLooks, CheapMoves):
    """A Router that considers four other replicas whenever a turn would wait at all, and for which a move must save no
    more than the work that it adds."""

    def hardly_waits(self, at_home: Cost) -> bool:
        return at_home.wait_s <= 0.05


class Clairvoyant:
    """A policy that takes the replica with the earliest first token of all, by what replicas really store and have to
    do. exact: called with a replica's name, the question and the time, returns the seconds to the first token there."""

    def __init__(self, view: FleetView, exact: Callable[[str, Question, float], float]) -> None:
        self._view = view
        self._exact = exact

    def choose(self, question: Question, now: float, *, excluded: Container[str] = ()) -> Choice:
        best, least_s = "", math.inf
        for name in self._view.names:
            if name not in excluded and self._view.is_open(name, now):
                cost_s = self._exact(name, question, now)
                if cost_s < least_s:
                    best, least_s = name, cost_s
        if not best:
            raise NoReplica
        return Choice(best, "home" if best == question.home else "moved" if question.home else "new", cost_s=least_s)


def make_policy(
    name: str, view: FleetView, rng: random.Random, exact: Callable[[str, Question, float], float]
) -> Policy:
    """Return a policy by its name in `POLICIES`. Raises KeyError."""
    makers: dict[str, Callable[[], Policy]] = {
        "round-robin": lambda: RoundRobin(view),
        "hash": lambda: Hashing(view),
        "sticky": lambda: Sticky(view=view, rng=rng),
        "cheapest": lambda: Cheapest(view=view, rng=rng),
        "guarded": lambda: Router(view=view, rng=rng),
        "four-looks": lambda: FourLooks(view=view, rng=rng),
        "cheap-moves": lambda: CheapMoves(view=view, rng=rng),
        "eager-moves": lambda: EagerMoves(view=view, rng=rng),
        "clairvoyant": lambda: Clairvoyant(view, exact),
    }
    return makers[name]()


VARIANTS = ("four-looks", "cheap-moves", "eager-moves")  # variants of "guarded"
POLICIES = ("round-robin", "hash", "sticky", "cheapest", "guarded", *VARIANTS, "clairvoyant")
