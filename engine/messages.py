"""The msgspec structs of the wire between the HTTP process and the engine process.

Token ids and small structs only: never tensors, never pickle. Every message is one msgpack frame of a tagged union.
"""

import msgspec

from scheduler.sequence import SamplingParams

WIRE_VERSION = 1


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine process is told at its start. Zero means automatic, resolved in `engine.build`."""

    model: str  # local directory or hub id
    dtype: str  # auto | float32 | bfloat16 | float16
    device: str  # auto | cpu | cuda
    max_context: int  # 0: what the model was trained for
    threads: int  # 0: all cores
    cache_mode: str  # prefix | recompute
    cache_policy: str  # a key of cache.policies.POLICIES
    hbm_tokens: int  # KV rows in HBM; 0: from free memory
    session_ttl_s: float
    max_sessions: int
    scheduler_policy: str  # fcfs
    max_seqs: int  # running at once
    max_queued: int  # waiting at once
    step_tokens: int  # token budget of one step; 0: automatic
    chunked_prefill: bool
    tenant_secret: bytes  # keys every block hash


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The one frame on the engine's stdin, behind its length (4 bytes, big endian). Stdin then stays open for as long
    as the app lives."""

    wire_version: int
    endpoint: str  # ZeroMQ, bound by the app; another one for every engine process
    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Generate `num_choices` continuations of `token_ids`. Answered by Output messages per choice."""

    request_id: str
    session_id: str
    tenant: str
    cache_salt: str  # narrows the tenant's reuse domain; "" is the domain itself
    token_ids: list[int]
    num_choices: int
    sampling: SamplingParams


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client is gone. Nothing more is sent for this request; finished blocks are kept."""

    request_id: str


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The app found a stop string: end this choice and keep its first `keep_tokens` generated tokens.
    Nothing more is sent for this choice."""

    request_id: str
    choice: int
    keep_tokens: int


class FinishAll(msgspec.Struct, frozen=True, tag="finish_all"):
    """Drain limit reached: end everything, running and waiting, with finish_reason `length`."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop and exit with status 0."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was loaded."""

    name: str
    path: str  # local directory of the files, for the app's tokenizer
    architecture: str
    parameters: int
    dtype: str
    device: str
    attention_backend: str
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    decouplable: bool  # False: keys carry their position, truncation means recompute
    rope_layers: int
    layers: int
    kv_bytes_per_token: int
    hbm_tokens: int
    block_size: int
    page_size: int
    fingerprint: str  # hex
    warnings: tuple[str, ...]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    model: ModelInfo


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The model cannot be served; the process exits and is not restarted."""

    message: str


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """Of the distribution before penalties, temperature and filters (as OpenAI reports it)."""

    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), most likely first


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where the prompt's KV came from. hbm + dram + disk + redis + computed = prompt_tokens."""

    prompt_tokens: int
    history_tokens: int  # prompt tokens that the session (or a sibling) had computed before
    hbm_tokens: int
    dram_tokens: int
    disk_tokens: int
    redis_tokens: int
    computed_tokens: int
    truncated_tokens: int
    shifted_tokens: int
    miss_reasons: dict[str, int]  # reason -> tokens; adds up to computed_tokens


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds inside the engine."""

    queue_ms: float  # arrival -> first scheduled
    load_ms: float
    prefill_ms: float  # first scheduled -> first token
    decode_ms: float  # first token -> last token


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one choice. `report` comes with a choice's first output, `timings` with its first and its last."""

    request_id: str
    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: str | None  # stop | length | error
    report: CacheReport | None
    timings: Timings | None
    error: str | None  # with finish_reason error
    error_code: str | None  # context_length_exceeded | overloaded | internal_error


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """All that one step produced."""

    outputs: list[Output]


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Gauges and running totals, sent about once a second; also the engine's heartbeat."""

    running: int
    waiting: int
    sessions: int
    leases: int  # pages pinned by requests
    hbm_pages_total: int
    hbm_pages_free: int
    hbm_pages_cached: int  # not pinned, kept for reuse
    steps: int
    step_seconds: float
    prompt_tokens: dict[str, int]  # outcome (hbm, computed, ...) -> tokens since start
    generated_tokens: int
    miss_tokens: dict[str, int]  # miss reason -> tokens since start
    evicted_blocks: int
    preemptions: int
    aborted: int


ToEngine = Submit | Abort | Finish | FinishAll | Shutdown
FromEngine = Ready | Refused | Outputs | Stats

encode = msgspec.msgpack.Encoder().encode
decode_launch = msgspec.msgpack.Decoder(Launch).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
