import os
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from app import cli, doctor
from app.doctor import Finding, Level
from app.settings import Settings
from model import places

LIBRARIES = {
    "torch": "2.13.0", "transformers": "5.0", "numba": "0.68", "triton": None, "flash_attn": None,
    "opentelemetry.sdk": None, "cuda_build": None, "devices": [],
}  # fmt: skip


def look(
    tmp_path: Path, libraries: dict[str, Any] | None = None, *, owner: str | None = None, **sections: dict[str, Any]
) -> dict[str, Finding]:
    sections["cache"] = {
        "disk_dir": tmp_path / "state",
        "disk_gib": 0.01,
        "disk_min_free_gib": 0,
        **sections.get("cache", {}),
    }
    sections["server"] = {"port": 0, **sections.get("server", {})}
    settings = Settings.model_validate(sections)
    findings = doctor.examine(settings, lambda: {**LIBRARIES, **(libraries or {})}, used_by=lambda _: owner)
    return {finding.subject: finding for finding in findings}


def test_a_machine_that_has_everything_has_nothing_to_mend(tmp_path: Path) -> None:
    found = look(tmp_path)
    assert {finding.level for finding in found.values()} <= {Level.OK, Level.NOTE}
    assert {
        "Python",
        "torch",
        "CUDA",
        "processor",
        "memory",
        "model",
        "state",
        "disk",
        "Redis",
        "address",
    } <= found.keys()
    assert list(tmp_path.iterdir()) == []  # looking leaves nothing behind


@pytest.mark.parametrize(
    ("libraries", "sections", "subject", "level", "advice"),
    [
        ({"torch": None}, {}, "torch", "fail", "pip install -c constraints.txt -e ."),
        ({"transformers": "!no module named x"}, {}, "transformers", "fail", "--force-reinstall"),
        ({"error": "it crashed"}, {}, "torch", "fail", "--force-reinstall"),
        ({"numba": None}, {}, "numba", "warn", "pip install numba"),
        ({}, {"engine": {"device": "cuda"}}, "CUDA", "fail", "engine.device=cpu"),
        ({"devices": [{"name": "H100", "gib": 80.0}]}, {}, "attention", "fail", "constraints.txt triton"),
        ({"devices": [{"name": "H100", "gib": 80.0}], "triton": "3.7"}, {}, "attention", "ok", ""),
        ({"devices": [{"name": "H100", "gib": 80.0}], "triton": "!no"}, {}, "attention", "fail", "--force-reinstall"),
        ({}, {"engine": {"threads": 1024}}, "threads", "warn", "core"),
        ({}, {"cache": {"dram_gib": 60_000}}, "memory", "fail", "cache.dram_gib"),
        ({}, {"cache": {"disk_gib": 1_000_000}}, "state", "note", "cache.disk_gib"),
        ({}, {"cache": {"disk_min_free_gib": 1_000_000}}, "state", "warn", "disk_min_free_gib"),
        ({}, {"model": {"source": "/no/such/model"}}, "model", "fail", "--model"),
        ({}, {"server": {"traces_endpoint": "http://127.0.0.1:4318"}}, "traces", "fail", "opentelemetry-sdk"),
    ],
)  # fmt: skip
def test_what_is_wrong_comes_with_what_to_do(
    tmp_path: Path, libraries: dict[str, Any], sections: dict[str, Any], subject: str, level: str, advice: str
) -> None:
    finding = look(tmp_path, libraries, **sections)[subject]
    assert finding.level == level
    assert advice in finding.advice


def test_without_a_model_of_its_own_it_says_how_to_get_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(places, "SMOLLM2", tmp_path / "models" / "SmolLM2")
    monkeypatch.setattr(doctor, "SMOLLM2", places.SMOLLM2)
    assert "make model" in look(tmp_path)["model"].advice
    assert look(tmp_path, model={"source": "bundled"})["model"].advice == ""  # it was asked for
    places.SMOLLM2.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (places.SMOLLM2 / name).write_text("{}")
    found = look(tmp_path)["model"]
    assert (found.found.split(",")[0], found.advice) == ("SmolLM2", "")


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "b.gguf").write_bytes(b"PK")
    found = [look(tmp_path, model={"source": str(tmp_path / name)})["model"] for name in ("a.gguf", "b.gguf")]
    assert [finding.level for finding in found] == [Level.OK, Level.FAIL]


def test_a_directory_that_is_no_model_or_cannot_be_written_is_named(tmp_path: Path) -> None:
    found = look(tmp_path, model={"source": str(tmp_path)})
    assert "config.json, tokenizer.json, *.safetensors" in found["model"].found
    (tmp_path / "file").write_text("")
    found = look(tmp_path, cache={"disk_dir": tmp_path / "file" / "state"})
    assert found["state"].level is Level.FAIL
    secret = tmp_path / "state" / "tenant_secret"
    secret.parent.mkdir()
    secret.write_bytes(b"")
    os.chmod(secret, 0o644)
    assert look(tmp_path)["secret"].advice == f"chmod 600 {secret}"


def test_a_directory_in_use_is_said_to_be(tmp_path: Path) -> None:
    finding = look(tmp_path, owner="a running server (pid 42)")["state"]
    assert finding.level is Level.NOTE
    assert finding.found.endswith("in use by a running server (pid 42)")


def test_an_address_in_use_is_found(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken_port = taken.getsockname()[1]
        found = look(tmp_path, server={"port": taken_port})
    assert found["address"].level is Level.WARN
    assert found["address"].found.count(str(taken_port)) == 1


def test_the_libraries_are_looked_at_elsewhere_and_may_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROBE", "import os; os.abort()")
    assert "ended the process" in doctor.probe_libraries()["error"]
    monkeypatch.setattr(doctor, "PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.2)
    assert "longer than" in doctor.probe_libraries()["error"]


def test_the_command_says_it_all_and_fails_where_something_will_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probe_libraries", lambda: {**LIBRARIES, "torch": None})
    arguments = ["doctor", "--cache.disk_dir", str(tmp_path), "--host", "127.0.0.1", "--port", "0"]
    result = CliRunner().invoke(cli.cli, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "✗  torch" in result.output
    assert "→ pip install" in result.output
    monkeypatch.setattr(doctor, "probe_libraries", lambda: LIBRARIES)
    result = CliRunner().invoke(cli.cli, [*arguments, "--cache.dram_gib", "0"], env={"COLUMNS": "200"})
    assert result.exit_code == 0


def test_square_brackets_are_text() -> None:
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(doctor.report([Finding("x", Level.WARN, "[bold]", "pip install 'x[y]'")]))
    text = console.export_text()
    console.file.close()
    assert "[bold]" in text
    assert "pip install 'x[y]'" in text
