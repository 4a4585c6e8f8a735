"""A pool whose rows say what they hold, and every promise of the cache manager as one check.

The KV of a row depends on its token and on all tokens before it. Here a row holds a number that stands for just that:
two rows are equal exactly if their tokens, their whole prefixes and their tenants are. What the engine would write or
copy is written and copied at the same places, so a row counted as computed that holds anything else is seen.
"""

from collections.abc import Iterable

from cache.block import BLOCK_TOKENS, BlockKey, KeyDomain
from cache.context import RunningContext
from cache.manager import CacheManager
from cache.policies import POLICIES

EMPTY = -1


def domain_of(tenant: str, salt: str) -> KeyDomain:
    return KeyDomain(secret=b"a secret", fingerprint=b"a model", tenant=tenant, salt=salt)


def make_manager(
    *,
    num_pages: int = 16,
    page_size: int = 32,
    contiguous: bool = True,
    reuse: bool = True,
    policy: str = "lru",
    ttl_s: float = 1000.0,
    max_sessions: int = 100,
) -> CacheManager:
    return CacheManager(
        num_pages=num_pages,
        page_size=page_size,
        bytes_per_token=4,
        prefer_contiguous=contiguous,
        reuse=reuse,
        policy=POLICIES[policy](),
        domain_of=domain_of,
        session_ttl_s=ttl_s,
        max_sessions=max_sessions,
    )


