"""The sections of the settings. Every default of the project lives here."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

ORIGIN = re.compile(r"[a-z][a-z0-9+.\-]*://[^\s/]+")
REDIS_URL = r"^((rediss?|unix)://\S+)?$"


def _comma_separated(value: object) -> object:
    """Return a list of words, given as `a,b` by a flag or the environment, or as a list by TOML."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _not_empty(value: object) -> object:
    """Refuse an empty path, which would stand for the directory that the server is started in."""
    if value == "":
        raise ValueError("is empty")
    return value


NamedPath = Annotated[Path, BeforeValidator(_not_empty)]
NameList = Annotated[tuple[str, ...], BeforeValidator(_comma_separated)]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


ANY_NAME = "*"  # the alias that stands for any name
# The names of `reprise.app.text.families`.
CallFamily = Literal[
    "auto", "apertus", "command", "deepseek-v3", "deepseek-v3.1", "deepseek-v3.2", "functiongemma", "gemma", "glm",
    "granite", "harmony", "hermes", "hunyuan", "internlm", "kimi", "lfm2", "llama", "longcat", "mimo", "minimax",
    "mistral", "mistral-args", "nemotron", "olmo", "phi", "pythonic", "qwen-coder", "seed",
]  # fmt: skip
ThoughtFamily = Literal["auto", "none", "command", "gemma", "granite", "harmony", "mistral", "seed", "think"]


class ModelSettings(Section):
    source: str = Field(
        "",
        max_length=4096,
        description="directory, .gguf file, hub id or `bundled`; empty: SmolLM2-135M-Instruct if `make setup` has "
        "brought it, else the bundled demonstration",
    )
    aliases: NameList = Field(
        (),
        description="further names under which requests may ask for the model; *: any name, such as those that clients "
        "have built in",
    )
    max_context: int = Field(
        0, ge=0, le=1 << 24, description="context window in tokens; 0: what the model was made for"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="compute and KV type")
    weights: Literal["auto", "bf16", "q8", "q4"] = Field(
        "auto",
        description="how weights are kept in memory; auto: those of a GGUF file or a quantised checkpoint as packed as "
        "they are in it, others as they are; bf16: unpacked; q8, q4: packed to 8 or 4 bits at the first start, which "
        "changes answers a little",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="processes of one machine that share the model out, each with its part of the heads; on CUDA one "
        "for each device",
    )
    exact: Literal["auto", "on", "off"] = Field(
        "auto",
        description="on: bits of an answer depend on its own tokens alone, proven at start, whatever that costs; auto: "
        "the fastest kernels, and what they prove; off: no proof",
    )
    calls: CallFamily = Field(
        "auto", description="the family in whose form the model writes calls; auto: the one that its template shows"
    )
    thoughts: ThoughtFamily = Field(
        "auto", description="the family in whose form the model marks thoughts; auto: the one that its template shows"
    )


Codec = Literal["raw", "transform", "activation"]
CODECS: tuple[str, ...] = get_args(Codec)


class CacheSettings(Section):
    mode: Literal["attentionstore", "prefix", "recompute"] = Field(
        "attentionstore", description="keep KV in HBM, DRAM and on disk; in HBM only; or compute it anew"
    )
    policy: Literal["lookahead", "lru", "fifo"] = Field("lookahead", description="what leaves a full tier first")
    hbm_tokens: int = Field(0, ge=0, le=1 << 31, description="tokens of KV in HBM; 0: from free memory")
    ttl_s: float = Field(
        86_400.0,
        gt=0,
        le=1e9,
        description="KV and transcript of a session are deleted this long after its last use; pinned ones stay",
    )
    max_sessions: int = Field(10_000, ge=1, le=10_000_000, description="sessions the engine keeps track of")
    dram_gib: Annotated[float, Field(ge=0, le=1 << 16)] | Literal["auto"] = Field(
        "auto", description="KV in DRAM; auto: a share of free memory; 0 turns the tier off"
    )
    disk_gib: Annotated[float, Field(ge=0, le=1 << 20)] | Literal["auto"] = Field(
        "auto", description="KV on disk; auto: a share of free space; 0 turns the tier off"
    )
    disk_dir: NamedPath = Field(Path("~/.cache/reprise"), description="state files: KV, transcripts, the tenant secret")
    disk_min_free_gib: float = Field(
        2.0, ge=0, le=1 << 20, description="space of the file system that is left to others"
    )
    larger_than_hbm: bool = Field(
        False, description="a context may be as long as DRAM holds: what HBM has no room for is read from there, slowly"
    )
    hbm_dtype: Literal["auto", "int8"] = Field(
        "auto",
        description="numbers of KV in HBM on CPU; auto: as they are computed; int8: half the bytes, lossy within "
        "codec_budget",
    )
    truncation: Literal["chats", "auto", "disabled"] = Field(
        "chats",
        description="a full window: auto drops the earliest history, disabled answers 400, chats drops it except in "
        "requests with tools: an agent would lose its task, and shortens its history itself after a 400",
    )
    block_scorer: Literal["oldest", "attended"] = Field(
        "oldest",
        description="what a full window drops first: the oldest; what later text attended to least",
    )
    recall: bool = Field(
        False, description="bring back what a full window dropped, where the newest message is about it"
    )
    keep_first_tokens: int = Field(
        -1, ge=-1, le=1 << 24, description="leading tokens that are never dropped; -1: the system prompt"
    )
    client_shift: bool = Field(
        False, description="serve histories that the client shortened from saved KV at new positions"
    )
    verify_rate: float = Field(0.0, ge=0, le=1, description="share of loads that are checked against a recompute")
    codec: Codec = Field(
        "raw",
        description="what KV becomes on disk and in Redis, and in DRAM once it is not warm; transform is lossy, and "
        "calibrated to codec_budget; activation keeps what KV is computed of instead, for models where that is smaller",
    )
    codec_budget: float = Field(
        0.001,
        ge=1e-6,
        le=1.0,
        description="nats a token by which transform may change what the model would say, and hbm_dtype int8 too",
    )
    redis_url: str = Field(
        "",
        max_length=2048,
        repr=False,
        pattern=REDIS_URL,
        description="redis://HOST:PORT/DB that keeps responses and conversations, for several servers; empty: a file; "
        "with fleet.redis_url, that one keeps them; with redis_gib, KV too, and then several may be named, with commas",
    )
    redis_gib: float = Field(
        0.0, ge=0, le=1 << 20, description="KV that each Redis of redis_url keeps for all servers together; 0: none"
    )


