"""Models of the answers about the server: its models, cache, health and fleet."""

from typing import Any, Literal

from pydantic import Field

from reprise.app.schemas.answers.shared import Answer


class Tokens(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Answer):
    prompt: str


class DefaultSampling(Answer):
    """The parameters of a request that gives none: the model's generation_config.json, else OpenAI's defaults."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Model(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    context_length: int
    context_window: int
    max_output_tokens: int = Field(description="how much of the window to keep free for an answer; it may be longer")
    meta: dict[str, int]
    supported_parameters: list[str]
    default_sampling: DefaultSampling
    capabilities: dict[str, bool | str]
    template: dict[str, str]


class ModelList(Answer):
    object: Literal["list"]
    data: list[Model]
    models: list[Any] | None = None


class Props(Answer):
    default_generation_settings: dict[str, int]
    total_slots: int
    model_alias: str
    modalities: dict[str, bool]


class TierUse(Answer):
    used_bytes: int
    capacity_bytes: int


class CacheStatsObject(Answer):
    object: Literal["cache.stats"]
    mode: str
    sessions: int
    tiers: dict[str, TierUse]
    problems: dict[str, str]  # tier that is not used now -> why; "state": transcripts and responses
    prompt_tokens: dict[str, int]
    hit_rate: float | None
    hit_rates: dict[str, float | None]
    miss_tokens: dict[str, int]
    moved_bytes: dict[str, int]
    moved_seconds: dict[str, float]
    load_seconds: float
    load_wait_seconds: float
    evicted_blocks: dict[str, int]
    refused_blocks: dict[str, int]
    load_failures: dict[str, int]
    write_failures: dict[str, int]
    truncated_tokens: int
    recalled_tokens: int
    verified_loads: int
    verify_mismatches: int
    leases: int
    in_flight: int


class CacheCleared(Answer):
    object: Literal["cache.cleared"]
    removed: int
    running: int


class Health(Answer):
    status: Literal["ok"]
    engine: str
    # state of the circuit breaker for Redis; closed: Redis is used
    redis: Literal["closed", "open", "half_open"] | None = None
    # away: it does not answer, and is used again when it does; the last three: it is read, and nothing new is kept;
    # failing also: a file of it could not be opened, and is used after a restart
    disk: Literal["used", "away", "full", "read_only", "failing"] | None = None
    disk_problem: str | None = None  # why the disk keeps no new transcripts and responses


class FleetReplica(Answer):
    replica: str
    url: str
    state: str  # what it says of itself
    open: bool  # gateways send it turns
    silent: bool
    drained: bool  # by an operator
    model: str
    fingerprint: str
    version: str
    running: int
    waiting: int
    wait_s: float | None  # time until a new prompt would be started
    busy: float | None  # share of the last seconds in which it computed
    sessions: int  # sessions whose home it is
    tiers: dict[str, TierUse]


class FleetRedis(Answer):
    state: Literal["ok", "away"]
    failures: int


class FleetKv(Answer):
    used_bytes: int
    budget_bytes: int


class Fleet(Answer):
    object: Literal["fleet"]
    redis: FleetRedis
    kv: FleetKv | None  # the fleet's KV in Redis
    states: dict[str, int]
    replicas: list[FleetReplica]
    has_more: bool
    gateway: dict[str, Any] | None  # what a gateway has counted


class ReadyStatus(Answer):
    status: Literal["ready"]
    model: str


class Version(Answer):
    version: str
    wire_version: int
    python: str


class SchedulerObject(Answer):
    object: Literal["scheduler"]
    running: int
    waiting: int
    policy: str
    front: list[dict[str, Any]]
