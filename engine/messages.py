"""Defines the msgspec structs that the HTTP process and the engine process send each other.

They hold token ids and small structs only: never tensors, never pickle. Every message is one msgpack frame of a tagged
union.
"""

import msgspec

from reprise.cache.blocks.keys import given_salt as given_salt  # the app has these from here
from reprise.cache.blocks.keys import is_exact as is_exact
from reprise.cache.blocks.keys import salt_of as salt_of
from reprise.cache.stats import MISS_REASONS as MISS_REASONS
from reprise.cache.stats import TokensBySource as TokensBySource
from reprise.engine.config import EngineConfig
from reprise.scheduler.sequence import SamplingParams as SamplingParams

WIRE_VERSION = 15
DIVERGENCE_BOUNDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
"""Upper bounds, in nats per token, of the buckets in which `CodecChecks` counts divergences."""
MAX_HEAD_BYTES = 8 << 20  # largest head of a session: a context of 4 MiB, and the names of its extents


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The app's order to start an engine: the settings, and where to connect. It is the only frame on the engine's
    stdin, after its length (4 bytes, big endian). Stdin then stays open for as long as the app lives."""

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
    truncation: str = ""  # auto | disabled; "" is the server's default
    keep_first_tokens: int = 0  # leading tokens that a truncation keeps: the system prompt
    message_starts: tuple[int, ...] = ()  # token offsets at which messages begin, increasing
    important: tuple[tuple[int, int], ...] = ()  # half-open token ranges that a truncation keeps
    begun_tokens: int = 0  # tokens at the end of `token_ids` that begin the answer, as the client gave it
    shift: "Shift | None" = None  # the client dropped messages itself, and may be served from their saved KV
    weight: float = 1.0  # share of the engine it asks for, against requests of weight 1
    target_s: float | None = None  # its first token is wanted within so many seconds of its arrival in the engine
    grammar: str = ""  # llguidance's, which every choice keeps to; "" is none
    prompt_logprobs: int | None = None  # logprobs of the prompt's tokens, with so many likely ones; computes all of it
    prediction: list[int] = []  # what its answers are expected to say
    progress: bool = False  # outputs of the first choice tell how far its prompt is read, until its first token
    resume: list[list[int] | None] = []
    """The tokens of each choice that another engine has generated; this engine continues after them. They are not sent
    again, and count as generated. None: the choice has ended, and nothing is sent for it. An empty list: a new request.
    """
    over: list[int] | None = None
    """The tokens that another engine generated for the first choice, if that has ended (its entry in `resume` is None).
    The conversation continues with them, so this engine computes their KV and sends nothing. None: nothing is computed.
    """


class Shift(msgspec.Struct, frozen=True, kw_only=True):
    """A truncation that the client made itself, by leaving out part of a known conversation. stream: the tokens of the
    whole conversation, with the left-out part and the new turn. keep, resume: the request's `token_ids` are
    stream[:keep] followed by stream[resume:]."""

    stream: list[int]
    keep: int
    resume: int


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True, tag="session"):
    """Ask about the sessions of one tenant, or change one. Answered by one SessionReply with the same request_id."""

    request_id: str
    tenant: str
    action: str  # list | list_all (of all tenants) | recent (the `limit` used last) | get | patch | delete | prefetch
    session_id: str = ""  # all actions but list, list_all and recent
    pinned: bool | None = None  # patch
    ttl_s: float | None = None  # patch; measured from the last use
    after: str = ""  # list: only session ids after this one; list_all: only "tenant/session id" after it
    limit: int = 100  # list, list_all, recent


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The present state of one session. A block in two tiers counts in both."""

    session_id: str
    cache_salt: str
    tokens: int  # tokens of its context
    truncated_tokens: int
    blocks: dict[str, int]  # tier -> blocks
    bytes: dict[str, int]  # tier -> bytes
    last_used_s: float  # unix time
    expires_s: float | None  # unix time; None while pinned
    pinned: bool
    running: bool
    tenant: str = ""


class SessionReply(msgspec.Struct, frozen=True, kw_only=True, tag="session_reply"):
    """The answer to a SessionRequest. `delete` is answered when the session's bytes have left every tier. If this
    engine does not know the session, `delete` is answered with `not_found`, once the bytes that other servers left in
    Redis are deleted."""

    request_id: str
    sessions: list[SessionInfo]
    more: bool = False  # list, list_all: there are further ones
    # not_found | busy (a request of it runs) | pin_quota | undeleted (the disk keeps bytes; tried again) | unavailable
    # | bad_head (adopt)
    error_code: str | None = None
    error: str | None = None


class Head(msgspec.Struct, frozen=True, kw_only=True, tag="head"):
    """The data with which another replica can continue a session: its context, and the names of its extents in Redis.

    Only an engine that stores KV in Redis sends it: before the last Output of every turn, and again whenever an upload
    of the session has ended, because only then do the extents of the newest turn have names. If a stop string ends a
    turn, the head follows the app's Finish. A later head of a session replaces an earlier one.
    """

    tenant: str
    salt: str
    session_id: str
    turn: int  # turns of the session that have ended; heads of one turn are in order of sending
    redis_tokens: int  # leading tokens of its context whose KV is in Redis
    head: bytes  # opaque and signed by the engine; at most MAX_HEAD_BYTES


