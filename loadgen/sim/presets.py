"""Defines the papers' models and machines and the assumptions about them: every number once, with its source."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from reprise.loadgen.sim.machine import Costs, Machine
from reprise.loadgen.workloads import think
from reprise.loadgen.workloads.synthetic import Distribution
from reprise.loadgen.workloads.workload import Conversation, Turn, arrive

_A100_FLOPS = 189e12
_A100_BYTES_PER_S = 2e12  # from its data sheet
MISTRAL_LAYER_S = 1.4e-3
UNSATURATED_RATE = 0.2
_THINK = "lognormal:24,1.05"  # as in `reprise load`


@dataclass(frozen=True, slots=True)
class Saturation:
    """Parameters, not stated by the AttentionStore paper, of a load in which sessions always wait. They were fitted to
    the paper's results for LRU and FIFO (docs/decisions/0055-programs-that-answered-once.md)."""

    opening_tokens: float  # mean length of the first prompt
    turn_tokens: float  # mean length of a later turn, prompt and answer
    prompt_share: float  # share of a later turn's tokens
    spread: float  # log-normal spread of both lengths
    # shape of the gamma distribution of the number of turns: 1 is geometric, smaller values have longer tails
    turn_shape: float
    layer_s: float  # time of a decode step per layer, besides reading weights and KV
    hbm_share: float  # share of the data sheet's bandwidth that these reads reach


FITTED = Saturation(
    opening_tokens=2800, turn_tokens=975, prompt_share=1 / 3, spread=0.2, turn_shape=1.0, layer_s=0.0, hbm_share=0.8
)
_MAX_TURNS = 100


@dataclass(frozen=True, slots=True)
class Stated:
    """A number and its source."""

    what: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class DeployedModel:
    """A model and the GPUs it runs on."""

    parameters: float
    num_layers: int
    hidden_size: int
    kv_bytes_per_token: float
    window: int
    gpus: int
    max_seqs: int
    attention_span: float = math.inf  # tokens in a sliding window


SHAPES = {
    "llama-13b": DeployedModel(13.0e9, 40, 5120, 0.78e6, 4096, 2, 24),
    "llama-65b": DeployedModel(65.2e9, 80, 8192, 2.5e6, 2048, 4, 24),
    "llama-70b": DeployedModel(69.0e9, 80, 8192, 0.31e6, 4096, 4, 24),
    "falcon-40b": DeployedModel(41.3e9, 60, 8192, 0.12e6, 4096, 4, 24),
    "mistral-7b": DeployedModel(7.24e9, 32, 4096, 0.131e6, 32_768, 1, 1, 4096),
}
_KV_16 = 4.0  # bytes of keys and values per layer and width, if every head has its own
CAR_SHAPES = {
    name: DeployedModel(parameters, layers, width, _KV_16 * layers * width, 2048, 8, 1)
    for name, parameters, layers, width in (
        ("opt-6.7b", 6.7e9, 32, 4096),
        ("opt-13b", 12.9e9, 40, 5120),
        ("opt-30b", 30.0e9, 48, 7168),
        ("llama-2-7b", 6.7e9, 32, 4096),
        ("llama-2-13b", 13.0e9, 40, 5120),
    )
}
FIGURE_MODELS = ("llama-13b", "llama-65b", "llama-70b", "falcon-40b")

