"""Records which KV rows of a running context HBM has, and in which pages."""

from dataclasses import dataclass, field

from reprise.cache.blocks.keys import BlockKey

PARKED = -1
"""Page number for a page that a context has given up, because its blocks are read from their DRAM slots."""


@dataclass(slots=True)
class ContextRows:
    """The pages of a running context. Row p of the context, which is the KV of its token p, is row p % page_size of
    pages[p // page_size], unless that page is PARKED: its rows are only in DRAM. The Placer adds pages, the Lifecycle
    counts rows, and the Publisher removes the pages."""

    pages: list[int] = field(default_factory=list)  # pinned, in order; empty while the request waits
    computed: int = 0  # leading rows that hold KV now, or will before they are read
    sealed: int = 0  # leading blocks already considered for publishing
    reached: int = 0  # most rows it had computed when it was preempted; the tokens are known, the KV may be gone
    is_trusted: bool = True  # False: it shares blocks that gave an impossible result, so none of its own are published
    # the first rows of the block in which it goes on may have come out of a codec
    continues_raw: bool = False
    moved: dict[int, tuple[BlockKey, int]] = field(default_factory=dict)  # copies to be published: block -> (key, page)
    published: dict[BlockKey, None] = field(default_factory=dict)  # blocks that it has put into the table

    def give_back(self) -> None:
        """Forget the pages and the computed rows. The caller unpins the pages."""
        self.pages, self.computed, self.sealed = [], 0, 0

    @property
    def last_page(self) -> int | None:
        """The page of the last rows; None if there is none or it is parked (given up for DRAM)."""
        return self.pages[-1] if self.pages and self.pages[-1] != PARKED else None
