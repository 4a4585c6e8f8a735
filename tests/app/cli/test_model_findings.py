"""Tests what `reprise doctor --model X` says of a model before its weights are downloaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from reprise.app.cli import doctor, model_findings, program
from reprise.app.cli.finding import Finding, Level
from reprise.app.cli.model_findings import DescribedModel
from reprise.app.settings.settings import GIB, Settings
from reprise.engine.build.resources import Memory
from tests.app.cli.test_doctor import LIBRARIES

# Llama 3 8B: embedding and head of 128,256 x 4,096, 32 layers, 8 KV heads of 128.
LLAMA_8B = DescribedModel(
    refused="",
    model_type="llama",
    is_tried=True,
    is_movable=True,
    window_tokens=131_072,
    parameters=8_030_261_248,
    table_weights=2 * 128_256 * 4096,
    layer_weights=32 * 218_103_808,
    layers=32,
    kv_numbers=32 * 2 * 8 * 128,
    kv_rows=32 * 2 * 8,
)


def look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, described: DescribedModel, *, gib: int = 256, **sections: Any
) -> dict[str, Finding]:
    """Return the findings about a hub model on a machine of so much memory, all of it free."""
    monkeypatch.setattr(doctor, "memory", lambda: Memory(gib * GIB, gib * GIB))
    sections["model"] = {"source": "someone/some-model", "dtype": "bfloat16", **sections.get("model", {})}
    cache = {"disk_dir": tmp_path / "state", "disk_gib": 0, **sections.get("cache", {})}
    settings = Settings.model_validate({"server": {"port": 0}, **sections, "cache": cache})
    found = doctor.examine(settings, lambda: LIBRARIES, describe=lambda _: described)
    return {finding.subject: finding for finding in found}


def test_a_served_model_comes_with_its_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(tmp_path, monkeypatch, LLAMA_8B)
    assert (found["served"].level, found["served"].found) == (Level.OK, "llama: yes")
    # 8.03 G x 2; tables 1.05 G x 8.5 bits and layers 6.98 G x 8.5 or 5 bits.
    assert found["weights"].found == "8.03 billion numbers: bf16 15.0 GiB, q8 7.9 GiB, q4 5.1 GiB"
    assert found["KV"].found == "131,072 bytes a token, 16.0 GiB for a conversation of 131,072 tokens"
    assert found["truncation"].level is Level.OK
    # As in `memory`: 15 % of what the weights leave, but not more than two windows, in HBM.
    assert found["room"].found.startswith("262,144 tokens in HBM, ")
    assert "weights 15.0, KV in HBM 32.0" in found["memory"].found


def test_pages_of_int8_and_packed_weights_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = look(tmp_path, monkeypatch, LLAMA_8B, model={"weights": "q4"}, cache={"hbm_dtype": "int8"})
    assert "weights 5.1" in packed["memory"].found
    assert packed["KV"].found.startswith("131,072 bytes a token")  # below HBM


def test_a_refused_model_says_why_and_what_runs_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = DescribedModel("it keeps states", "qwen3 is served")
    found = look(tmp_path, monkeypatch, refused)
    assert found["served"] == Finding("served", Level.FAIL, "it keeps states", "qwen3 is served")
    assert not {"weights", "KV", "room", "truncation"} & found.keys()


def test_a_wrapper_is_served_as_its_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(tmp_path, monkeypatch, replace(LLAMA_8B, model_type="llava", is_wrapper=True))
    assert found["served"].found == "llava: as the language model in it; images and sounds are not read"


def test_a_type_that_was_not_tried_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(tmp_path, monkeypatch, replace(LLAMA_8B, is_tried=False, is_movable=None))
    assert found["served"].level is found["truncation"].level is Level.NOTE


def test_keys_that_cannot_move_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(tmp_path, monkeypatch, replace(LLAMA_8B, is_movable=False))["truncation"]
    assert (found.level, "computes the history again" in found.found) == (Level.NOTE, True)


@pytest.mark.parametrize(
    ("gib", "form", "level", "advice"),
    [(16, "auto", Level.OK, ""), (10, "auto", Level.WARN, "--model.weights q8"), (10, "q4", Level.OK, ""),
     (6, "q8", Level.WARN, "--model.weights q4"), (4, "q4", Level.FAIL, "smaller model")],
)  # fmt: skip
def test_weights_that_do_not_fit_are_told(
    gib: int, form: str, level: Level, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = look(tmp_path, monkeypatch, LLAMA_8B, gib=gib, model={"weights": form})["weights"]
    assert found.level is level
    assert advice in found.advice


def test_a_checkpoint_that_is_quantised_may_stay_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(tmp_path, monkeypatch, replace(LLAMA_8B, quantised="gptq"))["weights"]
    assert found.found.endswith("; auto keeps those of gptq, where weights can stay packed")


def test_what_only_loading_tells_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(tmp_path, monkeypatch, replace(LLAMA_8B, kv_numbers=None, kv_rows=None))
    assert found["KV"].level is Level.NOTE
    assert "room" not in found


def test_the_texts_of_a_configuration_are_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"refused": "\x1b[31m" + "x" * 10_000, "instead": "a\rb", "model_type": "", "outline": None}
    others = {
        "is_wrapper": False,
        "is_tried": False,
        "is_movable": None,
        "packing": "",
        "quantised": "",
        "window": None,
    }
    monkeypatch.setattr(model_findings, "DESCRIBE", ("-c", f"print({json.dumps({**said, **others})!r})"))
    found = model_findings.describe("x")
    assert found.instead == "a b"
    assert found.refused.startswith(" [31mxx")
    assert len(found.refused) == 1000


@pytest.mark.parametrize(
    ("program_text", "said"),
    [("import os; os.abort()", "ended the process"), ("print('[1]')", "ended the process"), ("print(5)", "ended"),
     ("import time; time.sleep(60)", "took longer than")],
)  # fmt: skip
def test_a_description_that_fails_is_a_refusal(program_text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_findings, "DESCRIBE", ("-c", program_text))
    monkeypatch.setattr(model_findings, "DESCRIBE_TIMEOUT_S", 2.0)
    assert said in model_findings.describe("x").refused


@pytest.mark.long
@pytest.mark.parametrize("model_type", ["llama", "qwen3_next"])
def test_the_command_fails_for_a_refused_model_alone(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig

    from tests.app.fakes import write_tokenizer

    AutoConfig.for_model(model_type, num_hidden_layers=4, hidden_size=64).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    monkeypatch.setattr(doctor, "probe_libraries", lambda: LIBRARIES)
    arguments = ["doctor", "--model", str(tmp_path / "model"), "--cache.disk_dir", str(tmp_path), "--port", "0"]
    done = CliRunner().invoke(program.cli, [*arguments, "--host", "127.0.0.1"], env={"COLUMNS": "300"})
    assert done.exit_code == (model_type == "qwen3_next"), done.output
    assert ("llama: yes" if model_type == "llama" else "keep a state besides K and V") in done.output