_AS, _OURS, _FITTED = "AttentionStore", "assumed", "fitted to LRU and FIFO in Fig. 21"
TABLE: tuple[Stated, ...] = (
    Stated("KV per token", ".78 MB (13B), 2.5 (65B), .31 (70B), .12 (Falcon-40B)", f"{_AS} §4.2"),
    Stated("context window", "2K (65B), 4K (LLaMA-2), 32K (Mistral)", f"{_AS} §2.4, §4.3"),
    Stated("GPUs, batch", "13B: 2; 65B, 70B, Falcon: 4; batch 24. Mistral: 1, batch 1", f"{_AS} §4.1, §4.3.8"),
    Stated("PCIe, disk", "26 GB/s, 5 GB/s (\"less than\")", f"{_AS} §2.4"),
    Stated("DRAM, SSD", "128 GB, 10 TB", f"{_AS} §4.1"),
    Stated("sessions", "9,000, Poisson, 1 a second; the first 10,000 turns warm up", f"{_AS} §4.1, §4.2"),
    Stated("turns and lengths", "73 % multi-turn, mean 5.75 turns, 47 % > 2K, 30 % > 4K tokens", f"{_AS} §2.3, §4.2"),
    Stated("prices", "$5/h a GPU, $.0088/h/GB DRAM, $.000082/h/GB SSD", f"{_AS} §4.2"),
    Stated("truncation", "the earliest half of the window", f"{_AS} §4.1"),
    Stated("prefill rate", f"{_A100_FLOPS / 1e12:.0f} TFLOP/s a GPU: 65B, 2K tokens, 4 GPUs in 360 ms", f"{_AS} §2.4"),
    Stated("decode step of Mistral-7B",
           f"56 ms at 28K, where a prefill of 2.5 s is 41 % of a question recomputed: {MISTRAL_LAYER_S * 1e3:g} ms a "
           "layer beside HBM reads", f"{_AS} §4.3.8"),
    Stated("the same rate for every model", "2 FLOP per parameter and token, 4 per layer, width and pair", _OURS),
    Stated(
        "HBM bandwidth",
        f"{FITTED.hbm_share * _A100_BYTES_PER_S / 1e12:.1f} TB/s a GPU ({FITTED.hbm_share:.0%} of its data sheet)",
        f"{_OURS}; LRU and FIFO in Fig. 21 tell nothing else",
    ),
    Stated("window of Falcon-40B",
           "4K: it loses to overflows what the models of 4K lose, and LLaMA-65B alone is named as limited by 2K "
           f"({_AS} §4.3.4), though Falcon's model card says 2K", _OURS),
    Stated("shapes", "parameters, layers, widths as in the model cards; KV of Mistral .131 MB per token, its sliding "
           "window 4K", _OURS),
    Stated("think time, saturated preset", "0: one turn of every session always waits", _OURS),
    Stated(
        "lengths, saturated preset",
        f"turns of {FITTED.turn_tokens:,} tokens in the mean, {FITTED.prompt_share:.0%} of it prompt, the first with a "
        f"prompt of {FITTED.opening_tokens:,}; "
        f"spread {FITTED.spread:g} log-normally; numbers of turns geometric from 2 on, at most {_MAX_TURNS}",
        _FITTED,
    ),
    Stated("decode step", "HBM reads alone: what more it takes LRU and FIFO in Fig. 21 do not tell", _OURS),
    Stated("FIFO", "who began first leaves first, also if evicted and saved again in between", _FITTED),
    Stated("unsaturated preset",
           f"{UNSATURATED_RATE:g} sessions a second, think time {_THINK} s, stated lengths, at most 40 turns", _OURS),
    Stated("correlation of turns and tokens", "0.7 (normal scores), unsaturated preset", _OURS),
    Stated("words of a turn, unsaturated preset", "a third is the prompt; log-normal between turns (0.8)", _OURS),
    Stated("what a tier keeps", "copies: what leaves DRAM stays on disk, what is fetched does too", "as the server"),
    Stated("CaR's machine", "8 A100-40GB, CXL 64 GB/s; OPT-30B 2.6 GB per 2K tokens", "CaR §IV"),
    Stated("KV of CaR's models", "fp16, all heads their own: 4 bytes per layer and width", _OURS),
    Stated("saving", "hides behind compute", f"{_AS} §3.2.2"),
    Stated("the disk", "one transfer at a time; writes wait in DRAM for the time between reads", _OURS),
)  # fmt: skip


def one_gpu(shape: DeployedModel) -> DeployedModel:
    return replace(shape, gpus=1)


def costs(shape: DeployedModel, layer_s: float = FITTED.layer_s, hbm_share: float = FITTED.hbm_share) -> Costs:
    """Return the seconds of a model's passes. layer_s: seconds that a decode step takes per layer in addition to
    reading weights and KV. hbm_share: share of the data sheet's HBM bandwidth that these reads reach."""
    flops, bandwidth = shape.gpus * _A100_FLOPS, shape.gpus * hbm_share * _A100_BYTES_PER_S
    weights_s = 2 * shape.parameters / bandwidth
    return Costs(
        prefill_fixed_s=weights_s,
        s_per_token=2 * shape.parameters / flops,
        s_per_kilo_pair=4 * shape.num_layers * shape.hidden_size * 1000 / flops,
        decode_fixed_s=weights_s + layer_s * shape.num_layers,
        s_per_row=0.0,
        s_per_kilo_read=shape.kv_bytes_per_token * 1000 / bandwidth,
        overlapped=True,
        attention_span=shape.attention_span,
    )


