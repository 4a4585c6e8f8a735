"""Finds how much KV an engine has room for: its context window, its pages in HBM, and the sizes that the settings leave
open."""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.storage.directory import stored_bytes
from reprise.cache.storage.disk_watch import is_mistake
from reprise.cache.storage.slab import LayerShape, row_segments
from reprise.engine.build.model import LoadedModel, ProbedModel
from reprise.engine.build.resources import disk_room, within
from reprise.engine.build.sizes import LEAST_PAGES, Sizes, automatic_sizes, coding_bytes, parking_pages
from reprise.engine.config import CacheConfig, EngineConfig
from reprise.engine.model.loading import ModelRefused, rope_limit
from reprise.engine.ranks.names import rank_directory

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # longest wait for the disk to say how much room it has
_UNKNOWN_BYTES = 1 << 62  # stands for the room of a disk that does not answer, until it does
DRAM_FREE_BUFFER = 0.1  # share of DRAM that is kept free in the background


@dataclass(frozen=True, slots=True)
class Room:
    max_context: int  # tokens of one request, answer included
    num_pages: int  # pages in HBM
    automatic: Sizes  # counts where the config gives no size
    coding: int  # bytes of memory for KV that is being encoded
    warnings: tuple[str, ...]  # texts for people
    ring_pages: int = 0  # pages through which contexts larger than HBM are read; 0: there are none
    most_pages: int = 0  # pages for such a context
    own_context: int = 0  # the longest window that the model supports, in tokens
    disk_is_known: bool = True  # False: the disk did not say how large it is; `automatic` has the most that can be


def find_room(config: EngineConfig, loaded: LoadedModel, probed: ProbedModel) -> Room:
    """Return the context window, the number of HBM pages and the sizes of the tiers of an engine. Raises ModelRefused
    if HBM is too small."""
    device, warnings = loaded.device, list[str]()
    on_cpu = device.type == "cpu"
    if not probed.found.decouplable:
        warnings.append("positions cannot be decoupled from keys: after truncation the history is recomputed")
    projection_bytes = 0 if probed.codec.projection is None else probed.codec.projection.weight_bytes
    own_context = _own_context(loaded.text, warnings)
    window = _window(config.model.max_context, own_context, warnings)
    coding = coding_of(config.cache, loaded, probed)
    disk_bytes = _disk_room(config.cache, loaded.num_ranks)
    automatic = automatic_sizes(
        memory=loaded.free_bytes,
        device_memory=loaded.num_ranks * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None,
        disk=_UNKNOWN_BYTES if disk_bytes is None else disk_bytes,
        weights=loaded.dram_weight_bytes + (loaded.hbm_weight_bytes if on_cpu else 0) + projection_bytes,
        kv_bytes_per_token=probed.hbm_bytes_per_token,
        stored_bytes_per_token=probed.stored_bytes_per_token,
        window_tokens=window,
        hbm_tokens=config.cache.hbm_tokens,
        coding=coding,
    )
    automatic_tokens = automatic.hbm // probed.hbm_bytes_per_token
    if config.cache.larger_than_hbm:
        room = _with_parking(config, probed, automatic, coding, window, warnings)
    else:
        num_pages, window = _num_pages(config.cache.hbm_tokens, automatic_tokens, probed.page_size, window, warnings)
        room = Room(window, num_pages, automatic, coding, tuple(warnings))
    return replace(room, own_context=own_context, disk_is_known=disk_bytes is not None)


def coding_of(config: CacheConfig, loaded: LoadedModel, probed: ProbedModel) -> int:
    """Return the bytes of memory that compressing blocks with the codec takes besides the tiers' own memory."""
    if config.mode != "attentionstore":
        return 0
    shapes = [LayerShape(s.kv_heads, s.k_dim, s.v_dim) for s in probed.found.shapes]
    coded = None if probed.codec.is_refused else probed.coded_segment_bytes
    return coding_bytes(row_segments(shapes, loaded.dtype), coded)


