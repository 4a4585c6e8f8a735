"""Defines the machine and the conversations of simulated fleets: every number stands here once."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from reprise.loadgen.sim import presets
from reprise.loadgen.sim.machine import Config, Machine
from reprise.loadgen.sim.presets import DeployedModel
from reprise.loadgen.sim.simulated_server import SimulatedServer
from reprise.loadgen.sim.turn import LiveSession, LiveTurn
from reprise.loadgen.workloads.workload import Conversation, Turn

_MODEL = DeployedModel(  # a Llama of 8B, bf16, on one A100 of 80 GB
    parameters=8.0e9, num_layers=32, hidden_size=4096, kv_bytes_per_token=131_072.0, window=131_072, gpus=1, max_seqs=64
)
LINK_BYTES_PER_S = 3e9  # 25 Gbit/s Ethernet of every replica
REPLICA = Machine(
    name="llama-8b",
    gpus=1,
    costs=presets.costs(_MODEL),
    num_layers=_MODEL.num_layers,
    kv_bytes_per_token=_MODEL.kv_bytes_per_token,
    window=_MODEL.window,
    max_seqs=_MODEL.max_seqs,
    dram_to_hbm=20e9,
    disk_to_dram=3e9,
    hbm_bytes=50e9,
    hbm_shared=True,
    dram_bytes=60e9,
    disk_bytes=1.5e12,
)
SERVER = Config(scheduler="due", load_ahead=4, starts_past_loads=True, recompute_if_faster=True, chunk_tokens=2048)


def conversations(
    *, rate_per_s: float, duration_s: float, seed: int, agents: float = 0.1, most_tokens: int = 32_768
) -> list[Conversation]:
    """Return conversations that begin independently of each other within the duration.

    Chats: 73 % have more than one turn, on average 8 further ones. Medians are 200 tokens of a prompt, 150 of an answer
    and 25 s between turns. The share `agents` of the conversations are those of agents: four times as many turns as
    chats, prompts of 735 tokens (median), and on average 2 s between turns. A conversation ends before it has more than
    `most_tokens`.
    """
    rng = random.Random(seed)
    found: list[Conversation] = []
    start_s = rng.expovariate(rate_per_s)
    while start_s < duration_s:
        is_agent = rng.random() < agents
        count = 1 + int(rng.expovariate(1 / 8)) if rng.random() < 0.73 else 1
        turns: list[Turn] = []
        context = 0
        for place in range(4 * count if is_agent else count):
            prompt = 1 + int(rng.lognormvariate(6.6 if is_agent else 5.3, 0.8))
            answer = 1 + int(rng.lognormvariate(5.0, 0.7))
            think_s = rng.expovariate(1 / 2) if is_agent else math.exp(rng.gauss(3.2, 1.05))
            context += prompt + answer
            if context > most_tokens:
                break
            turns.append(Turn(prompt, answer, think_s if place else 0.0))
        if turns:
            found.append(Conversation(f"c{len(found)}", "", start_s, tuple(turns)))
        start_s += rng.expovariate(rate_per_s)
    return found


def already_under_way(
    drawn: Sequence[Conversation], machine: Machine, *, since_s: float
) -> tuple[list[Conversation], dict[str, int]]:
    """Return (conversations, histories), seen from the time `since_s`, which becomes 0. Conversations that have ended
    by then are left out, and the running ones keep only the turns that remain. histories: session id -> tokens of
    history that a running conversation has at time 0. If `since_s` is as long as the longest conversation, as many end
    as begin."""
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