def machine(
    model: str,
    *,
    layer_s: float = FITTED.layer_s,
    hbm_share: float = FITTED.hbm_share,
    dram_bytes: float = 128e9,
    disk_bytes: float = 10e12,
) -> Machine:
    """Return the machine of the AttentionStore paper's testbed with one of the models in `SHAPES`. layer_s, hbm_share:
    as in `costs`. Raises KeyError for other models."""
    shape = SHAPES[model]
    return Machine(
        name=model,
        gpus=shape.gpus,
        costs=costs(shape, layer_s, hbm_share),
        num_layers=shape.num_layers,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        window=shape.window,
        max_seqs=shape.max_seqs,
        dram_to_hbm=26e9,
        disk_to_dram=5e9,
        hbm_bytes=0.0,
        hbm_shared=False,
        dram_bytes=dram_bytes,
        disk_bytes=disk_bytes,
    )


def saturated(
    *, sessions: int = 9000, seed: int = 0, rate_per_s: float = 1.0, shape: Saturation = FITTED
) -> list[Conversation]:
    """Return conversations without think time: a session's next turn is queued as soon as the answer has ended.
    rate_per_s: conversations that begin a second."""
    rng = random.Random(seed)
    stated = Distribution()

    def about(tokens: float) -> int:
        return max(1, round(tokens * math.exp(rng.gauss(0.0, shape.spread) - shape.spread**2 / 2)))

    def num_turns() -> int:
        if rng.random() >= stated.multi_turn:
            return 1
        more = (stated.mean_turns - (1 - stated.multi_turn)) / stated.multi_turn - 2
        return min(_MAX_TURNS, 2 + _poisson(rng, rng.gammavariate(shape.turn_shape, more / shape.turn_shape)))

    answer = (1 - shape.prompt_share) * shape.turn_tokens
    scripts = []
    for _ in range(sessions):
        prompts = [shape.opening_tokens, *[shape.prompt_share * shape.turn_tokens] * (num_turns() - 1)]
        scripts.append(tuple(Turn(about(prompt), about(answer), 0.0) for prompt in prompts))
    return arrive(scripts, rng=rng, rate_per_s=rate_per_s, think=lambda _: 0.0)


def _poisson(rng: random.Random, mean: float) -> int:
    """Draw from the Poisson distribution with this mean."""
    count, passed = 0, rng.expovariate(1.0)
    while passed < mean:
        count += 1
        passed += rng.expovariate(1.0)
    return count


def unsaturated(*, sessions: int = 9000, seed: int = 0, rate_per_s: float = UNSATURATED_RATE) -> list[Conversation]:
    """Return conversations with think time between turns, at a rate that the server keeps up with."""
    rng = random.Random(seed)
    scripts = [Distribution().script(rng) for _ in range(sessions)]
    return arrive(scripts, rng=rng, rate_per_s=rate_per_s, think=think.parse(_THINK))


def documents(lengths: Sequence[int]) -> list[Conversation]:
    """Return six questions of 256 tokens about each document, with answers of 64 tokens (AttentionStore §4.3.8), far
    apart in time."""
    return [
        Conversation(f"d{length}", "", 1e6 * place, (Turn(256 + length, 64, 0.0), *[Turn(256, 64, 10.0)] * 5))
        for place, length in enumerate(lengths)
    ]


def smaller(whole: Machine, share: float) -> Machine:
    """Return a machine that is a share of another one, to be simulated with the same share of the sessions. Tiers,
    batch and HBM bandwidth for KV shrink in proportion, so that a step takes the same time; prefills and links stay as
    fast."""
    return replace(
        whole,
        max_seqs=max(1, round(whole.max_seqs * share)),
        hbm_bytes=whole.hbm_bytes * share,
        dram_bytes=whole.dram_bytes * share,
        disk_bytes=whole.disk_bytes * share,
        costs=replace(whole.costs, s_per_kilo_read=whole.costs.s_per_kilo_read / share),
    )
