"""Settings: one frozen object, read once at start."""

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from reprise.app.settings.experiment import ExperimentSettings
from reprise.app.settings.sections import (
    CacheSettings,
    EngineSettings,
    FleetSettings,
    LimitSettings,
    ModelSettings,
    SchedulerSettings,
    Section,
    SelectorSettings,
    ServerSettings,
    WeightSettings,
)
from reprise.engine.config import (
    CacheConfig,
    EngineConfig,
    ExperimentConfig,
    ModelConfig,
    SchedulerConfig,
    SelectorConfig,
    WeightsConfig,
)
from reprise.model.directories import source_of

ENV_PREFIX = "REPRISE_"
GIB = 1 << 30
MIB = 1 << 20
Config = TypeVar("Config", ModelConfig, CacheConfig, SchedulerConfig, SelectorConfig, WeightsConfig, ExperimentConfig)


class Settings(Section, BaseSettings):
    """All of it. `load_settings` reads the sources; built directly, it reads nothing."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, env_nested_delimiter="__", enable_decoding=False)

    model: ModelSettings = ModelSettings()
    cache: CacheSettings = CacheSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    engine: EngineSettings = EngineSettings()
    selector: SelectorSettings = SelectorSettings()
    weights: WeightSettings = WeightSettings()
    server: ServerSettings = ServerSettings()
    fleet: FleetSettings = FleetSettings()
    limits: LimitSettings = LimitSettings()
    experiment: ExperimentSettings = ExperimentSettings()

    @classmethod
    def settings_customise_sources(cls, *_: Any, **sources: Any) -> tuple[Any, ...]:
        return (sources["init_settings"],)

    @model_validator(mode="after")
    def _codes_nothing_that_has_to_be_exact(self) -> "Settings":
        if self.cache.codec != "raw" and self.model.exact == "on":
            raise ValueError(
                "cache.codec: model.exact on excludes lossy codecs, and activation, which computes K and V anew; "
                "set codec to raw"
            )
        if self.cache.codec != "raw" and self.model.tensor_parallel > 1:
            raise ValueError(
                "cache.codec: KV that is split among processes cannot be coded yet; set model.tensor_parallel to 1, or "
                "cache.codec to raw"
            )
        return self

    @model_validator(mode="after")
    def _packs_pages_that_are_read_whole(self) -> "Settings":
        needed = {
            "engine.device auto or cpu": self.engine.device != "cuda",
            "model.dtype auto or bfloat16": self.model.dtype in ("auto", "bfloat16"),
            "model.tensor_parallel 1": self.model.tensor_parallel == 1,
            "selector.name none": self.selector.name == "none",
            "cache.larger_than_hbm false": not self.cache.larger_than_hbm,
        }
        missing = [setting for setting, is_met in needed.items() if not is_met]
        if self.cache.hbm_dtype == "int8" and missing:
            raise ValueError(f"cache.hbm_dtype int8: needs {', '.join(missing)}")
        return self

    @model_validator(mode="after")
    def _reads_in_part_only_what_may_differ(self) -> "Settings":
        if self.selector.name != "none" and self.model.exact == "on":
            raise ValueError("selector.name: reading in part and model.exact on exclude each other; set it to none")
        if self.selector.name != "none" and self.model.tensor_parallel > 1:
            raise ValueError(
                "selector.name: heads that are split among processes are read whole; set model.tensor_parallel to 1, "
                "or selector.name to none"
            )
        return self

    @model_validator(mode="after")
    def _reads_dram_as_it_can(self) -> "Settings":
        needed = {
            "cache.mode attentionstore": self.cache.mode == "attentionstore",
            "cache.dram_gib above 0": self.cache.dram_gib != 0,
            "cache.codec raw": self.cache.codec == "raw",
            "selector.name none": self.selector.name == "none",
            "model.exact auto or off": self.model.exact != "on",
            "model.tensor_parallel 1": self.model.tensor_parallel == 1,
            "experiment.chunked_prefill true": self.experiment.chunked_prefill,
        }
        missing = [setting for setting, is_met in needed.items() if not is_met]
        if self.cache.larger_than_hbm and missing:
            raise ValueError(f"cache.larger_than_hbm: needs {', '.join(missing)}")
        return self

    @model_validator(mode="after")
    def _offloads_weights_that_nobody_else_needs(self) -> "Settings":
        needed = {
            "cache.codec other than activation": self.cache.codec != "activation",
            "selector.name other than infinigen": self.selector.name != "infinigen",
            "model.exact auto or off": self.model.exact != "on",
            "model.tensor_parallel 1": self.model.tensor_parallel == 1,
        }
        missing = [setting for setting, is_met in needed.items() if not is_met]
        if self.weights.offload != "none" and missing:
            raise ValueError(f"weights.offload: needs {', '.join(missing)}")
        return self

    @model_validator(mode="after")
    def _keeps_no_parts_of_heads_in_redis(self) -> "Settings":
        if self.cache.redis_gib and self.model.tensor_parallel > 1:
            raise ValueError(
                "model.tensor_parallel: more than one process cannot keep KV in Redis yet; set it to 1, or "
                "cache.redis_gib to 0"
            )
        return self

    @property
    def places(self) -> int:
        """Choices under way at once, running and waiting."""
        return self.scheduler.max_seqs + self.scheduler.max_queued

    @property
    def tenant_places(self) -> int:
        """Choices of one tenant under way at once, running and waiting."""
        several = len(self.server.api_keys) > 1 or self.server.keys_file is not None
        share = self.places // 2 if several else self.places
        return min(self.limits.key_requests or max(1, share), self.places)

    @property
    def responses_redis_url(self) -> str:
        """The Redis that keeps responses and conversations; empty: a file does."""
        return self.fleet.redis_url or self.cache.redis_url.partition(",")[0]

    @property
    def state_dir(self) -> Path:
        return self.cache.disk_dir.expanduser()

    def engine_config(self, tenant_secret: bytes) -> EngineConfig:
        """What the engine process is told. A value of the same name and unit is handed on as it is."""
        cache, target = self.cache, self.scheduler.itl_target_ms
        return EngineConfig(
            model=_told(ModelConfig, self.model, source=source_of(self.model.source)),
            cache=_told(
                CacheConfig,
                cache,
                dram_bytes=_bytes(cache.dram_gib),
                disk_bytes=_bytes(cache.disk_gib),
                disk_dir=str(self.state_dir.absolute()),
                disk_min_free_bytes=_bytes(cache.disk_min_free_gib),
                redis_urls=tuple(filter(None, cache.redis_url.split(","))),
                redis_bytes=_bytes(cache.redis_gib),
            ),
            scheduler=_told(
                SchedulerConfig,
                self.scheduler,
                itl_target_s=None if target == "auto" else target / 1e3,
                max_queued=self.places,  # a burst waits, all of it, until the next step; who may wait is decided here
            ),
            selector=_told(SelectorConfig, self.selector),
            weights=_told(WeightsConfig, self.weights),
            experiment=_told(ExperimentConfig, self.experiment, staging_bytes=self.experiment.staging_mib * MIB),
            device=self.engine.device,
            threads=self.engine.threads,
            step_tokens=self.engine.step_tokens,
            tenant_secret=tenant_secret,
        )


def _told(config: type[Config], section: Section, **others: Any) -> Config:
    """The fields that `config` shares with a section of the settings, and `others` in place of or besides these."""
    return msgspec.convert({**section.model_dump(), **others}, config)


def _bytes(gib: float | Literal["auto"]) -> int | None:
    return None if gib == "auto" else int(gib * GIB)
