"""Describes a simulated server: model, machine, cost of its steps and configuration."""

import math
from dataclasses import dataclass, fields
from typing import Literal

from reprise.loadgen.codec import RAW, CodedKV

Truncation = Literal["decoupled", "coupled"]


@dataclass(frozen=True, slots=True)
class Costs:
    """The seconds that a pass of the model takes, in the terms of `reprise.scheduler.budgets.budget.StepCost`. A pair
    is a token of a prompt and a token that it attends to, and a kilo pair is 1,000 pairs. A row is a sequence that
    decodes, and a kilo read 1,000 tokens of such a sequence's context."""

    prefill_fixed_s: float  # least time of a pass over prompts, which reads the weights once
    s_per_token: float
    s_per_kilo_pair: float
    decode_fixed_s: float
    s_per_row: float
    s_per_kilo_read: float
    overlapped: bool  # whether the fixed part of a prefill overlaps with its tokens' part (GPU), or adds to it
    # number of earlier tokens that a prompt's token attends to: Mistral's sliding window
    attention_span: float = math.inf

    def prefill_s(self, num_tokens: int, context_len: int) -> float:
        """Return the seconds of a pass over `num_tokens` after `context_len` others, alone."""
        work = self.tokens_s(num_tokens, context_len)
        return max(self.prefill_fixed_s, work) if self.overlapped else self.prefill_fixed_s + work

    def tokens_s(self, num_tokens: int, context_len: int) -> float:
        """Return the seconds that these prompt tokens add to a pass that runs anyway."""
        pairs = num_tokens * min(self.attention_span, context_len + num_tokens / 2) / 1000
        return num_tokens * self.s_per_token + pairs * self.s_per_kilo_pair

    def decode_s(self, num_steps: int, rows: int, context_sum: int) -> float:
        """Return the seconds of `num_steps` decode steps of `rows` sequences whose contexts have `context_sum` tokens
        before the first step."""
        read = num_steps * context_sum + rows * num_steps * (num_steps - 1) / 2
        return num_steps * (self.decode_fixed_s + rows * self.s_per_row) + read / 1000 * self.s_per_kilo_read


@dataclass(frozen=True, slots=True)
class Machine:
    """A server's hardware. Sizes in bytes, rates in bytes per second. A tier of 0 bytes is off; one of `math.inf` is
    never full."""

    name: str
    gpus: int
    costs: Costs
    num_layers: int
    kv_bytes_per_token: float
    window: int  # tokens of context
    max_seqs: int
    dram_to_hbm: float
    disk_to_dram: float
    hbm_bytes: float
    hbm_shared: bool  # whether running contexts also occupy `hbm_bytes`
    dram_bytes: float
    disk_bytes: float
    codec: CodedKV = RAW  # the disk's codec

    def disk_s(self, num_tokens: int) -> float:
        """Return the seconds to read the KV of `num_tokens` tokens from disk and to decode it."""
        return self.codec.read_s(num_tokens * self.kv_bytes_per_token, self.disk_to_dram)

    def check(self) -> "Machine":
        """Return self if such a machine can be simulated. Raises ValueError if a size or rate makes no sense, TypeError
        if one is no number."""
        costs = (getattr(self.costs, field.name) for field in fields(self.costs) if field.name != "overlapped")
        counts = (self.gpus, self.num_layers, self.max_seqs, self.window - 1)
        rates = (self.kv_bytes_per_token, self.dram_to_hbm, self.disk_to_dram)
        sizes = (self.hbm_bytes, self.dram_bytes, self.disk_bytes)
        if not (
            all(isinstance(count, int) and count > 0 for count in counts)
            and all(0 < rate < math.inf for rate in rates)
            and all(size >= 0 for size in (*sizes, *costs))
            and self.costs.s_per_token > 0
        ):
            raise ValueError(f"it cannot run: {self}")
        self.codec.check()
        return self


@dataclass(frozen=True, slots=True)
class Config:
    """The server's configuration and the warm-up. The defaults are those of the AttentionStore paper."""

    reuse: bool = True  # False: every prompt is computed (the paper's RE)
    policy: str = "lookahead"  # a key of reprise.loadgen.sim.policies.SIMULATED_POLICIES
    scheduler: str = "fcfs"  # one of `reprise.scheduler.make_policy.POLICIES`
    car_window: int = 8
    patience: float = 8.0  # seconds of waiting for a second of work, with the policy `due`
    granule_tokens: int = 0  # what moves between tiers at once; 0: the whole session, as in the paper; 32: a block
    truncation: Truncation = "decoupled"  # coupled: a cut invalidates what is saved (the paper's OF)
    truncation_ratio: float = 0.5  # share of the window that a cut drops
    answer_share: float = 0.125  # the most of the window that is kept free for the answer when a prompt is cut
    # whether waiting sessions after the first (C_mem + C_disk) / S_kv are treated as unordered
    eviction_window: bool = False
    prefetch: bool = True  # from disk into DRAM, for queued sessions
    prefetch_share: float = 1.0  # share of DRAM that the prefetch window may use
    load_ahead: int = 1  # requests whose load may begin while others run: the HBM read buffer
    # whether turns start while others ahead of them still load, as on the server; the papers do not say
    starts_past_loads: bool = False
    recompute_if_faster: bool = False  # faster than loading what is kept; the server does so, the paper does not say
    chunk_tokens: int = (
        0  # size of prefill chunks that run beside decodes; 0: prefills are not chunked, and decodes wait
    )
    ttl_s: float = math.inf  # since the last access
    warmup_turns: int = 0  # number of first turns that do not count
