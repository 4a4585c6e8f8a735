"""Has Ray Serve place, restart, roll and scale replicas. Each of Serve's replicas owns one `reprise serve` process.

    reprise fleet up --replicas 2
    serve run reprise.fleet.ray_app:app replicas=2 --route-prefix ''

Requests do not pass through Ray: Serve's proxy is off, and gateways find the servers in the fleet's Redis. Clients'
data never reaches Ray, so none of it is pickled. The servers read their settings from the environment of the machine
that they run on.
"""

import os
import threading
from pathlib import Path
from typing import Any

# Set before Ray is imported, which is when it reads them.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from pydantic import BaseModel, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from reprise.app.settings.settings import Settings
from reprise.app.settings.sources import load_settings
from reprise.fleet.scaling import WINDOW_S
from reprise.fleet.supervise.owned_server import OwnedServer, drain_s

HEALTH_PERIOD_S = 1.0
HEALTH_TIMEOUT_S = 10.0
NAME = "reprise"  # the application's name
DEPLOYMENT = "Replica"


class Options(BaseModel, frozen=True, extra="forbid"):
    """The arguments that the application is built with: `serve run reprise.fleet.ray_app:app replicas=4`, or `args` in
    a file for `serve deploy`."""

    replicas: int = Field(2, ge=1, le=1000, description="that run at least")
    most_replicas: int | None = Field(None, ge=1, le=1000, description="that run at most; none: their number is fixed")
    ttft_target_s: float = Field(1.0, gt=0, le=3600, description="there are replicas enough to wait half as long")
    downscale_delay_s: float = Field(300.0, ge=0, le=86_400, description="so long fewer must do before one is drained")
    cpus: float = Field(1.0, ge=0, description="that Ray reserves for a replica")
    gpus: float = Field(0.0, ge=0, description="that Ray reserves for a replica; without any it sees none")
    resources: dict[str, float] = Field({}, description="of Ray that a replica takes, by name")
    config: str | None = Field(None, description="TOML file with settings, on every machine")
    version: str = Field("", description="another one replaces all replicas, one after the other")


class Replica:
    """The class that Serve instantiates in a process of its own for each replica, and whose methods it calls."""

    async def __init__(self, config: str | None, version: str) -> None:  # type: ignore[misc]  # Serve awaits it
        """Start a server and return when it takes requests. version: not used; Serve replaces replicas whose arguments
        have changed."""
        self._server = OwnedServer(
            settings_of(config), config=Path(config) if config else None, node_ip=ray.util.get_node_ip_address()
        )
        await self._server.ready()
        threading.Thread(target=self._end_with_server, name="end with server", daemon=True).start()

    async def check_health(self) -> None:
        await self._server.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return await self._server.load()

    def __del__(self) -> None:
        """Drain the server. Serve calls this when the replica is to end, and waits for
        `graceful_shutdown_timeout_s`."""
        if (server := getattr(self, "_server", None)) is not None:
            server.drain()

    def _end_with_server(self) -> None:
        """End this process when the server has ended. Serve replaces a process that is gone at once, and one that is
        unhealthy only after three checks."""
        self._server.wait()
        if not self._server.is_draining:
            os._exit(1)


def settings_of(config: str | None) -> Settings:
    """Return the settings of this machine. Raises SettingsError, ValueError if they describe no fleet."""
    settings = load_settings(flags={}, environ=os.environ, config=Path(config) if config else None)
    if not settings.fleet.is_on:
        raise ValueError("a replica needs fleet.redis_url, the Redis in which the fleet is")
    return settings


def app(options: Options) -> serve.Application:
    """Build the application. Raises what `settings_of` does."""
    scaling: dict[str, Any] = {"num_replicas": options.replicas}
    if options.most_replicas is not None and options.most_replicas > options.replicas:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=options.replicas,
                initial_replicas=options.replicas,
                max_replicas=options.most_replicas,
                # The policy averages and waits by itself; Serve only delays a descent.
                upscale_delay_s=0.0,
                downscale_delay_s=options.downscale_delay_s,
                look_back_period_s=WINDOW_S,
                policy=AutoscalingPolicy(
                    policy_function="reprise.fleet.supervise.policy:Policy",
                    policy_kwargs={"ttft_target_s": options.ttft_target_s},
                ),
            )
        }
    deployment = serve.deployment(
        Replica,
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus, "resources": options.resources},
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=drain_s(settings_of(options.config)) + HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=0.1,
        **scaling,
    )
    return deployment.bind(options.config, options.version)
