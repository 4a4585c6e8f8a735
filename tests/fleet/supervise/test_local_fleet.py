"""Tests what a fleet on one machine does from its start to its end, with neither Ray nor processes: what it starts,
what it starts again, what signals do, and that nothing is left of it."""

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from reprise.app.settings.settings import Settings
from reprise.fleet.supervise import local_fleet
from reprise.fleet.supervise.local_fleet import RAY_SETTINGS, FleetFailed, LocalFleet, Scale
from reprise.fleet.supervise.owned_process import ProcessEnded
from tests.fleet.supervise.fake_ray import FakeRay, fake_ray

URL = "http://127.0.0.1:8123"
DRAIN_S = 40.0
SOON_S = 30.0  # longest wait of a test for what another thread does
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
READY = f"ready at {URL}; Ctrl-C ends it"
Story = Generator[None, None, None]


@dataclass
class FakeGateway:
    """An `OwnedProcess` that is none."""

    world: "World"
    arguments: Sequence[str]
    is_alive: bool = True
    stopped: list[float] = field(default_factory=list)
    is_killed: bool = False

    def must_live(self) -> None:
        if not self.is_alive:
            raise ProcessEnded("`reprise gateway` ended with status 2\nno such setting")

    def stop(self, timeout_s: float) -> None:
        self.stopped.append(timeout_s)
        self.world.order.append("gateway stops")
        self.world.on_stop()
        self.is_alive = False

    def kill(self) -> None:
        self.is_killed, self.is_alive = True, False


@dataclass
class World:
    """All that a local fleet meets. Each time that the fleet sleeps, its story goes on by one step."""

    ray: FakeRay
    story: Story | None = None
    told: list[str] = field(default_factory=list)
    gateways: list[FakeGateway] = field(default_factory=list)
    answers: list[int | Exception] = field(default_factory=list)  # answers of /ready; then it is 200
    asked: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)  # names of what has ended, the first one first
    slept: list[float] = field(default_factory=list)
    now_s: float = 0.0
    on_gateway: Callable[[FakeGateway], None] = lambda gateway: None
    on_stop: Callable[[], None] = lambda: None

    def start_gateway(self, arguments: Sequence[str]) -> FakeGateway:
        gateway = FakeGateway(self, arguments)
        self.gateways.append(gateway)
        self.on_gateway(gateway)
        return gateway

    def get(self, url: str, *, timeout: float) -> Any:
        self.asked.append(url)
        answer = self.answers.pop(0) if self.answers else 200
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(status_code=answer)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds
        if self.story is not None:
            try:
                next(self.story)
            except StopIteration:
                raise AssertionError("the fleet goes on after its story") from None

    def fleet(
        self, *, gateway: bool = True, config: Path | None = None, host: str = "127.0.0.1", **scale: Any
    ) -> LocalFleet:
        usual = {"replicas": 2, "most_replicas": None, "ttft_target_s": 1.0, "downscale_delay_s": 300.0, "gpus": None}
        settings = Settings.model_validate(
            {
                "fleet": {"redis_url": "redis://127.0.0.1:1/0"},
                "server": {"host": host, "port": 8123, "allow_unauthenticated": True},
            }
        )
        return LocalFleet(
            settings, Scale(**{**usual, **scale}), gateway=["--port", "8123"] if gateway else None, config=config,
            tell=self.told.append,
        )  # fmt: skip

    def live(self, story: Story, **options: Any) -> None:
        """Run a fleet to its end."""
        self.story = story
        self.fleet(**options).run()

    def until(self, condition: Callable[[], object]) -> Story:
        """Let the fleet go on until something is so that another thread does."""
        waited = threading.Event()
        for _ in range(int(SOON_S / 0.01)):
            if condition():
                return
            waited.wait(0.01)
            yield
        raise AssertionError("it does not become so")


