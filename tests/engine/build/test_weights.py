"""Tests finding a model's files by its name, whatever form its weights are in."""

import json
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest
import torch
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from reprise.engine.build.weights import load_weights, resolve_files
from reprise.engine.model.loading import ModelRefused
from tests.engine.driver import Driver
from tests.engine.gguf import gguf_files
from tests.engine.models import CPU, save_tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


def test_a_directory_is_found_as_it_is(saved: Path) -> None:
    assert resolve_files(str(saved), Path("unused")) == saved


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "neither a directory"),
        ("~/nowhere/at/all", "neither a directory"),
        ("a b/c/d", "neither a directory nor a hub id"),
        ("someone/some-model", "could not be fetched"),  # the tests run offline
    ],
)
def test_names_of_no_model_are_refused(name: str, message: str) -> None:
    with pytest.raises(ModelRefused, match=message):
        resolve_files(name, Path("unused"))


def refusal(kind: type[Exception], status: int) -> Exception:
    """Return what the hub's client raises, with its advice for programmers below the first line."""
    response = httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/api/models/a/b"))
    return kind("it cannot\n\nAdvice for programmers.", response=response)


def no_files_as(cause: Exception) -> Exception:
    """Return what the hub's client raises where it finds no files here and the hub answers with an error."""
    error = errors.LocalEntryNotFoundError("no file")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (errors.LocalEntryNotFoundError("no file\n\nAdvice for programmers."), "name their directory"),
        (ConnectionError("no route to host"), "name their directory"),
        (refusal(errors.RepositoryNotFoundError, 401), "check the name"),
        (refusal(errors.GatedRepoError, 403), "accept its terms at https://huggingface.co/a/b, then set HF_TOKEN"),
        (refusal(errors.HfHubHTTPError, 500), "could not be fetched from the hub: it cannot"),
        (no_files_as(refusal(errors.HfHubHTTPError, 429)), "could not be fetched from the hub: it cannot"),
    ],
)
def test_what_the_hub_refuses_is_said_in_a_sentence_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, error: Exception, hint: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelRefused) as told:
        resolve_files("a/b", Path("unused"))
    assert hint in str(told.value)
    assert "\n" not in str(told.value)


class Hub:
    """A hub that has one model, whose files are in a directory."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = path
        self.fetched: list[str] = []
        monkeypatch.setattr("huggingface_hub.snapshot_download", self._fetch)

    def _fetch(self, _: str, allow_patterns: list[str]) -> str:
        self.fetched += [file.name for pattern in allow_patterns for file in self._path.glob(pattern)]
        return str(self._path)


def test_weights_come_from_the_hub_when_the_configuration_is_served(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(saved, monkeypatch)
    assert resolve_files("someone/some-model", Path("unused")) == saved
    assert "model.safetensors" in hub.fetched


@pytest.mark.parametrize("model_type", ["deepseek_v32", "qwen3_next", "llama4", "t5", "vit"])
def test_no_weights_of_a_refused_model_come_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    hub = Hub(tmp_path, monkeypatch)
    with pytest.raises(ModelRefused):
        resolve_files("someone/some-model", Path("unused"))
    assert hub.fetched == ["config.json"]


def test_no_weights_that_are_quantised_in_a_way_that_is_not_read_come_from_the_hub(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((saved / "config.json").read_text())
    for method, is_read in (("gptq", True), ("hqq", False)):
        path = tmp_path / method
        path.mkdir()
        quantised = {**config, "quantization_config": {"quant_method": method, "bits": 4}}
        (path / "config.json").write_text(json.dumps(quantised))
        (path / "model.safetensors").touch()
        hub = Hub(path, monkeypatch)
        with nullcontext() if is_read else pytest.raises(ModelRefused, match=method):
            resolve_files("someone/some-model", Path("unused"))
        assert ("model.safetensors" in hub.fetched) == is_read


def test_a_file_is_not_a_model(saved: Path) -> None:
    with pytest.raises(ModelRefused, match="neither a directory"):
        resolve_files(str(saved / "config.json"), Path("unused"))


def test_a_gguf_file_is_converted_and_loaded(tmp_path: Path) -> None:
    model = gguf_files.random_llama()
    source = gguf_files.write(tmp_path / "tiny.gguf", model)
    found = resolve_files(str(source), tmp_path / "models")
    assert found.parent == tmp_path / "models"
    assert resolve_files(str(source), tmp_path / "models") == found
    weights = load_weights(found, torch.float32, CPU).state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


def test_a_gguf_file_that_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelRefused, match="cut off"):
        resolve_files(str(tmp_path / "bad.gguf"), tmp_path / "models")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.2.mlp.down_proj.weight"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_with_its_file(tmp_path: Path, name: str, number: float) -> None:
    file = save_tiny(tmp_path / "tiny") / "model.safetensors"
    tensors = load_file(file)
    tensors[name].view(-1)[3] = number
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=f"the weight {name} of {file} has a number that is not finite"):
        Driver(tmp_path / "tiny", disk_dir=str(tmp_path / "state"))
