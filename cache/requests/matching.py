"""Finds which leading rows of a context are stored, in which tier, and how many of them are worth loading."""

from collections import Counter
from collections.abc import Mapping

from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey, is_exact
from reprise.cache.blocks.match import Match, MatchBasis, RememberedMatch
from reprise.cache.blocks.table import BlockRow, common_prefix
from reprise.cache.options import CacheOptions
from reprise.cache.rates import Rates
from reprise.cache.requests.context import RequestContext
from reprise.cache.requests.load_or_compute import LoadOption, choose_load, first_token_s
from reprise.cache.requests.parking import Parking
from reprise.cache.stats import ResidencyValue
from reprise.cache.tiers.hierarchy import Hierarchy

_NEAR_DIRECTIONS = ("dram_to_hbm", "coded_to_hbm")  # directions without the disk or Redis


class Matcher:
    """A finder of the leading blocks of a context that are stored. The SchedulerView and the Placer ask it, on the
    engine's thread. They ask for a prompt several times before its first token, so the answer and the reasons for
    misses are noted in the context; nothing else is changed."""

    def __init__(self, *, tiers: Hierarchy, rates: Rates, parking: Parking, options: CacheOptions) -> None:
        self._table, self._hbm, self._form, self._disk = tiers.table, tiers.hbm, tiers.form, tiers.disk
        self._saves = tiers.dram.saves
        self._rates, self._parking = rates, parking
        self._reuse = options.reuse
        self._bytes_per_token = options.bytes_per_token
        # A part of a block is used only if a slot has it, from which its rows can be saved once more; else they would
        # have to come out of a page. At most 31 rows are computed again for that.
        self._only_slots = options.only_as_computed and tiers.dram.rows.is_on

    def match(self, context: RequestContext) -> RememberedMatch:
        """Return which leading blocks of a context are stored, and which of them are in HBM or worth loading. While the
        context waits, the last answer is returned again as long as it is valid."""
        basis = self._basis(context)
        answer = None if context.rows.pages else context.reuse.remembered
        if answer is None or answer.basis != basis or answer.rates_version not in (None, self._rates.version):
            answer = self._match_anew(context, basis)
            context.reuse.remembered = None if context.rows.pages else answer
        # A load that failed is the better explanation: without it these blocks might have been loaded.
        if answer.is_rest_cheaper_to_compute and context.reuse.miss_reason is None:
            context.reuse.miss_reason = "cheaper_to_recompute"
        return answer

    def _basis(self, context: RequestContext) -> MatchBasis:
        return MatchBasis(
            self._table.version,
            len(context.token_ids),
            context.reuse.recompute_from,
            context.reuse.open_hint,
            context.reuse.open_place,
            context.reuse.skips_disk,
            len(context.reuse.unread),
        )

    def _match_anew(self, context: RequestContext, basis: MatchBasis) -> RememberedMatch:
        found = self._find(context)
        if self._parking.needs(len(context.token_ids)):
            found = self._parking.usable(found)
        options, ready = self._options(context, found)
        if not options:
            return RememberedMatch(basis, None, found, found.first(ready), False)
        missing = len(context.token_ids) - ready * BLOCK_TOKENS - sum(option.num_tokens for option in options)
        count = choose_load(options, self._rates, missing)
        return RememberedMatch(basis, self._rates.version, found, found.first(ready + count), count < len(options))

    def _find(self, context: RequestContext) -> Match:
        """Return the longest stored prefix of a context. The last token is always left to compute, for its logits."""
        limit = len(context.token_ids) - 1
        if context.reuse.recompute_from is not None:
            limit = min(limit, context.reuse.recompute_from)
        if not self._reuse or limit <= 0 or (self._form.is_condemned and not is_exact(context.session[1])):
            return Match([], None, 0)
        keys = context.chain()
        rows = self._table.matched(keys[: limit // BLOCK_TOKENS])
        rows = rows[: next((b for b, row in enumerate(rows) if not self._is_usable(context, row, b)), len(rows))]
        done = len(rows) * BLOCK_TOKENS
        tail = context.token_ids[done : done + BLOCK_TOKENS]
        most = min(BLOCK_TOKENS, limit - done)
        found = self._open_hint(context, tail, most) if len(rows) == context.reuse.open_place else None
        joint = context.lineage.joint
        # Blocks that follow a kept block in another context do not fit after a cut: they were computed on more history.
        if joint is None or not context.lineage.plain < len(rows) < joint:
            other = self._table.closest_child(context.lineage.parent(len(rows)), tail, context.session_id, most)
            if (
                other is not None
                and self._is_usable(context, other[0], len(rows))
                and other[1] > (found[1] if found else 0)
            ):
                found = other
        if found is not None and self._only_slots and self._saves.slot_of(found[0]) is None:
            found = None
        return Match(rows, *(found or (None, 0)))

    def _open_hint(self, context: RequestContext, tail: list[int], most: int) -> tuple[BlockRow, int] | None:
        row = self._table.get(context.reuse.open_hint) if context.reuse.open_hint is not None else None
        if row is None or not self._is_usable(context, row, context.reuse.open_place):
            return None
        shared = common_prefix(row.token_ids, tail, most)
        return (row, shared) if shared else None

    def _is_usable(self, context: RequestContext, row: BlockRow, block: int) -> bool:
        # This runs for every block of every request that may come next, so the usual case comes first.
        why_not = context.reuse.unread.get(row.key)
        if row.copies and (why_not is None or (row.in_dram and why_not != "memory")):
            if self._disk.problem is None or row.in_dram or "disk" not in row.copies:
                return True
            is_at_hand = self._is_at_hand(row, block)
            if not is_at_hand and context.reuse.miss_reason is None:
                context.reuse.miss_reason = "load_failed"
            return is_at_hand
        return self._is_at_hand(row, block)

    def _is_at_hand(self, row: BlockRow, block: int) -> bool:
        """Return whether a block can be used without a load. block: its index in the context."""
        return row.page is not None and (self._hbm.is_ready(row, block) or self._hbm.can_move(row))

    def _options(self, context: RequestContext, match: Match) -> tuple[list[LoadOption], int]:
        """Return the blocks of a match that may be loaded or computed, whichever is faster
        (docs/contributing/inside.md, "The cache"), and how many blocks before them are used in any case. After a
        truncation all blocks are used, however long loading takes: KV that was computed in a longer context cannot be
        computed again."""
        used, lineage = match.used, context.lineage
        ready = next((b for b, (row, _) in enumerate(used) if not self._hbm.is_ready(row, b)), len(used))
        if ready == len(used) or (lineage.joint is not None and len(used) > lineage.plain):
            return [], len(used)
        options = [
            LoadOption(0 if self._is_at_hand(row, block) else row.size_bytes, self._source(row), tokens)
            for block, (row, tokens) in enumerate(used[ready:], ready)
        ]
        if context.reuse.skips_disk:
            far = (n for n, option in enumerate(options) if option.size_bytes and option.source not in _NEAR_DIRECTIONS)
            options = options[: next(far, len(options))]
        return options, ready

    @staticmethod
    def _source(row: BlockRow) -> str:
        """Return the direction, such as `disk_to_hbm`, in which a block that HBM lacks would be loaded."""
        return f"{row.source}_to_hbm"

    def note_passed_over(self, answer: RememberedMatch) -> None:
        """Record in the rates that a request, as it is admitted, computes a block that it could have loaded, if that is
        so. answer: what `match` returned."""
        found, num_chosen = answer.found.used, len(answer.chosen.used)
        if num_chosen < len(found):
            self._rates.passed_over(self._source(found[num_chosen][0]))

    def tokens_by_tier(self, match: Match) -> dict[str, int]:
        """Return tier -> number of tokens of a match that would be taken from it."""
        return self._counted(match, {})

    def sources(self, context: RequestContext, match: Match) -> dict[str, int]:
        """Return tier -> number of tokens of a match that come from it. A block that an earlier, late load of this
        request has brought into HBM counts for the tier that it came from."""
        return self._counted(match, context.sources.brought)

    def _counted(self, match: Match, brought: Mapping[BlockKey, str]) -> dict[str, int]:
        tokens: dict[str, int] = {}
        for block, (row, used) in enumerate(match.used):
            tier = self._tier(row, block)
            if tier == "hbm":
                tier = brought.get(row.key, tier)
            tokens[tier] = tokens.get(tier, 0) + used
        return tokens

    def _tier(self, row: BlockRow, block: int) -> str:
        """Return the tier from which a block would be taken, under its name in reports. block: its index in the
        context."""
        if self._is_at_hand(row, block):
            return "hbm"
        return row.medium

    def own_tokens(self, context: RequestContext, match: Match) -> int:
        """Return how many tokens of a match are stored for the context's session alone."""
        alone = (context.session,)
        return sum(used for row, used in match.used if row.owners == alone)

    def coded_tokens(self, match: Match) -> int:
        """Return how many tokens of a match have KV that a codec has changed, or will have when they are loaded."""
        if not self._form.is_used:
            return 0
        return sum(used for block, (row, used) in enumerate(match.used) if self._is_coded(row, block))

    def _is_coded(self, row: BlockRow, block: int) -> bool:
        if self._is_at_hand(row, block):
            return row.decoded
        return self._form.comes_coded(row)

    def residency(self, context: RequestContext) -> ResidencyValue:
        """Return how many tokens of a context without pages each tier has, and what has to be loaded or computed."""
        match = self.match(context).chosen
        tokens = self.tokens_by_tier(match)
        hbm = tokens.pop("hbm", 0)
        sources = tokens if not self._form.is_used else self._by_source(match)
        load_s = sum(
            self._rates.load_s(f"{source}_to_hbm", count * self._bytes_per_token) for source, count in sources.items()
        )
        missing = len(context.token_ids) - match.num_tokens
        return self._residency(hbm, tokens, missing, self.own_tokens(context, match), load_s, False)

    def _by_source(self, match: Match) -> dict[str, int]:
        """Return source -> number of tokens of a match that HBM lacks. A source is a tier, or `coded` for compressed
        blocks in DRAM."""
        tokens = Counter[str]()
        for block, (row, used) in enumerate(match.used):
            if not self._is_at_hand(row, block):
                tokens[row.source] += used
        return tokens

    def on_the_way(self, context: RequestContext, to_come: dict[str, int], load_s: float) -> ResidencyValue:
        """Return where the KV of a context that has pages in HBM lies. to_come: tier -> tokens that its load under way
        still brings. load_s: seconds that this load still takes."""
        hbm = context.rows.computed - sum(to_come.values())
        missing = len(context.token_ids) - context.rows.computed
        return self._residency(hbm, to_come, missing, context.sources.own_tokens, load_s, bool(to_come))

    def _residency(
        self, hbm: int, lower: dict[str, int], missing: int, own: int, load_s: float, is_loading: bool
    ) -> ResidencyValue:
        compute_s = self._rates.compute_s(missing)
        return ResidencyValue(
            hbm_tokens=hbm,
            lower_tokens=lower,
            bytes_to_load=sum(lower.values()) * self._bytes_per_token,
            missing_tokens=missing,
            compute_s=compute_s,
            own_tokens=own,
            load_s=load_s,
            exposed_s=first_token_s(load_s, compute_s, self._rates.num_layers) - compute_s if load_s else 0.0,
            is_loading=is_loading,
        )
