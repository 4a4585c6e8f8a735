"""Finds what a machine without network is given beside the project, and is never committed: FlashAttention 3 and
nano-vllm.

A folder with any of these, `build/gpu_day_carried` unless --carried says another:

- `flash_attn_3/_C.abi3.so.xz`, `flash_attn_interface.py` and `flash_attn_config.py`, from the wheel tokenspeed-fa3; the
  library shrinks from 301 to 29 MB
- `nano/nanovllm`, the sources of nano-vllm
"""

import lzma
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path("build") / "gpu_day_carried"
_LIBRARY = Path("flash_attn_3") / "_C.abi3.so"


class NotCarried(Exception):
    """The needed file is not in the folder of carried files."""


def flash_attention_3(carried: Path) -> Any:
    """Unpack FlashAttention 3 and import it. Raises NotCarried, or ImportError if it does not fit the installed
    torch."""
    packed = carried / f"{_LIBRARY}.xz"
    if not packed.exists():
        raise NotCarried(f"FlashAttention 3 is not there: {packed}")
    found = sys.modules.get("flash_attn_interface")
    if found is not None:
        return found
    place = Path(tempfile.gettempdir()) / f"gpu-day-{packed.stat().st_size}"  # processes of one day unpack it once
    if not (place / _LIBRARY).exists():
        (place / _LIBRARY).parent.mkdir(parents=True, exist_ok=True)
        part = place / f"{_LIBRARY}.part"
        with lzma.open(packed) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        for file in carried.glob("flash_attn_*.py"):
            shutil.copy(file, place)
        for file in (carried / "flash_attn_3").glob("*.py"):
            shutil.copy(file, place / "flash_attn_3")
        part.rename(place / _LIBRARY)
    sys.path.insert(0, str(place))
    import flash_attn_interface

    return flash_attn_interface


def nano_vllm(carried: Path) -> None:
    """Make `nanovllm` importable, with FlashAttention 3 in the place of the two functions of flash-attn that it calls.
    Raises NotCarried."""
    if not (carried / "nano" / "nanovllm").is_dir():
        raise NotCarried(f"nano-vllm is not there: {carried / 'nano' / 'nanovllm'}")
    attention = flash_attention_3(carried)
    stand_in: Any = ModuleType("flash_attn")

    def varlen(q: Any, k: Any, v: Any, **named: Any) -> Any:
        """Attend to keys that lie side by side, or to pages of a prefix."""
        table, starts = named.get("block_table"), named["cu_seqlens_k"]
        scale = {"softmax_scale": named["softmax_scale"], "causal": named["causal"]}
        longest, first = named["max_seqlen_q"], named["cu_seqlens_q"]
        if table is None:
            return attention.flash_attn_varlen_func(q, k, v, first, starts, longest, named["max_seqlen_k"], **scale)
        lens = {"cache_seqlens": starts[1:] - starts[:-1], "cu_seqlens_q": first, "max_seqlen_q": longest}
        return attention.flash_attn_with_kvcache(q, k, v, page_table=table, **lens, **scale)

    def with_kvcache(q: Any, k: Any, v: Any, **named: Any) -> Any:
        return attention.flash_attn_with_kvcache(q, k, v, page_table=named.pop("block_table"), **named)

    stand_in.flash_attn_varlen_func, stand_in.flash_attn_with_kvcache = varlen, with_kvcache
    sys.modules["flash_attn"] = stand_in
    sys.path.insert(0, str(carried / "nano"))
