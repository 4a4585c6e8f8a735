"""Defines the configuration that the engine gets at its start: the sections of the settings that it needs, under the
settings' own names.

`reprise.app.settings` makes it and has every default; there is none here. Sizes are in bytes and times in seconds, so
those fields have other units, and names, than their settings. Zero and None mean automatic;
`reprise.engine.build.engine` resolves them, once.
"""

import msgspec

WEIGHT_BUFFERS = 2  # buffers of HBM for weights that pass through: one is in use while the other is filled


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    source: str  # local directory, GGUF file or hub id
    max_context: int  # tokens; 0: what the model was trained for
    dtype: str  # auto | float32 | bfloat16 | float16
    tensor_parallel: int  # processes that share the model out, each with its heads
    weights: str  # auto | bf16 | q8 | q4: how they are kept in memory
    exact: str  # auto | on | off: rows that depend on their own tokens alone, whatever that costs


INT8_SCALE_BYTES = 2
"""The bytes that each head of a row takes in HBM beside its numbers when `cache.hbm_dtype` is int8. Repeats a constant
of `reprise.kernels.int8_pages`, which needs torch."""


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    mode: str  # attentionstore | prefix | recompute
    policy: str  # a key of reprise.cache.policies.POLICIES
    ttl_s: float
    max_sessions: int
    hbm_tokens: int  # KV rows in HBM; 0: from free memory
    dram_bytes: int | None  # KV below HBM; 0 turns the tier off, None: from free memory
    disk_bytes: int | None  # 0 turns the tier off, None: from the free space of the file system
    disk_dir: str  # absolute; the engine owns `kv`, `models` (conversions) and `first_steps.json`
    disk_min_free_bytes: int  # bytes of the file system left free
    verify_rate: float  # share of loads that are compared with a recompute
    truncation: str  # auto | disabled: what a request that says nothing gets
    block_scorer: str  # a key of reprise.cache.policies.keep.BLOCK_SCORERS
    recall: bool  # bring back what was dropped where the newest message is about it
    codec: str  # codec of KV below DRAM: raw | transform; or below HBM: activation
    codec_budget: float  # nats a token that `transform`, or int8 in HBM, may change answers by
    hbm_dtype: str  # type of KV in HBM: auto | int8
    larger_than_hbm: bool  # a context may be as long as DRAM holds
    redis_urls: tuple[str, ...]  # servers that keep KV which other servers may load; empty: none
    redis_bytes: int  # most KV on each, of all servers; 0: none is kept


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    policy: str  # due | car | fcfs
    patience: float  # seconds of waiting that a second of work is worth to the policy `due`
    itl_target_s: float | None  # longest step with decoding sequences; 0: no target; None: best for all that wait
    max_seqs: int  # running at once
    max_queued: int  # waiting at once
    draft_tokens: int  # most that are drafted for a choice in a step; 0: none


class SelectorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the selector, which chooses the part of a long context that decoding reads."""

    name: str  # a key of reprise.kernels.selectors.SELECTORS
    min_context: int  # tokens; shorter contexts are read whole
    share: float  # share of a context's rows that are read


class WeightsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of where the model's weights lie."""

    offload: str  # none | dram: the layers' weights pass through HBM while the model runs
    hbm_layers: int  # layers whose weights stay in HBM all the same


class ExperimentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings for benchmarks: options to compare, and caps that stand in for slower hardware."""

    hbm_high_water: float  # share of HBM in use above which saved KV leaves it in the background; 1: never
    hbm_low_water: float  # share of HBM in use down to which it leaves
    scores: bool  # `car` scores blocks that requests in the window, or running ones, need
    window: int  # places of the window of `car`; 0: from HBM and the mean session
    chunked_prefill: bool
    truncation_mode: str  # decoupled | recompute
    truncation_ratio: float  # share of the window that is dropped at an overflow
    read_buffer_layers: int  # layers a job may hold before it is admitted; -1: all
    sync_save: bool  # save before the next step instead of during it
    staging_bytes: int  # DRAM for blocks on their way to and from disk, besides dram_bytes; 0: automatic
    dram_gbps: float  # GB/s, a cap that stands in for a slower link; 0: none
    disk_gbps: float  # GB/s, read and write each; 0: none
    io_deadline_s: float  # deadline of one read or write


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    experiment: ExperimentConfig
    device: str  # auto | cpu | cuda
    threads: int  # 0: all cores
    step_tokens: int  # most of one step; 0: automatic
    tenant_secret: bytes  # keys every block hash
    selector: SelectorConfig
    weights: WeightsConfig
