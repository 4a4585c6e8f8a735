"""Defines the settings as one frozen object, read once at start."""

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from reprise.app.settings.exclusions import clashes
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
    """All settings. `load_settings` reads the sources; built directly, it reads nothing."""

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
    def _check_exclusions(self) -> "Settings":
        if found := "; ".join(clashes(self)):
            raise ValueError(found)
        return self

    @property
    def places(self) -> int:
        """The most choices (answers of requests) that may run or wait at the same time."""
        return self.scheduler.max_seqs + self.scheduler.max_queued

    @property
    def tenant_places(self) -> int:
        """The most choices of one tenant that may run or wait at once."""
        several = len(self.server.api_keys) > 1 or self.server.keys_file is not None
        share = self.places // 2 if several else self.places
        return min(self.limits.key_requests or max(1, share), self.places)

    @property
    def responses_redis_url(self) -> str:
        """The URL of the Redis that stores responses and conversations; empty if a file does."""
        return self.fleet.redis_url or self.cache.redis_url.partition(",")[0]

    @property
    def state_dir(self) -> Path:
        return self.cache.disk_dir.expanduser()

    def engine_config(self, tenant_secret: bytes) -> EngineConfig:
        """Return the configuration of the engine process. Settings that have the same name and unit in the EngineConfig
        are copied by name; the others are converted here."""
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
                truncation="disabled" if cache.truncation == "disabled" else "auto",  # the app knows what has tools
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
    """Make an instance of the class `config` from the fields of `section` that have the same names. others: further
    fields, or other values for them."""
    return msgspec.convert({**section.model_dump(), **others}, config)


def _bytes(gib: float | Literal["auto"]) -> int | None:
    return None if gib == "auto" else int(gib * GIB)