class SchedulerSettings(Section):
    policy: Literal["due", "car", "fcfs"] = Field(
        "due",
        description="which request starts next; due: by arrival and work; car: by KV to load, inside a window, as the "
        "paper CaR says; fcfs: by arrival",
    )
    patience: float = Field(
        8.0,
        ge=0,
        le=1000,
        description="how many seconds of waiting a second of work is worth to `due`: larger lets short requests pass "
        "long ones more; 0: by arrival",
    )
    itl_target_ms: Annotated[float, Field(ge=0, le=60_000)] | Literal["auto"] = Field(
        "auto",
        description="longest step while an answer is written; auto: weighed against first tokens; 0: no target",
    )
    max_seqs: int = Field(32, ge=1, le=4096, description="sequences running at once")
    max_queued: int = Field(256, ge=1, le=100_000, description="sequences waiting at once; more are answered 503")
    draft_tokens: int = Field(
        7, ge=0, le=31, description="most tokens drafted from the past for a step on CPU, while that pays; 0: none"
    )


class EngineSettings(Section):
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of the engine; 0: all cores")
    step_tokens: int = Field(
        0,
        ge=0,
        le=1 << 20,
        description="most tokens of a step; 0: 512 on CPU, 4096 on CUDA, four times that while nobody decodes",
    )


class ServerSettings(Section):
    host: str = Field("127.0.0.1", min_length=1, max_length=255, description="address to listen on")
    port: int = Field(8000, ge=0, le=65_535, description="port to listen on; 0: any free one")
    api_keys: NameList = Field(
        (), repr=False, description="accepted bearer keys, comma-separated; none: no keys needed"
    )
    admin_keys: NameList = Field(
        (),
        repr=False,
        description="bearer keys that see all tenants' sessions, the queue and the cache; without any keys these are "
        "open",
    )
    keys_file: NamedPath | None = Field(
        None,
        description="further keys, hashed, each with its own limits; `reprise keys` writes it; readable by its owner "
        "alone",
    )
    hostnames: NameList = Field(
        (), description="names with a dot by which a server without keys may be asked; addresses and others always may"
    )
    cors_origins: NameList = Field(
        (),
        description="pages elsewhere whose scripts may ask, as https://chat.example.org; *: any, where keys are needed",
    )
    allow_unauthenticated: bool = Field(False, description="listen beyond loopback although there are no keys")
    drain_s: float = Field(30.0, ge=0, le=86_400, description="at SIGTERM running answers may go on for this long")
    responses_ttl_s: float = Field(
        30 * 86_400.0,
        gt=0,
        le=1e9,
        description="stored responses and conversations are forgotten this long after their last use",
    )
    access_log: bool = Field(
        False, description="one log line per request, and one per answer with its tokens by tier; never its text"
    )
    log_format: Literal["text", "json"] = Field("text", description="log lines for people, or JSON objects")
    traces_endpoint: str = Field(
        "",
        max_length=2048,
        pattern=r"^(https?://\S+)?$",
        description="where OpenTelemetry traces go, as http://127.0.0.1:4318/v1/traces; empty: nowhere",
    )

    tenant_secret_file: NamedPath | None = Field(
        None,
        description="32 bytes or 64 hex digits that keep tenants' KV apart; the same file on every server of a "
        "fleet; without one: made once, in cache.disk_dir",
    )

    @model_validator(mode="after")
    def _check_keys_and_origins(self) -> "ServerSettings":
        for key in (*self.api_keys, *self.admin_keys):
            if not (8 <= len(key) <= 512 and key.isascii() and key.isprintable() and " " not in key):
                raise ValueError(
                    "server.api_keys and server.admin_keys: each has 8 to 512 printable ASCII characters without spaces"
                )
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError("server.cors_origins: each is a scheme, a host and perhaps a port, or *")
        has_keys = bool(self.api_keys or self.admin_keys or self.keys_file is not None)
        if "*" in self.cors_origins and not has_keys:
            raise ValueError(
                "server.cors_origins: where no keys are needed, * would let every page that somebody here opens use "
                "the server; name the pages, or set server.api_keys"
            )
        if not (has_keys or self.allow_unauthenticated or _is_loopback(self.host)):
            raise ValueError(
                f"server.host: listening on {self.host} lets others in; set server.api_keys or "
                "server.keys_file, or server.allow_unauthenticated=true to let anybody in"
            )
        return self


