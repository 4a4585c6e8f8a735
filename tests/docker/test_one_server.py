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
# Settings that the files fix, since something else in them depends on it: an address that is published, a volume, a
# time after which Docker kills, a key that must be there (it comes from REPRISE_API_KEYS).
FIXED = {
    *("server.host", "server.port", "server.api_keys", "server.allow_unauthenticated", "server.drain_s"),
    *("server.tenant_secret_file", "cache.disk_dir"),
}
# Those of a fleet, where keys are in a file of the members' and logs are JSON.
FIXED_IN_FLEETS = FIXED | {
    *("server.keys_file", "server.admin_keys", "server.hostnames", "server.log_format", "cache.redis_url"),
    "cache.redis_gib",  # has a default there
}


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


def by_default(text: str) -> str:
    """Return what compose reads where no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


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
        assert services["server"]["ports"] == ["${REPRISE_LISTEN:-127.0.0.1:8000}:8000"]
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
    of_a_gateway = compose_file("compose.fleet.yaml")["services"]["gateway"]["environment"]
    names = {name for name, _ in known_settings() if not name.startswith("fleet.")}
    limits = {name for name in names if name.startswith("limits.")}
    for environment, wanted in (
        (of_one_server, names - FIXED),
        (of_a_replica, names - FIXED_IN_FLEETS),
        (of_a_node, names - FIXED_IN_FLEETS),
        (of_a_gateway, limits | {"server.cors_origins", "server.access_log"}),
    ):
        variables = {variable_of(name) for name in wanted}
        assert variables <= environment.keys(), variables - environment.keys()
        assert {environment[name] for name in variables} == {None}
        assert not {variable_of(name) for name in FIXED - {"server.tenant_secret_file", "server.api_keys"}} & (
            environment.keys()
        )
    host = {"REPRISE_MODEL__EXACT": "on", "REPRISE_MODEL__WEIGHTS": "q8", "REPRISE_SERVER__ADMIN_KEYS": "an-admin-key"}
    found = settings(host)
    assert (found.model.exact, found.model.weights, found.server.admin_keys) == ("on", "q8", ("an-admin-key",))


def test_what_has_to_outlive_a_container_lies_on_a_volume():
    server = compose()["services"]["server"]
    volumes = [by_default(volume).split(":") for volume in server["volumes"]]
    mounted = [PurePosixPath(volume[1]) for volume in volumes]
    assert server["read_only"]
    # Else every start would compile for a minute, and Triton, which must be able to write, would not start at all.
    for name in ("REPRISE_CACHE__DISK_DIR", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"):
        place = PurePosixPath(image_environment()[name])
        assert any(place.is_relative_to(volume) for volume in mounted), name
    assert {volume[0] for volume in volumes} == compose()["volumes"].keys()


@pytest.mark.parametrize(
    ("file", "service"), [("compose.yaml", "server"), ("compose.fleet.yaml", "replica"), ("compose.ray.yaml", "node")]
)
def test_models_of_the_host_are_mounted_where_a_directory_is_named(file: str, service: str) -> None:
    mount = "${REPRISE_MODELS:-models}:/models:ro"
    assert mount in compose_file(file)["services"][service]["volumes"]
    # A new volume takes over the owner of what it covers: the server must be able to write in it as hub's cache.
    (line,) = re.findall("install -d -o reprise -g reprise (/var.*) ", (DOCKER / "Dockerfile").read_text("utf-8"))
    assert {"/models", "/home/reprise/.cache/huggingface"} <= set(line.split())


def test_the_example_of_variables_names_only_those_that_are_used() -> None:
    text = (DOCKER / ".env.example").read_text(encoding="utf-8")
    named = set(re.findall(r"^#?([A-Z][A-Z_]+)=", text, re.MULTILINE))
    files = "".join(file.read_text(encoding="utf-8") for file in DOCKER.glob("compose*.yaml"))
    used = set(re.findall(r"\$\{(\w+)", files)) | set(re.findall(r"^ +(\w+):(?: #.*)?$", files, re.MULTILINE))
    assert named - {"COMPOSE_FILE"} <= used
    # What a server cannot start without is there, and nothing else is set.
    assert re.findall(r"^(\w+)=", text, re.MULTILINE) == ["REPRISE_API_KEYS"]
    assert set(re.findall(r"\$\{(\w+)", (DOCKER / "compose.yaml").read_text(encoding="utf-8"))) <= named
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {"/docker/.env", "/docker/compose.override.yaml"} <= set(ignored)  # keys are in them


@pytest.mark.parametrize("file", ["compose.yaml", "compose.cuda.yaml", "compose.fleet.yaml", "compose.ray.yaml"])
def test_more_of_the_extras_can_be_built_in(file: str) -> None:
    """A server whose traces go somewhere needs `otel`, which the image lacks by default."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = (one["build"]["args"]["EXTRAS"] for one in compose_file(file)["services"].values() if "build" in one)
    assert extras.startswith("${REPRISE_EXTRAS:-")
    assert set(by_default(extras).split(",")) <= project["optional-dependencies"].keys()


def test_with_a_gpu_the_image_has_what_it_needs_and_asks_for_the_device():
    server = compose("compose.cuda.yaml")["services"]["server"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = by_default(server["build"]["args"]["EXTRAS"]).split(",")
    assert "cuda" in wanted
    assert set(wanted) <= extras.keys()
    assert not [text for extra in wanted for text in extras[extra] if text.startswith("flash-attn")]  # needs a compiler
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert device["count"] == "${REPRISE_GPUS:-1}"
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


def test_redis_can_do_no_more_than_it_must() -> None:
    redis = compose("compose.redis.yaml")["services"]["redis"]
    assert (redis["read_only"], redis["cap_drop"], redis["user"]) == (True, ["ALL"], "redis")
    assert redis["security_opt"] == ["no-new-privileges:true"]
    # Twice its data, since a rewrite of its file takes a copy of what changes meanwhile.
    maxmemory = redis["command"][redis["command"].index("--maxmemory") + 1]
    assert (maxmemory, redis["mem_limit"]) == ("1gb", "2g")
    assert redis["volumes"] == ["redis:/data"]
    assert redis["command"][redis["command"].index("--appendonly") + 1] == "yes"
