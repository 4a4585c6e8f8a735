"""Defines the server of simulated fleets, and puts conversations under way before a simulation begins."""

import math
from collections.abc import Sequence
from dataclasses import replace

from reprise.loadgen.sim.machine import Config, Machine
from reprise.loadgen.sim.simulated_server import SimulatedServer
from reprise.loadgen.sim.turn import LiveSession, LiveTurn
from reprise.loadgen.workloads.workload import Conversation

LINK_BYTES_PER_S = 3e9  # 25 Gbit/s Ethernet of every replica
SERVER = Config(scheduler="due", load_ahead=4, starts_past_loads=True, recompute_if_faster=True, chunk_tokens=2048)


def already_under_way(
    drawn: Sequence[Conversation], machine: Machine, *, since_s: float
) -> tuple[list[Conversation], dict[str, int]]:
    """Return (conversations, histories) of a workload that is already running: the drawn conversations as they would be
    after `since_s` seconds, a moment that becomes time 0. Those that have ended by then are left out, and the running
    ones keep only the turns that remain. histories: session id -> tokens of history that a running conversation has at
    time 0. If `since_s` is at least as long as the longest conversation, as many conversations end as begin."""
    found: list[Conversation] = []
    histories: dict[str, int] = {}
    for one in drawn:
        asked_s = [one.start_s + at_s - since_s for at_s in _asked_s(one, machine)]
        done = sum(at_s < 0 for at_s in asked_s)
        if done == len(one.turns):
            continue
        rest = (replace(one.turns[done], think_s=0.0), *one.turns[done + 1 :])
        found.append(replace(one, start_s=asked_s[done], turns=rest))
        if done:
            histories[one.session_id] = sum(turn.prompt_tokens + turn.answer_tokens for turn in one.turns[:done])
    return found, histories


def lifetime_s(conversation: Conversation, machine: Machine) -> float:
    """Return an estimate of the seconds from a conversation's first prompt to its last."""
    return _asked_s(conversation, machine)[-1]


def _asked_s(conversation: Conversation, machine: Machine) -> list[float]:
    """Return estimates of when a conversation's prompts come, in seconds after the first. Assumes that no turn waits,
    and that a step takes twice as long as for one sequence of a short context."""
    found: list[float] = []
    at_s = 0.0
    for turn in conversation.turns:
        at_s += turn.think_s if found else 0.0
        found.append(at_s)
        at_s += 2 * machine.costs.decode_s(1, 1, 0) * turn.answer_tokens
    return found


def sessions_per_s(machine: Machine, config: Config, drawn: Sequence[Conversation]) -> float:
    """Measure how many conversations one replica finishes in a second while its batch is always full. Twice as many as
    fit are under way, there is no think time, and when one has ended the next begins. The first third of `drawn` is not
    counted, because in that time all conversations are in their first turns. Raises ValueError if `drawn` is too
    short."""
    if len(drawn) < 6 * machine.max_seqs:
        raise ValueError(f"{len(drawn)} conversations are too few to fill {machine.max_seqs} places for long")
    waiting, ends_s = list(reversed(drawn)), list[float]()

    def begin() -> None:
        if waiting:
            server.submit(LiveSession(replace(waiting.pop(), start_s=server.now)), server.now)

    def ended(turn: LiveTurn) -> None:
        if turn.live.turn < len(turn.live.conversation.turns):
            server.submit(turn.live, server.now)
        else:
            ends_s.append(server.now)
            begin()

    server = SimulatedServer((), machine, config, ended=ended)
    for _ in range(2 * machine.max_seqs):
        begin()
    while waiting:
        server.advance(math.nextafter(server.now, math.inf))
    return (len(ends_s) - len(drawn) // 3) / (server.now - ends_s[len(drawn) // 3])
