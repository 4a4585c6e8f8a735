"""Describes a server on a virtual clock, and makes its parts: the real scheduler and cache manager, and tiers that only
take time."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from reprise.cache.blocks.keys import BLOCK_TOKENS, KeyDomain
from reprise.cache.manager import CacheManager
from reprise.cache.options import CacheOptions, Truncation
from reprise.cache.policies import POLICIES
from reprise.cache.rates import Rates
from reprise.cache.tiers.dram import split_dram
from reprise.loadgen.virtual.virtual_tiers import DIRECTIONS, VirtualSpeeds, VirtualTiers
from reprise.scheduler.budgets.budget import StepCost
from reprise.scheduler.limits import SchedulerLimits
from reprise.scheduler.policy import Policy
from reprise.scheduler.predictor import LengthPredictor
from reprise.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class VirtualServer:
    """A description of a server: sizes, settings and the costs of its steps and links."""

    hbm_blocks: int
    dram_blocks: int
    disk_blocks: int
    policy: str
    window: int  # places, of `car`
    max_seqs: int
    patience: float = 8.0  # seconds of waiting for a second of work, with the policy `due`
    target_s: float | None = None  # every turn wants its first token within so many seconds
    step_tokens: int = 512
    lone_step_tokens: int = 2048
    itl_target_s: float | None = 0.0  # None: what serves all of them best
    least_chunk_tokens: int = 32
    chunked_prefill: bool = True
    prefer_contiguous: bool = False  # pages in a row, as the server has them on CPU: it moves who leaves HBM
    oracle: bool = False  # answers are as long as they may be, and the scheduler knows
    cache_policy: str = "lookahead"
    high_water: float = 1.0
    low_water: float = 0.85
    scores: bool = False  # CaR's
    bytes_per_token: int = 1024
    num_layers: int = 12
    fixed_s: float = 0.005
    chunk_fixed_s: float = 0.0  # added to every step with tokens of prompts: products of many rows begin dearer
    s_per_token: float = 0.0004
    s_per_row: float = 0.0005
    s_per_kilo_pair: float = 0.0001
    s_per_kilo_read: float = 0.0001
    misjudged: float = 1.0  # the scheduler's first guess of these five, over the truth
    dram_bytes_per_s: float = 20e6
    disk_bytes_per_s: float = 5e6
    redis_blocks: int = 0  # 0: no Redis
    redis_bytes_per_s: float = 2e6
    coded_share: float = 0.0  # share of its bytes that a coded block takes; 0: nothing is coded
    decoded_bytes_per_s: float = 10e6  # bytes of rows that come out of the codec
    encoded_bytes_per_s: float = 4e6  # bytes of rows that go into it
    load_fixed_s: float = 0.0  # time of every load and fetch beside that of its bytes
    failures: float = 0.0  # share of transfers that fail
    cancels: float = 0.0  # share of steps before which a client goes away
    block_scorer: str = ""  # what a full window drops first; empty: the conversation ends there
    recall: bool = False  # bring back what was dropped where a prompt is about it

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.bytes_per_token

    @property
    def coded_block_bytes(self) -> int:
        """Bytes of a block that the codec has compressed; 0: there is no codec."""
        return int(self.coded_share * self.block_bytes)

    def step_cost(self, *, misjudged: float) -> StepCost:
        """Return the step costs that the scheduler is told. misjudged: the factor by which they differ from the true
        costs."""
        return StepCost(
            fixed_s=misjudged * self.fixed_s,
            s_per_token=misjudged * self.s_per_token,
            s_per_row=misjudged * self.s_per_row,
            s_per_kilo_pair=misjudged * self.s_per_kilo_pair,
            s_per_kilo_read=misjudged * self.s_per_kilo_read,
        )


def make_tiers(machine: VirtualServer, rng: random.Random) -> VirtualTiers:
    """Make the tiers of a machine. rng: draws which transfers fail."""
    return VirtualTiers(
        num_layers=machine.num_layers,
        bytes_per_token=machine.bytes_per_token,
        coded_block_bytes=machine.coded_block_bytes,
        redis_blocks=machine.redis_blocks,
        speeds=VirtualSpeeds(
            dram_bytes_per_s=machine.dram_bytes_per_s,
            disk_bytes_per_s=machine.disk_bytes_per_s,
            redis_bytes_per_s=machine.redis_bytes_per_s,
            decoded_bytes_per_s=machine.decoded_bytes_per_s,
            encoded_bytes_per_s=machine.encoded_bytes_per_s,
            load_fixed_s=machine.load_fixed_s,
        ),
        failures=machine.failures,
        rng=rng,
    )


def make_rates(machine: VirtualServer, tiers: VirtualTiers) -> Rates:
    """Make the estimates of a machine's speeds; they begin with the true ones."""
    return Rates(
        num_layers=machine.num_layers,
        step_fixed_s=machine.fixed_s,
        prefill_s_per_token=machine.s_per_token,
        transfer_fixed_s=machine.load_fixed_s,
        bytes_per_s={name: tiers.speed(name) for name in DIRECTIONS},
    )


