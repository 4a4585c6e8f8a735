"""Tests that the container files agree with the program: the settings they use exist, nothing listens openly without
keys, and whatever must outlive a container is on a volume."""

import re
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from reprise.app.settings.settings import Settings
from reprise.app.settings.sources import SettingsError, known_settings, load_settings, variable_of
from tests.one_name import FOLDERS

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
OVERLAYS = ["compose.cuda.yaml", "compose.redis.yaml"]
KEY = "a-long-enough-key"


def image_environment() -> dict[str, str]:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    (block,) = re.findall(r"^ENV (PATH=[^\\\n]*(?:\\\n[^\\\n]*)+)", text, re.MULTILINE)
    return dict(word.split("=", 1) for word in block.replace("\\\n", " ").split())


def compose(*overlays: str) -> dict[str, Any]:
    """Merge the files as docker compose does: mappings key by key, anything else by the last."""

    def merge(below: Any, above: Any) -> Any:
        if not (isinstance(below, dict) and isinstance(above, dict)):
            return above
        return {key: merge(below.get(key), above[key]) if key in above else below[key] for key in below | above}

    merged: Any = {}
    for name in ("compose.yaml", *overlays):
        merged = merge(merged, compose_file(name))
    return merged


def compose_file(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / name).read_text(encoding="utf-8"))
    return found


def resolved(environment: dict[str, Any], host: dict[str, str]) -> dict[str, str]:
    """Return what is in the container: ${NAME:?..} and names without a value come from the host, the latter if set."""
    found = {}
    for name, value in environment.items():
        if value is None:
            if name in host:
                found[name] = host[name]
        elif reference := re.fullmatch(r"\$\{(\w+):\?[^}]+\}", value):
            found[name] = host[reference[1]]  # compose refuses to start without it
        else:
            assert "$" not in value
            found[name] = value
    return found


def settings(host: dict[str, str], *overlays: str) -> Settings:
    """Load the settings of the server in its container, for this environment of the host."""
    given = resolved(compose(*overlays)["services"]["server"]["environment"], {"REPRISE_API_KEYS": KEY, **host})
    return load_settings(flags={}, environ={**image_environment(), **given}, config=None)


def test_every_setting_named_in_the_container_files_exists():
    names = {f"REPRISE_{name.replace('.', '__').upper()}" for name, _ in known_settings()}
    used = {
        name
        for file in DOCKER.rglob("*")
        if file.is_file() and file.suffix != ".whl"
        for name in re.findall(r"REPRISE_[A-Z]+__[A-Z_]+", file.read_text(encoding="utf-8"))
    }
    assert len(used) >= 10
    assert used <= names


def test_every_package_travels_to_the_builder():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["packages"]["find"]["include"] == ["reprise", "reprise.*"]
    # A link that leads nowhere would be left out of the wheel without an error.
    packages = {"reprise", *FOLDERS}
    sent = {
        line[1:].rstrip("/")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    assert packages <= sent
    # What it copies besides.
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", (DOCKER / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for names in copied for name in names.split()} - {"."} <= sent


def test_the_image_listens_everywhere_and_only_with_keys():
    environment = image_environment()
    assert environment["REPRISE_SERVER__HOST"] == "0.0.0.0"
    with pytest.raises(SettingsError, match="api_keys"):
        load_settings(flags={}, environ=environment, config=None)
    with pytest.raises(KeyError):
        resolved(compose()["services"]["server"]["environment"], {})
    assert settings({}).server.api_keys == (KEY,)


def test_only_the_server_is_published_and_on_loopback_alone():
    for overlays in ([], *([overlay] for overlay in OVERLAYS), OVERLAYS):
        services = compose(*overlays)["services"]
        assert services["server"]["ports"] == ["127.0.0.1:8000:8000"]
        assert [name for name, service in services.items() if "ports" in service] == ["server"]


def test_model_device_and_sizes_come_from_the_environment_and_else_from_the_server():
    untouched = load_settings(flags={}, environ={**image_environment(), "REPRISE_SERVER__API_KEYS": KEY}, config=None)
    assert settings({"PATH": "/usr/bin"}) == untouched
    host = {
        "REPRISE_MODEL__SOURCE": "org/name", "REPRISE_MODEL__MAX_CONTEXT": "4096", "REPRISE_ENGINE__DEVICE": "cpu",
        "REPRISE_CACHE__DRAM_GIB": "3", "REPRISE_CACHE__DISK_GIB": "5", "REPRISE_CACHE__HBM_TOKENS": "70000",
    }  # fmt: skip
    found = settings(host)
    assert (found.model.source, found.model.max_context, found.engine.device) == ("org/name", 4096, "cpu")
    assert (found.cache.dram_gib, found.cache.disk_gib, found.cache.hbm_tokens) == (3, 5, 70_000)


def test_what_people_set_is_handed_on_to_every_kind_of_server() -> None:
    """A variable that compose does not name stays on the host without a word: the setting would have no effect."""
    of_one_server = compose()["services"]["server"]["environment"]
    of_a_replica = compose_file("compose.fleet.yaml")["services"]["replica"]["environment"]
    of_a_node = compose_file("compose.ray.yaml")["services"]["node"]["environment"]
    for section, servers in {
        **dict.fromkeys(("model", "engine", "weights"), (of_one_server, of_a_replica, of_a_node)),
        "limits": (of_one_server,),
    }.items():
        wanted = {variable_of(name) for name, _ in known_settings() if name.startswith(f"{section}.")}
        for environment in servers:
            assert wanted <= environment.keys()
            assert {environment[name] for name in wanted} == {None}
    host = {"REPRISE_MODEL__EXACT": "on", "REPRISE_MODEL__WEIGHTS": "q8", "REPRISE_SERVER__ADMIN_KEYS": "an-admin-key"}
    found = settings(host)
    assert (found.model.exact, found.model.weights, found.server.admin_keys) == ("on", "q8", ("an-admin-key",))


def test_what_has_to_outlive_a_container_lies_on_a_volume():
    server = compose()["services"]["server"]
    mounted = [PurePosixPath(volume.split(":")[1]) for volume in server["volumes"]]
    assert server["read_only"]
    # Else every start would compile for a minute, and Triton, which must be able to write, would not start at all.
    for name in ("REPRISE_CACHE__DISK_DIR", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"):
        place = PurePosixPath(image_environment()[name])
        assert any(place.is_relative_to(volume) for volume in mounted), name
    assert {volume.split(":")[0] for volume in server["volumes"]} == compose()["volumes"].keys()


def test_with_a_gpu_the_image_has_what_it_needs_and_asks_for_the_device():
    server = compose("compose.cuda.yaml")["services"]["server"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = server["build"]["args"]["EXTRAS"].split(",")
    assert "cuda" in wanted
    assert set(wanted) <= extras.keys()
    assert not [text for extra in wanted for text in extras[extra] if text.startswith("flash-attn")]  # needs a compiler
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert server["image"] != compose()["services"]["server"]["image"]
    assert settings({}, "compose.cuda.yaml").engine.device == "cuda"


def test_redis_is_used_where_it_is_started_and_forgets_nothing():
    assert settings({}).cache.redis_url == ""
    assert list(compose()["services"]) == ["server"]
    services = compose("compose.redis.yaml")["services"]
    host = settings({}, "compose.redis.yaml").cache.redis_url.removeprefix("redis://").partition(":")[0]
    assert services["server"]["depends_on"] == {host: {"condition": "service_healthy"}}
    command = services[host]["command"]
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"
    assert "redis" in (DOCKER / "Dockerfile").read_text(encoding="utf-8").split("ARG EXTRAS=")[1].splitlines()[0]
