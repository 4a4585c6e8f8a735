import asyncio
import errno
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from rich.console import Console
from typer.testing import CliRunner

from reprise.app.cli import doctor, expected_sizes, program, state_findings
from reprise.app.cli.finding import Finding, Level
from reprise.app.cli.model_findings import DescribedModel
from reprise.app.settings.settings import GIB, Settings
from reprise.engine.build.resources import Memory
from reprise.engine.config import INT8_SCALE_BYTES
from reprise.kernels.int8_pages.pages import Int8Pages
from reprise.model import directories
from tests.app.fakes import Running, write_tokenizer
from tests.app.text.order_templates import ALTERNATES

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
        "calls",
        "template",
        "state",
        "disk",
        "Redis",
        "address",
    } <= found.keys()
    assert list(tmp_path.iterdir()) == []  # looking leaves no file


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
    monkeypatch.setattr(directories, "SMOLLM2", tmp_path / "models" / "SmolLM2")
    monkeypatch.setattr(doctor, "SMOLLM2", directories.SMOLLM2)
    assert "make model" in look(tmp_path)["model"].advice
    assert look(tmp_path, model={"source": "bundled"})["model"].advice == ""  # it was asked for
    directories.SMOLLM2.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (directories.SMOLLM2 / name).write_text("{}")
    found = look(tmp_path)["model"]
    assert (found.found.split(",")[0], found.advice) == ("SmolLM2", "")