class PoolModel:
    """Plays the engine's part around a CacheManager: moves, forward passes, commits."""

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.rows = [EMPTY] * (manager.pages.num_pages * manager.page_size)
        self.contexts: dict[str, RunningContext] = {}  # the open requests
        self._numbers: dict[tuple[object, int], int] = {}  # (prefix, token) -> its number
        self._block_end: dict[BlockKey, int | str] = {}  # full block, or the root of a domain -> number of its last row
        self._expected: dict[str, list[int]] = {}

    # --- the engine's part --------------------------------------------------------------------------------------------

    def open(
        self, request_id: str, tokens: Iterable[int], *, session: str = "s", tenant: str = "", salt: str = ""
    ) -> None:
        """A list stays shared with the caller, who may append what is sampled."""
        token_ids = tokens if isinstance(tokens, list) else list(tokens)
        self.manager.open(request_id, tenant, salt, session, token_ids)
        self.contexts[request_id] = self.manager.context(request_id)

    def close(self, request_id: str, num_tokens: int | None = None, now: float = 0.0) -> None:
        context = self.contexts.pop(request_id)
        self.manager.close(request_id, len(context.token_ids) if num_tokens is None else num_tokens, now)

    def move(self) -> None:
        """Carry out what the manager ordered; at the latest before the next step."""
        size = self.manager.page_size
        for move in self.manager.take_moves():
            source, target = move.source_page * size + move.source_row, move.target_page * size + move.target_row
            assert move.source_row + move.num_rows <= size
            assert move.target_row + move.num_rows <= size
            self.rows[target : target + move.num_rows] = self.rows[source : source + move.num_rows]

    def step(self, request_id: str, num_tokens: int) -> None:
        """A forward pass over the next `num_tokens` tokens of one request, and its commit."""
        self.forward(request_id, num_tokens)
        self.manager.commit(request_id, num_tokens)

    def forward(self, request_id: str, num_tokens: int) -> None:
        self.move()
        context = self.contexts[request_id]
        size = self.manager.page_size
        expected = self.expected(context)
        assert context.computed + num_tokens <= len(expected)
        for place in range(context.computed, context.computed + num_tokens):
            self.rows[context.pages[place // size] * size + place % size] = expected[place]

    def run(self, request_id: str, tokens: Iterable[int], *, answer: Iterable[int] = (), session: str = "s") -> int:
        """One whole turn: open, admit, prefill, decode `answer` but for its last token, close. Returns how many tokens
        were found."""
        self.open(request_id, tokens, session=session)
        context = self.contexts[request_id]
        pending = len(context.token_ids) - self.manager.resident_tokens(request_id)
        cached = self.manager.admit(request_id, pending)
        assert cached is not None
        self.step(request_id, pending)
        for place, token in enumerate(answer):
            if place:
                assert self.manager.grow(request_id, 1)
                self.step(request_id, 1)
            context.token_ids.append(token)
        self.check()
        self.close(request_id)
        self.check()
        return cached

    # --- what must be true --------------------------------------------------------------------------------------------

    def expected(self, context: RunningContext) -> list[int]:
        """What each row of a context has to hold. Learns the names of its blocks on the way."""
        rows = self._expected.setdefault(context.request_id, [])
        root = f"{context.tenant}/{context.salt}"
        self._block_end[context.domain.root] = root
        for token in context.token_ids[len(rows) :]:
            rows.append(self._number(rows[-1] if rows else root, token))
        for block, key in enumerate(context.domain.chain(context.token_ids)):
            self._block_end[key] = rows[(block + 1) * BLOCK_TOKENS - 1]
        return rows

    def _number(self, prefix: object, token: int) -> int:
        return self._numbers.setdefault((prefix, token), len(self._numbers))

    def check(self) -> None:
        self.move()
        for context in self.contexts.values():
            self._check_context(context)
        self._check_blocks()
        self._check_pages()
        self._check_in_flight()

    def _check_context(self, context: RunningContext) -> None:
        """Every computed row holds its own token behind its own prefix, and what comes next can be written safely."""
        size = self.manager.page_size
        expected = self.expected(context)
        if not context.pages:
            assert context.computed == 0
            return
        assert context.computed <= len(context.pages) * size
        held = [row for page in context.pages for row in self.rows[page * size : (page + 1) * size]]
        assert held[: context.computed] == expected[: context.computed], context
        assert len(set(context.pages)) == len(context.pages)
        published = {(row.page, row.offset // BLOCK_TOKENS) for row in self.manager.table}
        for place in range(context.computed // BLOCK_TOKENS, len(context.pages) * size // BLOCK_TOKENS):
            page = context.pages[place * BLOCK_TOKENS // size]
            block = place * BLOCK_TOKENS % size // BLOCK_TOKENS
            assert self.manager.pages.pins(page) == 1, "somebody else runs on a page that will be written"
            assert (page, block) not in published, "a block is findable where rows will be written"

    def _check_blocks(self) -> None:
        """Every block that can be found holds what its name says."""
        size = self.manager.page_size
        places = set()
        for row in self.manager.table:
            prefix: object = self._block_end[row.parent]
            numbers = [prefix := self._number(prefix, token) for token in row.token_ids]
            start = row.page * size + row.offset
            assert self.rows[start : start + len(numbers)] == numbers, row
            assert row.is_open == (len(numbers) < BLOCK_TOKENS)
            assert row.offset % BLOCK_TOKENS == 0
            assert row.offset + len(numbers) <= size
            assert row.size_bytes == 4 * len(numbers)
            places.add((row.page, row.offset))
        assert len(places) == len(self.manager.table), "two blocks at one place"

    def _check_pages(self) -> None:
        """A page is free, cached or pinned, and for a reason; a free one is wiped, so that no luck hides a mistake."""
        manager, pages = self.manager, self.manager.pages
        pins, residents = [0] * pages.num_pages, [0] * pages.num_pages
        for context in self.contexts.values():
            for page in context.pages:
                pins[page] += 1
        for row in manager.table:
            residents[row.page] += 1
        for page in range(pages.num_pages):
            assert (pages.pins(page), pages.residents(page)) == (pins[page], residents[page])
            assert pages.is_free(page) == (pins[page] == residents[page] == 0)
            if pages.is_free(page):
                self.rows[page * manager.page_size : (page + 1) * manager.page_size] = [EMPTY] * manager.page_size
        assert pages.num_free == sum(pages.is_free(page) for page in range(pages.num_pages))
        assert pages.num_pinned == manager.num_leases == sum(count > 0 for count in pins)
        assert pages.num_free + pages.num_cached + pages.num_pinned == pages.num_pages
        ranked = manager._policy.victims(len(manager.table) + 1, ())
        assert sorted(ranked) == sorted(row.key for row in manager.table)

    def _check_in_flight(self) -> None:
        """Whoever is waited for runs, and will compute that block."""
        for key, owner in self.manager._in_flight.items():
            context = self.contexts[owner]
            assert context.pages
            assert key in context.chain()[context.computed // BLOCK_TOKENS :]
