"""Carries out the cache's moves: the only place, with `tiers/` and `codec`, that touches bytes."""

from collections.abc import Sequence

import torch

from cache.plan import CopyRows, Move
from kernels.attention.base import KvPages
from kernels.kv_copy import copy_rows


def carry_out(moves: Sequence[Move], pages: Sequence[KvPages]) -> None:
    """Copies inside HBM, in order, on the current stream. A later move may read what an earlier one wrote, or overwrite
    what it read, so each move is one call: they are rare (a fork, a cut block) and short."""
    for move in moves:
        _copy(move, pages)


def _copy(move: CopyRows, pages: Sequence[KvPages]) -> None:
    page_size = pages[0].k.shape[1]
    device = pages[0].k.device
    rows = torch.arange(move.num_rows, device=device)
    copy_rows(
        [layer.k for layer in pages],
        [layer.v for layer in pages],
        rows + (move.source_page * page_size + move.source_row),
        rows + (move.target_page * page_size + move.target_row),
    )