def make_cache(machine: VirtualServer, rates: Rates, *, arrived: Callable[[int], float]) -> CacheManager:
    """Make the cache manager of a machine. arrived: takes a load's job number and returns the share of the load that is
    in HBM."""
    dram_bytes = machine.dram_blocks * machine.block_bytes
    dram_slots, coded_slots = split_dram(dram_bytes, machine.block_bytes, machine.coded_block_bytes)
    return CacheManager(
        options=CacheOptions(
            num_pages=machine.hbm_blocks,
            page_size=BLOCK_TOKENS,
            bytes_per_token=machine.bytes_per_token,
            hbm_bytes_per_token=None,
            most_pages=0,
            prefer_contiguous=machine.prefer_contiguous,
            num_slots=dram_slots + machine.dram_blocks // 4,
            dram_slots=dram_slots,
            coded_block_bytes=machine.coded_block_bytes,
            coded_slots=coded_slots,
            disk_bytes=machine.disk_blocks * machine.block_bytes,
            redis_bytes=machine.redis_blocks * machine.block_bytes,
            head_key=b"virtual" if machine.redis_blocks else b"",
            hbm_high_water=machine.high_water,
            hbm_low_water=machine.low_water,
            dram_free_buffer=0.1,
            reuse=True,
            only_as_computed=False,
            truncation=Truncation(
                machine.hbm_blocks * BLOCK_TOKENS, 0.5, "decoupled", machine.block_scorer or "oldest", machine.recall
            ),
            session_ttl_s=1e9,
            max_sessions=1_000_000,
            unix_offset_s=0.0,
        ),
        policy=POLICIES[machine.cache_policy],
        domain_of=lambda tenant, salt: KeyDomain(secret=b"", fingerprint=b"", tenant=tenant, salt=salt),
        rates=rates,
        arrived=arrived,
        progress=lambda job_id: None,  # its disks never stutter
    )


def make_scheduler(
    machine: VirtualServer, cache: CacheManager, policy: Policy, predictor: LengthPredictor
) -> Scheduler:
    """Make the scheduler of a machine. It is told step costs that differ from the true ones by the factor
    `machine.misjudged`."""
    return Scheduler(
        cache=cache.view,
        policy=policy,
        predictor=predictor,
        cost=machine.step_cost(misjudged=machine.misjudged),
        limits=SchedulerLimits(
            max_seqs=machine.max_seqs,
            max_queued=1_000_000,
            step_tokens=machine.step_tokens,
            lone_step_tokens=machine.lone_step_tokens,
            itl_target_s=machine.itl_target_s,
            least_chunk_tokens=machine.least_chunk_tokens,
            chunked_prefill=machine.chunked_prefill,
        ),
    )