class Adopt(msgspec.Struct, frozen=True, kw_only=True, tag="adopt"):
    """Take over a session that another replica has left, so that its next turn finds its KV in Redis. Answered by one
    SessionReply with the same request_id when the headers of its extents have come. `unavailable`: this engine stores
    no KV in Redis, or Redis has not answered. `bad_head`: no engine of this model and tenant secret has made the head.
    A turn may follow after any answer: KV that was not adopted is computed."""

    request_id: str
    tenant: str
    salt: str
    session_id: str
    head: bytes


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request whose client is gone. Nothing more is sent for it; its full blocks stay in the cache."""

    request_id: str


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """End a choice in which the app has found a stop string, and keep its first `keep_tokens` generated tokens. Nothing
    more is sent for this choice."""

    request_id: str
    choice: int
    keep_tokens: int


class FinishAll(msgspec.Struct, frozen=True, tag="finish_all"):
    """End every request, running or waiting, with finish_reason `length`, because the limit for draining is reached."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop and exit with status 0."""


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about the loaded model that the app has to know: name, files, types of its numbers, options and
    sizes."""

    name: str
    path: str  # local directory of the files, for the app's tokenizer
    architecture: str
    parameters: int
    dtype: str
    weights: str = ""  # how they are packed in memory: q8, q4 or GGUF formats; empty: they are of the dtype
    device: str
    attention_backend: str
    max_context: int
    own_context: int = 0  # the longest window that the model supports; 0: not known
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    media_token_ids: tuple[int, ...] = ()  # stand for images, videos and sounds, which the text model cannot read
    logit_error: float  # relative RMS error of our logits against the model's own attention in fp32
    logit_tolerance: float  # up to which that counts as rounding: from the model's own in this dtype
    exact: bool  # proven at load: a row's bits depend on its own tokens alone, however it is batched and cut
    exactness: str  # what was proven, or what stands against it; for people
    decouplable: bool  # False: keys carry their position, truncation means recompute
    rope_layers: int
    layers: int
    kv_bytes_per_token: int  # bytes as computed
    hbm_bytes_per_token: int  # bytes in pages
    hbm_dtype: str = ""  # type of numbers in pages; empty: as they are computed
    hbm_divergence: float | None = None  # nats a token that int8 in HBM changes answers by; None: it is not int8
    hbm_tokens: int
    dram_tokens: int = 0  # tokens in DRAM, as rows or coded; some may be in it as both
    block_size: int
    page_size: int
    codec: str = "raw"  # codec of KV below DRAM, or below HBM
    lossy_codec: bool = False
    coded_bytes: float = 1.0  # size of a coded block as a share of a raw one's
    codec_divergence: float | None = None  # nats a token that the codec changes answers by; None: not measured
    selector: str = "none"  # chooses the rows of long contexts that decoding reads
    fingerprint: str  # hex
    warnings: tuple[str, ...]
    memory_plan: dict[str, int] = {}  # weights, weights_dram, hbm, graphs, dram, staging, disk, coding -> bytes


class Starting(msgspec.Struct, frozen=True, tag="starting"):
    """A sign of life of an engine whose start takes long, for example while it calibrates."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    model: ModelInfo


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The model cannot be served; the process exits and is not restarted."""

    message: str


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The log probability of a token in the distribution before penalties, temperature and filters (as OpenAI reports
    it)."""

    logprob: float
    top: list[tuple[int, float]]  # (token id, logprob), most likely first


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """The milliseconds that a choice spent in the stages of the engine, and an estimate of how much later its first
    token would have come without cached KV."""

    queue_ms: float  # arrival -> first scheduled
    load_ms: float
    prefill_ms: float  # first scheduled -> first token
    decode_ms: float  # first token -> last token
    saved_ms: float  # estimate: computing what was cached would have delayed the first token by so much more


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a prompt before its first token: how much of it is read, and what is ahead of it."""

    prompt_tokens: int
    read_tokens: int  # tokens whose KV is in HBM, found or computed; 0 while it waits
    cached_tokens: int  # tokens that were found; while it waits, near the front of the queue: that would be found now
    ahead: int  # requests that start before it; 0: it starts next, or runs
    left_ms: float | None  # estimate of what loading and computing the rest takes, once it runs; None: not known yet


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one choice, its end, or the progress of its prompt. `report`, of the tiers in which the prompt's KV
    was found, comes with a choice's first output. It comes again with the last output if it has changed: the context
    was truncated, or read in part. `timings` come with the first output and with the last."""

    request_id: str
    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: str | None  # stop | length | error
    report: TokensBySource | None
    timings: Timings | None
    error: str | None  # set with finish_reason error
    error_code: str | None  # context_length_exceeded | overloaded | invalid_grammar | internal_error
    prompt_logprobs: list[TokenLogprob] | None = None  # set in the first output, for all tokens but the first
    accepted_predictions: int = 0  # set in the last output: drafted tokens of the prediction that were right
    rejected_predictions: int = 0
    progress: Progress | None = None  # set only in outputs without tokens, before the first token