def nobody_took_it(number: int, _: object) -> None:
    raise AssertionError(f"signal {number} is not taken")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Fail if signals are not as before in the end, or a gateway or Ray is left."""
    before = {number: signal.signal(number, nobody_took_it) for number in SIGNALS}
    try:
        with fake_ray() as ray:
            os.environ["REPRISE_FLEET__REDIS_URL"] = "redis://127.0.0.1:1/0"  # replicas read the environment
            world = World(ray)
            monkeypatch.setattr(
                local_fleet,
                "time",
                SimpleNamespace(sleep=world.sleep, monotonic=lambda: world.now_s, time_ns=lambda: 7),
            )
            monkeypatch.setattr(local_fleet, "LOOK_S", 0.01)
            monkeypatch.setattr(local_fleet, "drain_s", lambda settings: DRAIN_S)
            monkeypatch.setattr(local_fleet, "OwnedProcess", world.start_gateway)
            monkeypatch.setattr(local_fleet.httpx, "get", world.get)
            yield world
            assert [signal.getsignal(number) for number in SIGNALS] == [nobody_took_it] * 3
            assert not [gateway for gateway in world.gateways if gateway.is_alive]
            assert ray.calls[-1] == "shutdown"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupted(by: signal.Signals = signal.SIGINT) -> Story:
    """Tell of a fleet that is ended by a signal when it has looked about a little."""
    for _ in range(3):
        yield
    signal.raise_signal(by)


def test_it_starts_ray_then_replicas_then_a_gateway_and_says_so(world, tmp_path):
    (config := tmp_path / "fleet.toml").touch()
    world.answers = [httpx.ConnectError("no"), 503]
    world.live(interrupted(), config=config)
    assert world.ray.calls[:3] == ["init", "start", "run"]
    assert (world.ray.init_options["address"], world.ray.init_options["include_dashboard"]) == ("local", False)
    assert world.ray.start_options["proxy_location"] == "Disabled"
    assert world.ray.run_options == {"name": "reprise", "route_prefix": None}
    (application,) = world.ray.runs
    assert application.deployed["num_replicas"] == 2
    assert application.deployed["ray_actor_options"] == {"num_cpus": 0, "num_gpus": 0, "resources": {}}
    assert application.arguments == (str(config), "")
    assert [gateway.arguments for gateway in world.gateways] == [["gateway", "--port", "8123"]]
    assert world.asked == [f"{URL}/ready"] * 3
    assert world.told[:3] == ["starting Ray", "starting 2 replicas", READY]


@pytest.mark.parametrize(("host", "asked"), [("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "[::1]")])
def test_a_gateway_is_asked_where_it_can_be_reached(world, host, asked):
    world.live(interrupted(), host=host)
    assert world.asked == [f"http://{asked}:8123/ready"]


def test_it_can_do_without_a_gateway(world):
    world.live(interrupted(), gateway=False)
    assert world.gateways == world.asked == []
    assert "ready; Ctrl-C ends it" in world.told


@pytest.mark.parametrize(
    ("wanted", "there", "given"), [(None, 2.0, 1.0), (None, 0.0, 0), (0.5, 2.0, 0.5), (0.0, 2.0, 0)]
)
def test_each_replica_has_a_gpu_where_there_are_any(world, wanted, there, given):
    world.ray.resources = {"GPU": there}
    world.live(interrupted(), gpus=wanted)
    assert world.ray.runs[0].deployed["ray_actor_options"]["num_gpus"] == given


def test_what_is_set_for_ray_is_not_overruled(world):
    own = {"RAY_worker_niceness": "5"}
    os.environ.update(own)
    world.fleet()
    assert {name: os.environ[name] for name in RAY_SETTINGS} == {**RAY_SETTINGS, **own}
    world.ray.shutdown()


def test_it_tells_how_many_replicas_serve(world):
    def come_one_by_one() -> None:
        for ready in (1, 2):
            world.ray.show("DEPLOYING", RUNNING=ready, STARTING=2 - ready)
            before = world.ray.looks
            for _ in world.until(lambda before=before: world.ray.looks >= before + 3):
                pass

    world.ray.on_run = come_one_by_one
    world.live(interrupted())
    assert [line for line in world.told if "replicas serve" in line] == [f"{n} of 2 replicas serve" for n in (1, 2)]


def test_a_gateway_that_ends_is_started_again(world):
    def story() -> Story:
        yield
        world.gateways[0].is_alive = False
        yield from world.until(lambda: len(world.gateways) == 2)
        yield
        signal.raise_signal(signal.SIGINT)

    world.live(story())
    assert [gateway.arguments for gateway in world.gateways] == [["gateway", "--port", "8123"]] * 2
    assert "the gateway has ended; starting another" in world.told
    assert local_fleet.AGAIN_S in world.slept, "one that ends at once would be started all the time"
    assert (world.gateways[0].stopped, world.gateways[1].stopped) == ([], [DRAIN_S])


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_the_gateway_and_then_the_servers(world, by):
    world.ray.on_delete = lambda: world.order.append("replicas end")
    world.ray.on_shutdown = lambda: world.order.append("Ray ends")
    world.live(interrupted(by))
    assert world.gateways[0].stopped == [DRAIN_S]
    assert world.order == ["gateway stops", "replicas end", "Ray ends"]
    assert world.ray.calls[-2:] == ["delete reprise", "shutdown"]
    assert world.told[-1] == "draining; again ends it at once"


def test_servers_may_take_longer_to_end_than_serve_waits(world):
    late = [TimeoutError(), TimeoutError()]

    def delete() -> None:
        if late:
            raise late.pop()

    world.ray.on_delete = delete
    world.live(interrupted())
    assert world.ray.calls[-4:] == ["delete reprise"] * 3 + ["shutdown"]


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(world, by):
    world.on_stop = lambda: signal.raise_signal(by)
    world.live(interrupted())
    assert world.gateways[0].is_killed
    assert "delete reprise" not in world.ray.calls


def test_a_second_signal_does_not_wait_for_the_servers(world):
    is_over = threading.Event()

    def delete() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        is_over.wait(SOON_S)

    world.ray.on_delete = delete
    try:
        world.live(interrupted())
        assert not is_over.is_set()
        assert world.ray.calls[-2:] == ["delete reprise", "shutdown"]
    finally:
        is_over.set()


def test_a_signal_while_the_replicas_start_ends_what_there_is(world):
    world.ray.on_run = lambda: signal.raise_signal(signal.SIGTERM)
    world.live(interrupted())
    assert world.gateways == []
    assert world.ray.calls[-2:] == ["delete reprise", "shutdown"]


def test_without_ray_there_is_nothing_to_drain(world):
    def story() -> Story:
        yield
        world.ray.is_initialized = False  # its processes have ended
        signal.raise_signal(signal.SIGINT)

    world.live(story())
    assert "delete reprise" not in world.ray.calls


def test_sighup_replaces_the_replicas_and_the_fleet_serves_on(world):
    may_end = threading.Event()
    looks = []

    def story() -> Story:
        yield
        world.ray.on_run = lambda: may_end.wait(SOON_S)
        signal.raise_signal(signal.SIGHUP)
        yield from world.until(lambda: len(world.ray.runs) == 2)
        world.gateways[0].is_alive = False  # the fleet looks after it while replicas are replaced
        yield from world.until(lambda: len(world.gateways) == 2)
        looks.append("all replicas are replaced" in world.told)
        may_end.set()
        yield from world.until(lambda: "all replicas are replaced" in world.told)
        for _ in range(3):
            yield
        signal.raise_signal(signal.SIGINT)

    world.live(story())
    assert looks == [False]
    assert [application.arguments[1] for application in world.ray.runs] == ["", "7"], "once, and as another version"


def test_replicas_that_are_not_replaced_do_not_end_the_fleet(world):
    def refuse() -> None:
        raise RuntimeError("no room")

    def story() -> Story:
        yield
        world.ray.on_run = refuse
        signal.raise_signal(signal.SIGHUP)
        yield from world.until(lambda: "the replicas are not replaced: no room" in world.told)
        yield
        signal.raise_signal(signal.SIGINT)

    world.live(story())
    assert world.gateways[0].stopped == [DRAIN_S]


def test_replicas_that_do_not_start_end_it(world):
    def refuse() -> None:
        raise RuntimeError("no room")

    world.ray.on_run = refuse
    with pytest.raises(FleetFailed, match="the replicas do not start: no room"):
        world.live(interrupted())
    assert world.gateways == []


@pytest.mark.parametrize("part", ["on_init", "on_start"])
def test_a_ray_that_does_not_start_ends_it(world, part):
    def refuse() -> None:
        raise ConnectionError("no head")

    setattr(world.ray, part, refuse)
    with pytest.raises(FleetFailed, match="Ray does not start: no head"):
        world.live(interrupted())
    assert world.ray.runs == world.gateways == []


def test_a_gateway_that_ends_while_it_starts_ends_the_fleet(world):
    def story() -> Story:
        for _ in range(3):
            yield
        world.gateways[0].is_alive = False
        yield

    world.answers = [503] * 99
    with pytest.raises(FleetFailed, match=r"(?s)ended with status 2.*no such setting"):
        world.live(story())


def test_a_gateway_that_does_not_answer_ends_the_fleet(world):
    def story() -> Story:
        while True:
            yield
            world.now_s += 10.0

    world.answers = [503] * 99
    with pytest.raises(FleetFailed, match=f"the gateway does not answer at {URL}"):
        world.live(story())
    assert world.gateways[0].is_killed
    assert world.now_s >= local_fleet.GATEWAY_READY_S


@pytest.mark.parametrize("call", ["on_delete", "on_shutdown"])
def test_a_ray_that_does_not_answer_is_not_waited_for(world, monkeypatch, call):
    monkeypatch.setattr(local_fleet, "RAY_ENDS_S", 0.05)
    monkeypatch.setattr(local_fleet, "drain_s", lambda settings: 0.05)
    is_over = threading.Event()
    setattr(world.ray, call, lambda: is_over.wait(SOON_S))
    try:
        world.live(interrupted())
        assert "delete reprise" in world.ray.calls
        assert world.gateways[0].stopped == [0.05]
    finally:
        is_over.set()


def test_what_ray_says_at_its_end_is_not_told(world):
    def complain() -> None:
        raise RuntimeError("the head is gone")

    world.ray.on_delete = world.ray.on_shutdown = complain
    world.live(interrupted())
    assert world.told[-1] == "draining; again ends it at once"
