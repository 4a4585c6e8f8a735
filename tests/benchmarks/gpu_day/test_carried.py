"""Tests that what was carried is unpacked and found, and that what was not is told."""

import lzma
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu_day import carried

NAMES = ("flash_attn_interface", "flash_attn", "nanovllm")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(carried.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


def folder(tmp_path: Path) -> Path:
    found = tmp_path / "carried"
    (found / "flash_attn_3").mkdir(parents=True)
    (found / "flash_attn_3" / "_C.abi3.so.xz").write_bytes(lzma.compress(b"machine code"))
    (found / "flash_attn_interface.py").write_text(
        "from pathlib import Path\n"
        "library = (Path(__file__).parent / 'flash_attn_3' / '_C.abi3.so').read_bytes()\n"
        "def flash_attn_with_kvcache(*given, **named):\n    return named\n"
        "def flash_attn_varlen_func(*given, **named):\n    return given\n"
    )
    return found


def test_the_library_is_unpacked(tmp_path: Path) -> None:
    assert carried.flash_attention_3(folder(tmp_path)).library == b"machine code"


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(carried.NotCarried, match="FlashAttention 3"):
        carried.flash_attention_3(tmp_path)
    with pytest.raises(carried.NotCarried, match="nano-vllm"):
        carried.nano_vllm(folder(tmp_path))


def test_nano_vllm_attends_by_flash_attention_3(tmp_path: Path) -> None:
    place = folder(tmp_path)
    (place / "nano" / "nanovllm").mkdir(parents=True)
    (place / "nano" / "nanovllm" / "__init__.py").write_text(
        "from flash_attn import flash_attn_with_kvcache as attend\n"
    )
    carried.nano_vllm(place)
    import nanovllm  # type: ignore[import-not-found,unused-ignore]

    given = {"block_table": 1, "cache_seqlens": 2, "softmax_scale": 3, "causal": True}
    assert nanovllm.attend(0, 0, 0, **given) == {
        "page_table": 1, "cache_seqlens": 2, "softmax_scale": 3, "causal": True,
    }  # fmt: skip