def progress_output(request_id: str, choice: int, progress: Progress) -> Output:
    """Return an output that tells how far a choice's prompt is read, and nothing else."""
    return Output(
        request_id=request_id,
        choice=choice,
        token_ids=[],
        logprobs=None,
        finish_reason=None,
        report=None,
        timings=None,
        error=None,
        error_code=None,
        progress=progress,
    )


def error_output(request_id: str, choice: int, code: str, message: str) -> Output:
    """Return an output that ends a choice with an error, or refuses one that never began."""
    return Output(
        request_id=request_id,
        choice=choice,
        token_ids=[],
        logprobs=None,
        finish_reason="error",
        report=None,
        timings=None,
        error=message,
        error_code=code,
    )


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """The outputs that one step produced."""

    outputs: list[Output]


class WaitingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A waiting request near the front of the queue, as the live view shows it."""

    request_id: str
    tenant: str
    session_id: str
    order: dict[str, float]  # what decides where it stands, by the policy's names; empty: it has run before
    hbm_tokens: int
    lower_tokens: dict[str, int]  # tier -> tokens that would have to be loaded
    bytes_to_load: int
    missing_tokens: int
    has_pages: bool  # its KV comes while others run
    waiting_s: float
    expected_start_s: float | None  # time from now; None: only after all requests that run now


class SchedulerState(msgspec.Struct, frozen=True, kw_only=True):
    """The front of the queue, and counts of what the scheduler has done since the start."""

    policy: str
    front: list[WaitingInfo]  # next first
    preemptions: int
    fair_preemptions: int  # preemptions for a tenant that had nothing running
    loads: dict[str, int]  # loads at the start of their request: finished, hidden, exposed
    step_cost: dict[str, float]  # seconds: fixed, per_token, per_kilo_pair, per_row, per_kilo_read; margin: a factor


class CodecChecks(msgspec.Struct, frozen=True, kw_only=True):
    """The results of the shadow check, in which the engine recomputes a sample of the KV that was loaded through a
    codec and compares the model's predictions. Divergences are in nats per token, without the part that rounding alone
    causes."""

    counts: list[int]  # checks by bucket (`DIVERGENCE_BOUNDS`); the last: checks above all bounds
    total: float  # divergence of all checks
    recent: float | None  # mean of the last checks
    limit: float  # mean above which the codec is used no more


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Gauges and running totals, sent about once a second; also the engine's heartbeat."""

    running: int
    waiting: int
    sessions: int
    leases: int  # pages pinned by requests
    hbm_pages_total: int
    hbm_pages_free: int
    hbm_pages_cached: int  # pages not pinned, kept for reuse
    steps: int
    step_seconds: float
    eager_decode_steps: int = 0  # steps on CUDA that only decoded and were no graphs
    prompt_tokens: dict[str, int]  # outcome (hbm, computed, ...) -> tokens since start
    generated_tokens: int
    drafted_tokens: dict[str, int]  # "context accepted", "prediction rejected" and so on -> tokens of drafts
    miss_tokens: dict[str, int]  # miss reason -> tokens since start
    evicted_blocks: int
    preemptions: int
    aborted: int
    tier_bytes: dict[str, int] = {}  # dram, disk, redis if it is used -> bytes in use
    tier_capacity: dict[str, int] = {}
    tier_problems: dict[str, str] = {}  # tier that is not used now -> why, for people
    moved_bytes: dict[str, int] = {}  # direction (`reprise.cache.moves.Transferred`) -> bytes
    moved_seconds: dict[str, float] = {}  # direction -> seconds of the thread that moved the bytes
    load_wait_seconds: float = 0.0  # load time that no computation hid
    weight_bytes: int = 0  # bytes of weights that were copied from DRAM to HBM
    weight_wait_seconds: float = 0.0  # time of these copies that no computation hid
    load_seconds: float = 0.0
    evictions: dict[str, int] = {}  # tier -> blocks that left it
    refused: dict[str, int] = {}  # tier -> blocks it had no room for
    write_failures: dict[str, int] = {}  # tier -> writes that it refused or failed in
    load_failures: dict[str, int] = {}  # reason (checksum, missing, deadline, ...) -> blocks
    truncated_tokens: int = 0
    recalled_tokens: int = 0
    in_flight: int = 0  # saves and loads under way; zero at idle
    verified_loads: int = 0
    verify_mismatches: int = 0
    offloaded_blocks: int = 0  # blocks evicted in the background
    scheduler: SchedulerState | None = None
    codec_checks: CodecChecks | None = None  # None: nothing is coded, or no load is checked
    codec_condemned: bool = False  # there is a codec, which is used no more because of such checks, now or before


ToEngine = Submit | Abort | Finish | FinishAll | SessionRequest | Adopt | Shutdown
FromEngine = Starting | Ready | Refused | Outputs | SessionReply | Head | Stats

encode = msgspec.msgpack.Encoder().encode
decode_launch = msgspec.msgpack.Decoder(Launch).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
