"""Runs a whole fleet on this machine: Ray, the replicas that Ray Serve runs, and a gateway in front of them."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from reprise.app.settings.settings import Settings
from reprise.fleet.supervise.owned_process import OwnedProcess, ProcessEnded
from reprise.fleet.supervise.owned_server import address, drain_s

# Ray reads these when it is imported or starts. Whoever has set them is not overruled.
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # When the head has been gone for so long, Ray ends the replicas, which need none to serve.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
    # Ray runs its workers, and so the servers that they own, at nice 15.
    "RAY_worker_niceness": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
}
OBJECT_STORE_BYTES = 100 << 20  # nothing is put there; Ray wants 75 MiB
LOOK_S = 0.5
GATEWAY_READY_S = 120.0
AGAIN_S = 1.0  # between the end of a gateway and the start of the next
RAY_ENDS_S = 30.0


class FleetFailed(Exception):
    """The fleet did not start. The message is for people."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The number of replicas, and the rules by which it grows and shrinks."""

    replicas: int  # at least
    most_replicas: int | None  # at most; None: their number is fixed
    ttft_target_s: float
    downscale_delay_s: float
    gpus: float | None  # GPUs of each replica; None: 1 if there is any


class LocalFleet:
    """A fleet on this machine, whose replicas and gateway read their settings from our environment."""

    def __init__(
        self,
        settings: Settings,
        scale: Scale,
        *,
        gateway: list[str] | None,
        config: Path | None,
        tell: Callable[[str], None],
    ) -> None:
        """Set up. settings: from the environment and `config`. gateway: its arguments; None: there is none. tell: shows
        a line to people. Raises ImportError without Ray."""
        os.environ.update({name: value for name, value in RAY_SETTINGS.items() if name not in os.environ})
        from reprise.fleet import ray_app

        self._settings, self._tell = settings, tell
        self._options = ray_app.Options(
            # One machine is enough for all: what does not fit is told by the servers, not by counting cores.
            replicas=scale.replicas, most_replicas=scale.most_replicas, ttft_target_s=scale.ttft_target_s,
            downscale_delay_s=scale.downscale_delay_s, cpus=0, gpus=scale.gpus or 0,
            config=str(config.absolute()) if config is not None else None,
        )  # fmt: skip
        self._finds_gpus = scale.gpus is None
        self._gateway_arguments = gateway
        self._gateway: OwnedProcess | None = None
        self._is_to_roll = False

    def run(self) -> None:
        """Start everything and run it until SIGINT or SIGTERM; then drain it. A second signal ends it at once. SIGHUP
        replaces the replicas, one after the other. Raises FleetFailed."""
        import ray

        with _interrupted_by_signals():
            try:
                self._start()
                while True:
                    self._look_after_gateway()
                    if self._is_to_roll:
                        self._is_to_roll = False
                        self._roll()
                    time.sleep(LOOK_S)
            except KeyboardInterrupt:
                self._tell("draining; again ends it at once")
                with suppress(KeyboardInterrupt):
                    self._drain()
            finally:
                if self._gateway is not None:
                    self._gateway.kill()
                _in_time(ray.shutdown, RAY_ENDS_S)

    def _start(self) -> None:
        """Start everything. Raises FleetFailed."""
        self._tell("starting Ray")
        try:
            self._start_ray()
        except Exception as error:  # Ray raises many kinds
            raise FleetFailed(f"Ray does not start: {error}") from error
        self._tell(f"starting {self._options.replicas} replicas")
        is_up = threading.Event()
        threading.Thread(target=self._tell_progress, args=(is_up,), daemon=True).start()
        try:
            self._deploy()
        except RuntimeError as error:
            raise FleetFailed(f"the replicas do not start: {error}") from None
        finally:
            is_up.set()
        self._start_gateway()

    def _start_ray(self) -> None:
        import ray

        from reprise.fleet.supervise.cluster import start_serve

        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=True,
            logging_level="error",
        )
        # Ray takes SIGTERM for itself.
        signal.signal(signal.SIGTERM, _interrupt)
        signal.signal(signal.SIGHUP, self._on_hangup)
        if self._finds_gpus and ray.cluster_resources().get("GPU", 0) >= 1:
            self._options = self._options.model_copy(update={"gpus": 1.0})
        start_serve()

    def _deploy(self) -> None:
        """Start the replicas and return when all serve. Raises RuntimeError."""
        from reprise.fleet.supervise.cluster import run_servers

        run_servers(self._options)

    def _tell_progress(self, is_up: threading.Event) -> None:
        from ray import serve

        from reprise.fleet import ray_app

        told = 0
        while not is_up.wait(LOOK_S):
            with suppress(Exception):  # Ray's many: it is not there yet, or no more
                states: dict[Any, int] = (
                    serve.status().applications[ray_app.NAME].deployments[ray_app.DEPLOYMENT].replica_states
                )
                ready = states.get("RUNNING", 0)
                if ready != told:
                    self._tell(f"{ready} of {self._options.replicas} replicas serve")
                    told = ready

    def _start_gateway(self) -> None:
        """Start the gateway and wait until it answers. Raises FleetFailed."""
        if self._gateway_arguments is None:
            self._tell("ready; Ctrl-C ends it")
            return
        server = self._settings.server
        url = address("127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host, server.port)
        self._gateway = OwnedProcess(["gateway", *self._gateway_arguments])
        end_s = time.monotonic() + GATEWAY_READY_S
        while not _answers(f"{url}/ready"):
            try:
                self._gateway.must_live()
            except ProcessEnded as error:
                raise FleetFailed(str(error)) from None
            if time.monotonic() > end_s:
                raise FleetFailed(f"the gateway does not answer at {url}")
            time.sleep(LOOK_S)
        self._tell(f"ready at {url}; Ctrl-C ends it")

    def _look_after_gateway(self) -> None:
        """Start another gateway if the gateway has ended, which loses nothing, since it stores nothing."""
        if self._gateway is not None and self._gateway_arguments is not None and not self._gateway.is_alive:
            self._tell("the gateway has ended; starting another")
            time.sleep(AGAIN_S)
            self._gateway = OwnedProcess(["gateway", *self._gateway_arguments])

    def _on_hangup(self, *_: object) -> None:
        self._is_to_roll = True

    def _roll(self) -> None:
        """Replace the replicas, one after the other, on a thread: without its head Ray does not answer."""

        def deploy() -> None:
            try:
                self._deploy()
                self._tell("all replicas are replaced")
            except Exception as error:
                self._tell(f"the replicas are not replaced: {error}")

        self._tell("replacing the replicas")
        self._options = self._options.model_copy(update={"version": str(time.time_ns())})
        threading.Thread(target=deploy, daemon=True).start()

    def _drain(self) -> None:
        """Let the gateway finish its answers and end, then the replicas."""
        import ray
        from ray import serve

        from reprise.fleet import ray_app

        def delete() -> None:
            while ray.is_initialized():
                with suppress(TimeoutError):  # after a minute; answers may take longer
                    serve.delete(ray_app.NAME)
                    return

        if self._gateway is not None:
            self._gateway.stop(drain_s(self._settings))
        _in_time(delete, drain_s(self._settings) + RAY_ENDS_S)


def _answers(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(url, timeout=5).status_code == 200
    return False


def _in_time(call: Callable[[], object], timeout_s: float) -> None:
    """Call a function of Ray, which does not return while Ray's head is gone. Goes on after `timeout_s`."""

    def quietly() -> None:
        with suppress(Exception):
            call()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(timeout_s)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM and SIGINT, which shells have background jobs ignore."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers[:2]:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
