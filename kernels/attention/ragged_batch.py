"""Defines the input of an attention backend: one flat ragged batch over a paged KV pool."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor


@dataclass(slots=True)
class AttentionMeta:
    """The shape of one step's batch, the same for all layers. Sequence i owns the query rows query_start[i] ..
    query_start[i + 1]. They are the last rows of its context, so its query row j is at position
    context_lens[i] - query_lens[i] + j. Row p of a context is row p % page_size of page block_table[i, p //
    page_size]."""

    query_lens: list[int]
    context_lens: list[int]  # KV rows of each sequence, including those of this step, which are in the pool already
    query_start: Tensor  # [seqs + 1] int32
    context_len: Tensor  # [seqs] int32
    block_table: Tensor  # [seqs, max_pages] int32, rows padded with 0
    slots: Tensor  # [tokens] int64, page * page_size + row of each token of this step
    # Sequences that may attend to a part of their contexts, each with a number that nothing else gets while its rows
    # stay what they are.
    partial: dict[int, int] = field(default_factory=dict)
    scratch: dict[str, Any] = field(default_factory=dict)  # values that a backend computes once per step


@dataclass(frozen=True, slots=True)
class Selection:
    """The context rows, for each kv head, that some sequences with one query row attend to. All other sequences attend
    to all of their rows. Used only for layers without window, softcap and sinks."""

    sequences: tuple[int, ...]
    rows: Tensor  # [sequences, kv_heads, most] int32, ascending
    counts: Tensor  # [sequences, kv_heads] int64: how many of `rows` count, at least one

    def of(self, sequence: int) -> list[Tensor] | None:
        """Return the rows that a sequence attends to, by kv head, each int64; None: it attends to all rows."""
        if sequence not in self.sequences:
            return None
        at = self.sequences.index(sequence)
        return [rows[:count].long() for rows, count in zip(self.rows[at], self.counts[at].tolist(), strict=True)]


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """The parameters of one layer's attention, which may differ between layers."""

    scale: float
    window: int | None  # sliding window: query q sees key k if 0 <= q - k < window
    softcap: float | None  # logits become softcap * tanh(logits / softcap)
    sinks: Tensor | None  # [heads]: an extra logit per head that takes probability but has no value
    selection: Selection | None = None  # None: all sequences attend to all of their rows


@dataclass(frozen=True, slots=True)
class KvPages:
    """One layer's pages of KV. Keys are rotated for their current positions. This class stores the numbers of keys and
    values unchanged. Classes for pages of another format derive from it, and override `beside`, `is_packed`, `to_rows`
    and `to_numbers`."""

    k: Tensor  # [pages, page_size, kv_heads, k_dim + beside]
    v: Tensor  # [pages, page_size, kv_heads, v_dim + beside]

    beside: ClassVar[int] = 0
    """Number of elements that each head of a row has in addition to its numbers, such as a scale."""
    is_packed: ClassVar[bool] = False
    """Whether heads are packed as in `reprise.kernels.cpu.packed_heads`, which compiled kernels for CPUs need to
    know."""

    @property
    def k_dim(self) -> int:
        """The number of dims of one head's key."""
        return self.k.shape[3] - self.beside

    @property
    def v_dim(self) -> int:
        """The number of dims of one head's value."""
        return self.v.shape[3] - self.beside

    @property
    def has_kernels(self) -> bool:
        """Whether compiled kernels for CPUs can read the rows of these pages."""
        return self.is_packed or self.k.dtype == self.v.dtype == torch.bfloat16

    @staticmethod
    def to_rows(numbers: Tensor) -> Tensor:
        """Return numbers in the form in which these pages store them: [..., dim] -> [..., dim + beside]. `beside`
        elements of this format, such as a scale, follow the numbers of a head."""
        return numbers

    @staticmethod
    def to_numbers(rows: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return the numbers of stored rows: [..., dim + beside] -> [..., dim]. A packed format unpacks them to
        `dtype`. A format that stores numbers unchanged returns them in their own dtype."""
        return rows


@dataclass(frozen=True, slots=True)
class PageFormat:
    """The format of pages: the dtype of their pools, and the class of the pages."""

    dtype: torch.dtype
    kind: type[KvPages] = KvPages


class AttentionBackend(Protocol):
    """A backend that computes causal attention of every query row over its own context, for prefill chunks and decode
    rows alike. The model runner calls it in every layer, on the engine's thread."""

    name: str
    page_multiple: int  # page sizes must be multiples of this

    def forward(self, q: Tensor, kv: KvPages, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """Attend: q [tokens, heads, k_dim] -> [tokens, heads, v_dim], in q's dtype. heads is a multiple of kv_heads;
        head h reads kv head h // (heads // kv_heads)."""
        ...


class BackendUnavailable(Exception):
    """A backend cannot run here. The message says what is missing. Raised when the backend is created."""


class AttentionUnsupported(Exception):
    """A backend cannot compute what a layer needs. The message says what. Raised by `forward` before any work."""
