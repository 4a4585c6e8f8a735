"""The container files agree with the program: settings exist, nothing listens openly without keys."""

import re
from pathlib import Path

import pytest
import yaml

from app.settings import SettingsError, known_settings, load_settings

DOCKER = Path(__file__).parent.parent / "docker"


def image_environment() -> dict[str, str]:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    return dict(re.findall(r"(REPRISE_[A-Z_]+)=(\S+)", text))


def test_every_setting_named_in_the_container_files_exists():
    names = {f"REPRISE_{name.replace('.', '__').upper()}" for name, _ in known_settings()}
    used = {
        name
        for file in DOCKER.rglob("*")
        if file.is_file()
        for name in re.findall(r"REPRISE_[A-Z]+__[A-Z_]+", file.read_text(encoding="utf-8"))
    }
    assert len(used) >= 3
    assert used <= names


def test_the_image_listens_everywhere_and_only_with_keys():
    environment = image_environment()
    assert environment["REPRISE_SERVER__HOST"] == "0.0.0.0"
    with pytest.raises(SettingsError, match="api_keys"):
        load_settings(flags={}, environ=environment, config=None)
    keyed = {**environment, "REPRISE_SERVER__API_KEYS": "a-long-enough-key"}
    assert load_settings(flags={}, environ=keyed, config=None).server.host == "0.0.0.0"


def test_compose_publishes_the_server_on_loopback_and_redis_not_at_all():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert services["server"]["ports"] == ["127.0.0.1:8000:8000"]
    assert "ports" not in services["redis"]
    # `:?` makes compose refuse to start without keys.
    assert services["server"]["environment"]["REPRISE_SERVER__API_KEYS"].startswith("${REPRISE_API_KEYS:?")
    mounted = {volume.split(":")[1] for volume in services["server"]["volumes"]}
    assert image_environment()["REPRISE_CACHE__DISK_DIR"] in mounted