def _disk_room(config: CacheConfig, num_ranks: int) -> int | None:
    """Return the bytes that cache files may take, if the config leaves the disk's size open; 0 if it does not, or the
    disk is not used; None if the disk does not answer within _PATIENCE_S. Raises ModelRefused."""
    if config.disk_bytes is not None or config.mode != "attentionstore":
        return 0

    def measured() -> int:
        others = sum(stored_bytes(Path(rank_directory(config.disk_dir, rank))) for rank in range(1, num_ranks))
        return others + disk_room(Path(config.disk_dir), config.disk_min_free_bytes)

    try:
        return within(_PATIENCE_S, measured)
    except (OSError, TimeoutError) as error:
        if num_ranks > 1 or is_mistake(error):
            raise ModelRefused(f"the cache directory {config.disk_dir} cannot be used: {error}") from error
        log.warning("the cache directory %s does not say how much room it has: %s", config.disk_dir, error)
        return None


def _own_context(text: Any, warnings: list[str]) -> int:
    """Return the longest window that the model supports, in tokens. text: the configuration of the language model. A
    text for people is added to `warnings` if that is less than its configuration says."""
    trained: int = text.max_position_embeddings
    limit = rope_limit(text)
    if limit is not None and limit < trained:
        warnings.append(f"context limited to {limit}: behind it this model's positions depend on the longest request")
        trained = limit
    return trained


def _window(wanted: int, trained: int, warnings: list[str]) -> int:
    """Return the context window in tokens. wanted: the setting, 0 for the model's own; trained: that of the model. A
    text for people is added to `warnings` if the model supports less."""
    if wanted > trained:
        warnings.append(f"model.max_context {wanted} lowered to the {trained} that the model supports")
    return min(trained, wanted or trained)


def _num_pages(
    given_tokens: int, automatic_tokens: int, page_size: int, window: int, warnings: list[str]
) -> tuple[int, int]:
    """Return (pages of HBM, context window in tokens). given_tokens: tokens that HBM has to hold by the settings, or 0;
    automatic_tokens: how many it holds without a setting. One request with the whole window must always fit, besides
    the pages from which its first blocks may have to be copied; otherwise it would wait for ever. A text is added to
    `warnings` if this makes the window smaller."""
    spare = page_size // BLOCK_TOKENS
    tokens = given_tokens or automatic_tokens
    pages = tokens // page_size
    if pages <= spare:
        why = "" if given_tokens else "the memory that is free holds no more beside the weights; "
        raise ModelRefused(f"HBM for {tokens} tokens is too small: {why}{(spare + 1) * page_size} is the least")
    room = (pages - spare) * page_size
    if room < window:
        why = "" if given_tokens else ", of the memory that is free beside the weights"
        warnings.append(f"context limited to {room} of {window} tokens: HBM holds no more{why} (cache.hbm_tokens)")
    return pages, min(window, room)


def _with_parking(
    config: EngineConfig, probed: ProbedModel, automatic: Sizes, coding: int, window: int, warnings: list[str]
) -> Room:
    """Return the sizes of an engine whose contexts may be larger than HBM, up to what DRAM holds. Raises
    ModelRefused."""
    cache, page_size = config.cache, probed.page_size
    tokens = cache.hbm_tokens or automatic.hbm // probed.hbm_bytes_per_token
    pages, spare = tokens // page_size, page_size // BLOCK_TOKENS  # as in `_num_pages`
    least = LEAST_PAGES + spare
    if pages < least:
        raise ModelRefused(
            f"HBM for {tokens} tokens is too small for cache.larger_than_hbm: {least * page_size} is the least"
        )
    dram_bytes = automatic.dram if cache.dram_bytes is None else cache.dram_bytes
    slots = int(dram_bytes // (probed.stored_bytes_per_token * BLOCK_TOKENS) * (1 - DRAM_FREE_BUFFER))
    ring, most = parking_pages(pages, page_size)
    room = max((pages - ring - spare) * page_size, slots * BLOCK_TOKENS)
    if room < window:
        warnings.append(f"context limited to {room} of {window} tokens: DRAM holds no more (cache.dram_gib)")
    return Room(min(window, room), pages, automatic, coding, tuple(warnings), ring, most)