class FleetSettings(Section):
    """Settings of a server that is one replica of several, and of the gateway before them."""

    redis_url: str = Field(
        "",
        max_length=2048,
        repr=False,
        pattern=REDIS_URL,
        description="redis://HOST:PORT/DB that says which server has which conversation; it keeps responses and "
        "conversations too, and needs maxmemory-policy noeviction; empty: this server is alone",
    )
    advertise: str = Field(
        "",
        max_length=2048,
        pattern=r"^(https?://[^\s/]+)?$",
        description="http://HOST:PORT under which gateways reach this server; empty: the address it listens on, or the "
        "machine's name where it listens on all",
    )
    replica: str = Field(
        "",
        max_length=64,
        pattern=r"^[A-Za-z0-9._-]*$",
        description="this server's name in the fleet, the same after a restart; empty: made once, in cache.disk_dir",
    )
    deadline_ms: float = Field(
        50.0, gt=0, le=10_000, description="longest wait for the fleet's Redis, before a turn and at its end"
    )
    transcripts: bool = Field(
        True,
        description="keep token ids and texts in the fleet's Redis, so that any server goes on with any conversation; "
        "false: routes only, and a server that takes over tokenizes the text anew",
    )
    held_mib: int = Field(
        1024,
        ge=1,
        le=1 << 20,
        description="memory of a gateway for requests under way: bodies, answers, and what is needed to resume them",
    )

    @property
    def is_on(self) -> bool:
        return bool(self.redis_url)


class LimitSettings(Section):
    """Caps, all of them checked before any work is done. A limit whose name begins with `key_` holds for every key
    whose entry in the keys file sets no other."""

    connections: int = Field(1000, ge=1, le=1 << 20, description="connections at once; more are answered 503")
    body_bytes: int = Field(8 << 20, ge=1024, le=1 << 30, description="largest request body")
    request_timeout_s: float = Field(
        3600.0, gt=0, le=86_400, description="longest time from a request's arrival to the end of its answer"
    )
    prompt_tokens: int = Field(1_000_000, ge=1, le=1 << 30, description="longest history that is taken at all")
    answer_tokens: int = Field(65_536, ge=1, le=1 << 30, description="longest answer that goes on beyond the window")
    key_requests: int = Field(
        0,
        ge=0,
        le=1 << 20,
        description="answers that one key may have under way; 0: half of all where there are several keys, else all",
    )
    key_requests_per_minute: int = Field(
        0, ge=0, le=1 << 30, description="requests with a body that one key may send; 0: any number"
    )
    key_tokens_per_minute: int = Field(
        0, ge=0, le=1 << 40, description="tokens of its prompts and answers; 0: any number"
    )
    key_sessions: int = Field(
        0, ge=0, le=1 << 30, description="conversations kept for one key, the longest unused leave first; 0: any number"
    )
    key_cache_gib: float = Field(
        0.0,
        ge=0,
        le=1 << 20,
        description="KV kept for one key in all tiers, the longest unused leaves first; 0: any amount",
    )


class SelectorSettings(Section):
    """The part of its context that a decoding sequence reads. Nothing is dropped: the next token may read other
    parts."""

    name: Literal["none", "pairs", "infinigen"] = Field(
        "none",
        description="chooses the tokens that are read; all but none are lossy: pairs by a few dims of each key; for "
        "comparison infinigen, by a guess made one layer ahead",
    )
    min_context: int = Field(2048, ge=128, le=1 << 24, description="contexts of fewer tokens are read whole")
    share: float = Field(
        0.1, gt=0, le=1, description="share of a context's tokens that is read, in each layer and KV head"
    )


class WeightSettings(Section):
    """The memory in which the model's weights lie: HBM, or DRAM for models that do not fit into HBM."""

    offload: Literal["none", "dram"] = Field(
        "none",
        description="dram: the layers' weights stay in memory, and pass through HBM in every step, each while the "
        "layers before it compute",
    )
    hbm_layers: int = Field(0, ge=0, le=4096, description="number of layers whose weights stay in HBM all the same")