def llama_8b(directory: Path) -> Path:
    """Write a model whose size can be told from its files; the weights are a hole."""
    directory.mkdir()
    shape = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    config = {**shape, "max_position_embeddings": 131_072, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(16_060_000_000)
    return directory


def memory_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int, *devices: dict[str, Any], **cache: Any
) -> Finding:
    """Return what is said of an 8 B model on a machine of so much memory, seven eighths of it free."""
    monkeypatch.setattr(doctor, "memory", lambda: Memory(gib * GIB, gib * GIB * 7 // 8))
    source = tmp_path / "llama-8b"
    model = {"source": str(source if source.exists() else llama_8b(source)), "dtype": "bfloat16"}
    return look(tmp_path, {"devices": list(devices)}, model=model, cache=cache)["memory"]


def test_memory_counts_all_that_a_server_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = memory_of(tmp_path, monkeypatch, 256)
    assert found.level is Level.OK
    assert "weights 15.0, KV in HBM 31.4, KV in DRAM 69.2, staging 4.0" in found.found
    found = memory_of(tmp_path, monkeypatch, 32)
    assert found.level is Level.WARN
    assert "the window shrinks to 16,027 of 131,072 tokens" in found.advice
    explicit = {"dram_gib": 6, "hbm_tokens": 8192}
    assert "HBM 1.0, KV in DRAM 6.0, staging 2.0" in memory_of(tmp_path, monkeypatch, 64, **explicit).found
    found = memory_of(tmp_path, monkeypatch, 64, mode="prefix", hbm_tokens=131_072)
    assert (found.level, found.found.split("; ")[1]) == (Level.OK, "taken as needed: weights 15.0, KV in HBM 16.0")


def test_memory_that_does_not_suffice_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory_of(tmp_path, monkeypatch, 8).level is Level.FAIL
    assert memory_of(tmp_path, monkeypatch, 32, dram_gib=40).level is Level.FAIL
    assert "nearly all" in memory_of(tmp_path, monkeypatch, 64, dram_gib=34).found
    found = memory_of(tmp_path, monkeypatch, 256, dram_gib=20)
    assert (found.level, "less than the 256,871 of HBM" in found.advice) == (Level.WARN, True)
    assert "less than one window" in memory_of(tmp_path, monkeypatch, 256, dram_gib=1).advice


def test_with_a_gpu_the_weights_are_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h100 = {"name": "H100", "gib": 79.0, "capability": [9, 0]}
    found = memory_of(tmp_path, monkeypatch, 256, h100)
    assert (found.level, found.found.split("; ")[1]) == (Level.OK, "taken as needed: KV in DRAM 85.6, staging 4.0")
    assert "less than the 445,9" in memory_of(tmp_path, monkeypatch, 64, h100).advice


def test_offloaded_weights_are_counted_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory", lambda: Memory(64 * GIB, 56 * GIB))
    model = {"source": str(llama_8b(tmp_path / "m")), "dtype": "bfloat16"}
    small = {"name": "RTX 4090", "gib": 23.5, "capability": [8, 9]}

    def look_at(devices: list[dict[str, Any]], **weights: Any) -> str:
        found = look(tmp_path, {"devices": devices}, model=model, weights=weights)["memory"].found
        return found.split("taken as needed: ")[1]

    assert look_at([small]).startswith("KV in DRAM 19.6")
    assert look_at([small], offload="dram").startswith("weights in DRAM 15.0, KV in DRAM 14.4")
    assert look_at([small], offload="dram", hbm_layers=16).startswith("weights in DRAM 7.5, KV in DRAM 17.0")
    assert look_at([], offload="dram").startswith("weights 0.9, KV in HBM 6.0, weights in DRAM 15.0")


def test_pages_of_int8_are_counted_as_they_are(tmp_path: Path) -> None:
    plain, packed = (
        expected_sizes.model_shape(llama_8b(tmp_path / dtype), 2, 0, hbm_dtype=dtype) for dtype in ("auto", "int8")
    )
    assert plain is not None
    assert packed is not None
    assert plain.hbm_bytes_per_token == plain.kv_bytes_per_token == packed.kv_bytes_per_token
    assert packed.hbm_bytes_per_token == 2 * 32 * 8 * (128 + Int8Pages.beside)
    assert Int8Pages.beside == INT8_SCALE_BYTES


def test_quantised_weights_are_not_guessed_from_their_files(tmp_path: Path) -> None:
    """Whether they stay packed is found out at the start."""
    path = llama_8b(tmp_path / "m") / "config.json"
    plain = json.loads(path.read_text())
    for config in (plain, {"text_config": plain}):
        path.write_text(json.dumps(config))
        assert expected_sizes.model_shape(path.parent, 2, 0) is not None
        plain["quantization_config"] = {}
        path.write_text(json.dumps(config))
        assert expected_sizes.model_shape(path.parent, 2, 0) is None
        del plain["quantization_config"]


def test_a_model_that_says_nothing_usual_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (llama_8b(tmp_path / "llama-8b") / "config.json").write_text('{"n_layer": 2}')
    assert memory_of(tmp_path, monkeypatch, 8).level is Level.OK
    assert memory_of(tmp_path, monkeypatch, 8, dram_gib=9).level is Level.FAIL
    (tmp_path / "llama-8b" / "config.json").write_text("[1]")
    assert memory_of(tmp_path, monkeypatch, 8).level is Level.OK


def test_the_disk_shares_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_sizes, "disk_room", lambda directory, floor: 100 * GIB)
    assert (
        "25.0 of it for KV"
        in look(tmp_path, cache={"disk_gib": "auto"}, model={"source": str(llama_8b(tmp_path / "m"))})["state"].found
    )
    assert "for KV" not in look(tmp_path)["state"].found


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


async def test_reprise_itself_on_the_address_is_no_problem(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look at this machine also where a proxy leads to other machines."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    port = urlsplit(server.base_url).port
    found = (await asyncio.to_thread(look, tmp_path, server={"port": port}))["address"]
    assert (found.level, found.found) == (Level.NOTE, f"Reprise runs there: 127.0.0.1:{port}")


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
    result = CliRunner().invoke(program.cli, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "✗  torch" in result.output
    assert "→ pip install" in result.output
    monkeypatch.setattr(doctor, "probe_libraries", lambda: LIBRARIES)
    result = CliRunner().invoke(program.cli, [*arguments, "--cache.dram_gib", "0"], env={"COLUMNS": "200"})
    assert result.exit_code == 0


def test_square_brackets_are_text() -> None:
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(doctor.report([Finding("x", Level.WARN, "[bold]", "pip install 'x[y]'")]))
    text = console.export_text()
    console.file.close()
    assert "[bold]" in text
    assert "pip install 'x[y]'" in text


@pytest.mark.parametrize(
    ("flags", "exact", "dtype", "level"),
    [
        ({"avx512_bf16"}, "on", "auto", Level.OK),
        ({"avx2"}, "on", "bfloat16", Level.FAIL),
        ({"avx2"}, "on", "float32", Level.OK),
        ({"avx512_bf16"}, "auto", "auto", Level.NOTE),
        ({"avx2"}, "auto", "auto", Level.NOTE),
    ],
)
def test_what_exactness_can_be_had(
    flags: set[str], exact: str, dtype: str, level: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: flags)
    assert look(tmp_path, model={"exact": exact, "dtype": dtype})["exact"].level is level


def test_a_template_that_does_not_take_every_message_is_told(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path / "model", template=ALTERNATES)
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_text("{}")
    found = look(tmp_path, model={"source": str(directory)})["template"]
    assert found.level is Level.NOTE
    assert "refuses a second system message, a system message after others, a user's message after" in found.found


def test_a_window_too_small_for_agents_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory", lambda: Memory(512 * GIB, 448 * GIB))
    found = look(tmp_path, model={"source": "bundled"})["agents"]
    assert (found.level, found.found) == (
        "note",
        "window 1,024: too small for most coding agents; Qwen Code sends 19,000 tokens first",
    )
    assert "agents" not in look(tmp_path, model={"source": str(llama_8b(tmp_path / "llama"))})


@pytest.mark.parametrize(
    ("flags", "form", "described", "stays"),
    [
        ({"avx2"}, "q8", None, True),
        ({"avx2"}, "auto", DescribedModel("", quantised="gptq"), True),
        ({"avx2"}, "auto", DescribedModel(""), False),
        ({"avx2"}, "bf16", DescribedModel("", quantised="gptq"), False),
        (set(), "q8", None, False),
    ],
)
def test_packed_weights_are_multiplied_in_bf16_where_the_processor_can(
    flags: set[str], form: str, described: DescribedModel | None, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: flags)
    assert doctor._stays_packed(Settings(model={"weights": form}), described) is stays


def test_a_disk_that_hangs_does_not_hold_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mended = threading.Event()
    monkeypatch.setattr(state_findings, "STATE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(state_findings, "_state", lambda *_: [mended.wait()])
    finding = look(tmp_path)["state"]
    mended.set()
    assert (finding.level, finding.found) == (Level.WARN, f"{tmp_path / 'state'} does not answer")
    assert "when it answers" in finding.advice


def test_a_disk_that_fails_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> list[Finding]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(state_findings, "_state", failing)
    finding = look(tmp_path)["state"]
    assert finding.level is Level.WARN
    assert "Input/output error" in finding.found
