"""A stand-in for Ray and Ray Serve, as far as a fleet asks them: it starts nothing and does what a test says."""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

OF_RAY = ("reprise.fleet.ray_app", "reprise.fleet.supervise.cluster")  # modules of ours that import Ray


class ApplicationStatus(StrEnum):
    DEPLOYING = "DEPLOYING"
    RUNNING = "RUNNING"
    DEPLOY_FAILED = "DEPLOY_FAILED"


@dataclass
class Application:
    """The application that Serve runs: a class, its deployment, and the arguments that replicas are made with."""

    made_of: type
    deployed: dict[str, Any]
    arguments: tuple[Any, ...]


@dataclass
class FakeRay:
    """Remembers what it was asked. A test replaces what comes of it by setting the functions."""

    calls: list[str] = field(default_factory=list)
    init_options: dict[str, Any] = field(default_factory=dict)
    start_options: dict[str, Any] = field(default_factory=dict)
    resources: dict[str, float] = field(default_factory=dict)
    runs: list[Application] = field(default_factory=list)  # what Serve was given to run
    run_options: dict[str, Any] = field(default_factory=dict)
    applications: dict[str, Any] = field(default_factory=dict)  # what `serve.status` shows
    looks: int = 0  # calls of `serve.status`
    is_initialized: bool = False
    on_init: Callable[[], None] = lambda: None
    on_start: Callable[[], None] = lambda: None
    on_run: Callable[[], None] = lambda: None
    on_delete: Callable[[], None] = lambda: None
    on_shutdown: Callable[[], None] = lambda: None

    def show(self, status: str, **replica_states: int) -> None:
        """Let `serve.status` show the fleet's application so."""
        replicas = SimpleNamespace(replica_states=replica_states)
        self.applications["reprise"] = SimpleNamespace(
            status=ApplicationStatus(status), deployments={"Replica": replicas}
        )

    def init(self, **options: Any) -> None:
        self.calls.append("init")
        self.init_options = options
        signal.signal(signal.SIGTERM, _taken_by_ray)
        self.on_init()
        self.is_initialized = True

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        self.on_shutdown()
        self.is_initialized = False

    def start(self, **options: Any) -> None:
        self.calls.append("start")
        self.start_options = options
        self.on_start()

    def run(self, application: Application, **options: Any) -> None:
        self.calls.append("run")
        self.runs.append(application)
        self.run_options = options
        self.on_run()

    def status(self) -> Any:
        self.looks += 1
        return SimpleNamespace(applications=self.applications)

    def delete(self, name: str) -> None:
        self.calls.append(f"delete {name}")
        self.on_delete()


def _modules(ray: FakeRay) -> dict[str, ModuleType]:
    def deployment(made_of: type, **deployed: Any) -> Any:
        return SimpleNamespace(bind=lambda *arguments: Application(made_of, deployed, arguments))

    serve = {
        "start": ray.start, "run": ray.run, "delete": ray.delete, "deployment": deployment, "Application": Application,
        "status": ray.status,
    }  # fmt: skip
    named: dict[str, dict[str, Any]] = {
        "ray": {
            "init": ray.init, "shutdown": ray.shutdown, "is_initialized": lambda: ray.is_initialized,
            "cluster_resources": lambda: ray.resources,
        },
        "ray.util": {"get_node_ip_address": lambda: "10.0.0.7"},
        "ray.serve": serve,
        "ray.serve.config": {"AutoscalingConfig": SimpleNamespace, "AutoscalingPolicy": SimpleNamespace},
        "ray.serve.schema": {"ApplicationStatus": ApplicationStatus},
    }  # fmt: skip
    made = {name: ModuleType(name) for name in named}
    for name, attributes in named.items():
        vars(made[name]).update(attributes)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, made[name])
    return made


@contextmanager
def fake_ray() -> Iterator[FakeRay]:
    """Put a Ray of ours in the place of Ray, where it is installed too. What it leaves in the environment is undone,
    and so are the imports of modules that have met it."""
    ray = FakeRay()
    modules: dict[str, ModuleType | None] = {}
    before = signal.getsignal(signal.SIGTERM)
    _forget()
    for name, module in _modules(ray).items():
        modules[name] = sys.modules.get(name)
        sys.modules[name] = module
    try:
        with patch.dict(os.environ):
            for name in [name for name in os.environ if name.startswith(("RAY_", "REPRISE_"))]:
                del os.environ[name]
            for name in OF_RAY:
                importlib.import_module(name)
            yield ray
    finally:
        for name, module in modules.items():  # what else was imported meanwhile stays
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
        _forget()
        signal.signal(signal.SIGTERM, before)


def _taken_by_ray(*_: object) -> None:
    raise AssertionError("Ray has the signal")


def _forget() -> None:
    """Have the modules that import Ray imported anew by whoever needs them next."""
    for name in OF_RAY:
        sys.modules.pop(name, None)
        package, _, last = name.rpartition(".")
        vars(importlib.import_module(package)).pop(last, None)
