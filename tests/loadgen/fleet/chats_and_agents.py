"""Draws chats and agents for tests of simulated fleets, and has a replica to serve them."""

import math
import random

from reprise.loadgen.sim import presets
from reprise.loadgen.sim.machine import Machine
from reprise.loadgen.sim.presets import DeployedModel
from reprise.loadgen.workloads.workload import Conversation, Turn

_MODEL = DeployedModel(  # a Llama of 8B, bf16, on one A100 of 80 GB
    parameters=8.0e9, num_layers=32, hidden_size=4096, kv_bytes_per_token=131_072.0, window=131_072, gpus=1, max_seqs=64
)
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
