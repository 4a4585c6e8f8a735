"""What a simulated server is: a model, the machine under it, what its steps cost and how it is set up."""

import math
from dataclasses import dataclass, fields
from typing import Literal

Truncation = Literal["decoupled", "coupled"]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a pass of the model, in the terms of `scheduler.budget.StepCost`. A prompt's tokens attend to their
    contexts (products in thousands: kilo pairs), a decode row reads its own."""

    prefill_fixed_s: float  # least time of a pass over prompts: the weights are read once
    s_per_token: float
    s_per_kilo_pair: float
    decode_fixed_s: float
    s_per_row: float
    s_per_kilo_read: float
    overlapped: bool  # the fixed part of a prefill hides behind its tokens (GPU), or adds to them
    attention_span: float = math.inf  # a prompt's token attends to so many before it: Mistral's sliding window

    def prefill_s(self, num_tokens: int, context_len: int) -> float:
        """A pass over `num_tokens` behind `context_len` others, alone."""
        work = self.tokens_s(num_tokens, context_len)
        return max(self.prefill_fixed_s, work) if self.overlapped else self.prefill_fixed_s + work

    def tokens_s(self, num_tokens: int, context_len: int) -> float:
        """What these tokens of a prompt add to a pass that runs anyway."""
        pairs = num_tokens * min(self.attention_span, context_len + num_tokens / 2) / 1000
        return num_tokens * self.s_per_token + pairs * self.s_per_kilo_pair

    def decode_s(self, num_steps: int, rows: int, context_sum: int) -> float:
        """So many steps of `rows` sequences whose contexts have `context_sum` tokens before the first."""
        read = num_steps * context_sum + rows * num_steps * (num_steps - 1) / 2
        return num_steps * (self.decode_fixed_s + rows * self.s_per_row) + read / 1000 * self.s_per_kilo_read


@dataclass(frozen=True, slots=True)
class Machine:
    """Sizes in bytes, rates in bytes per second. A tier of 0 bytes is off; `math.inf` is a tier that is never full."""

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
    hbm_shared: bool  # the contexts that run lie in `hbm_bytes` too, or are accounted for elsewhere
    dram_bytes: float
    disk_bytes: float

    def check(self) -> "Machine":
        """It, if it can be simulated. Raises ValueError, TypeError."""
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
        return self


@dataclass(frozen=True, slots=True)
class Config:
    """How the server is set up, and what is counted. The defaults are the AttentionStore paper's mode."""

    reuse: bool = True  # False: every prompt is computed (the paper's RE)
    policy: str = "lookahead"  # a key of loadgen.sim.policies.POLICIES
    scheduler: str = "fcfs"  # fcfs | priority | car, as `scheduler.make_queue.make_queue` knows them
    car_window: int = 8
    granule_tokens: int = 0  # what enters and leaves tiers at once; 0: the whole session, as in the paper; 32: a block
    truncation: Truncation = "decoupled"  # coupled: a cut invalidates what is saved (OF)
    truncation_ratio: float = 0.5  # of the window
    answer_share: float = 0.125  # most of the window that is kept free for the answer when a prompt is cut
    eviction_window: bool = False  # those behind the first (C_mem + C_disk) / S_kv who wait have no order
    prefetch: bool = True  # disk -> DRAM for the queue
    prefetch_share: float = 1.0  # of DRAM, that the prefetch window may count on
    load_ahead: int = 1  # requests whose load may begin while others run: the HBM read buffer
    recompute_if_faster: bool = False  # than to load what is kept: as the server does, and the paper does not say
    chunk_tokens: int = 0  # of prefills beside decodes; 0: unchunked, and decodes wait for them
    ttl_s: float = math.inf  # since the last access
    warmup_turns: int = 0  # the first that start do not count
