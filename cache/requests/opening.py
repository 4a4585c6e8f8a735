"""Decides what a request's context contains at first, by arithmetic on tokens alone: from what its session had, what
its client dropped and what the window holds (AttentionStore §3.4)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from reprise.cache.blocks.context import SessionContext, digest_of
from reprise.cache.blocks.keys import BLOCK_TOKENS, BlockKey, KeyDomain
from reprise.cache.blocks.lineage import Lineage
from reprise.cache.blocks.table import SessionName
from reprise.cache.blocks.truncate import (
    CutRules,
    DoesNotFit,
    Range,
    apply_cuts,
    map_offset,
    merge_cuts,
    plan_cut,
    subtract,
)
from reprise.cache.options import Truncation
from reprise.cache.requests.context import Cuts, RequestContext, Reuse
from reprise.cache.requests.keeping import Keeper
from reprise.cache.requests.recalling import Recaller
from reprise.cache.tiers.hierarchy import Hierarchy

DomainOf = Callable[[str, str], KeyDomain]
"""Returns the key domain of (tenant, cache salt)."""

_MIN_SHIFTED_BLOCKS = 4  # least blocks to spare; fewer are not worth the remains of what the client dropped


@dataclass(frozen=True, slots=True)
class ClientCut:
    """A truncation that the client made itself (docs/sessions.md, "When the window is full"). It sent the first `keep`
    tokens of `stream`, the conversation with nothing dropped, and those from `resume` on."""

    stream: list[int]
    keep: int
    resume: int


class ContextOpener:
    """The maker of each request's context: its tokens and block keys. It also drops history from contexts that have
    outgrown the window, but only while they hold no pages in HBM. The Lifecycle calls it, on the engine's thread."""

    def __init__(
        self,
        *,
        tiers: Hierarchy,
        sessions: Mapping[SessionName, SessionContext],
        truncation: Truncation,
        domain_of: DomainOf,
        keeper: Keeper,
        recaller: Recaller | None,
    ) -> None:
        """Set up. recaller: None if dropped blocks are never recalled."""
        self._table, self._stats = tiers.table, tiers.stats
        self._sessions = sessions
        self._truncation = truncation
        self._domain_of = domain_of
        self._keeper, self._recaller = keeper, recaller

    def open(
        self,
        request_id: str,
        name: SessionName,
        stream: list[int],
        rules: CutRules,
        reserve: int,
        client_cut: ClientCut | None,
    ) -> RequestContext:
        """Return the context of the conversation `stream`, cut so that it and `reserve` more tokens fit the window.
        rules: what may be dropped. client_cut: how the client itself has shortened the conversation, if it has. Raises
        DoesNotFit."""
        context = None
        if client_cut is not None and self._truncation.mode != "recompute":
            context = self._shifted(request_id, name, client_cut, rules)
        if context is None:
            known = self._known_cuts(name, stream) if rules.allowed else []
            own = self._own_cuts(name, known)
            if own != known and _length(stream, own) + reserve <= self._truncation.window:
                known = own  # the client has sent again what it had dropped, and there is room for it
            context = self._begin(request_id, name, stream, rules, known)
        rules = context.cuts.rules
        if rules.allowed:
            starts = rules.message_starts
            length = len(context.cuts.stream)
            newest = starts[-1] if starts else length - 1
            try:
                self._cut(context, reserve, newest)
            except DoesNotFit:
                if not rules.begun_tokens:
                    raise
                self._cut(context, reserve, self._last_part(context, length))  # as while it was written
            if self._recaller is not None and context.cuts.ranges:
                self._recaller.recall(context, newest)
                self._stats.recalled_tokens += context.cuts.recalled_tokens
        elif len(context.token_ids) >= self._truncation.window:
            raise DoesNotFit(f"{len(context.token_ids)} tokens, the window holds {self._truncation.window}")
        return context

    def resume(self, context: RequestContext, token_ids: Sequence[int]) -> int:
        """Append generated tokens to the prompt of a context that was opened just now. Where they fill the window, drop
        history in the same way as `shorten` did when they were generated. Returns the number of tokens dropped. Raises
        DoesNotFit, also where nothing may be dropped."""
        window, dropped, place = self._truncation.window, 0, 0
        while place < len(token_ids):
            more = token_ids[place : place + window - len(context.token_ids)]
            place += len(more)
            context.token_ids += more
            context.cuts.stream = [*context.cuts.stream, *more]  # the request's own list stays as it is
            context.prompt_tokens = len(context.token_ids)
            if len(context.token_ids) >= window:
                if not context.cuts.rules.allowed or not (freed := self.shorten(context)):
                    raise DoesNotFit(f"{len(context.token_ids)} tokens, the window holds {window}")
                dropped += freed
                context.rows.reached = 0  # nothing of it is computed here
        return dropped

    def shorten(self, context: RequestContext) -> int:
        """Drop history of a context that has filled the window in the middle of its generation. Returns the number of
        tokens dropped. Raises DoesNotFit."""
        before = len(context.token_ids)
        context.cuts.stream = context.conversation
        length = len(context.cuts.stream)
        self._cut(context, max(1, self._truncation.window // 8), self._last_part(context, length))
        context.rows.reached = len(context.token_ids) - 1
        return before - len(context.token_ids)

    def _last_part(self, context: RequestContext, length: int) -> int:
        """Return the offset in a stream of `length` tokens up to which history may be dropped while an answer is
        written. An answer longer than the window loses its own beginning, but never its last quarter window."""
        starts = context.cuts.rules.message_starts
        return max(starts[-1] if starts else 0, length - self._truncation.window // 4)

    def forget_unreadable(self, context: RequestContext) -> int:
        """Drop the recalled blocks that could not be read from a context, which has no pages now. Returns the number of
        tokens dropped."""
        lost = self._recaller.unreadable(context) if self._recaller is not None and context.cuts.recalled else []
        if not lost:
            return 0
        num_tokens = sum(b - a for a, b in lost)
        context.cuts.stream = context.conversation
        self._drop(context, lost)
        context.rows.reached = min(context.rows.reached, len(context.token_ids) - 1)
        context.cuts.recalled_tokens = max(0, context.cuts.recalled_tokens - num_tokens)
        return num_tokens

    def _known_cuts(self, name: SessionName, stream: list[int]) -> list[Range]:
        """Return the cuts that the session made in this conversation in earlier turns; none if the conversation is
        another."""
        session = self._sessions.get(name)
        if session is None or not session.cuts:
            return []
        end = session.cuts[-1][1]
        return session.cuts if len(stream) > end and digest_of(stream[:end]) == session.cut_digest else []

    def _own_cuts(self, name: SessionName, known: list[Range]) -> list[Range]:
        """Return the known cuts that the server made, not the client."""
        return self._sessions[name].own_cuts if known else known

    def _begin(
        self, request_id: str, name: SessionName, stream: list[int], rules: CutRules, cuts: list[Range]
    ) -> RequestContext:
        """Return the context of a conversation. cuts: those of the session's earlier cuts that stay."""
        session = self._sessions.get(name)
        before = session.cuts if session is not None else []
        sent_keys: list[BlockKey] = []
        if session is not None and cuts:
            sent_keys = session.cut_conversation[: before[-1][1] // BLOCK_TOKENS]  # as the digest says
        tokens = apply_cuts(stream, cuts)
        lineage, known, open_hint = Lineage(self._domain_of(name[0], name[1])), 0, None
        if session is not None and (cuts or not before) and self._truncation.mode != "recompute":
            known = self._still_known(session, tokens)
            lineage = session.lineage.first(known)
            if known == len(session.keys):
                open_hint = session.open_key
        elif session is not None and self._truncation.mode != "recompute":
            # What the session has was computed after cuts that do not count any more. Use what precedes them.
            keys = lineage.extend(tokens)
            known = next((place for place, key in enumerate(keys) if key not in self._table), len(keys))
            lineage = lineage.first(known)
        return RequestContext(
            request_id=request_id,
            session=name,
            token_ids=tokens,
            prompt_tokens=len(tokens),
            lineage=lineage,
            cuts=Cuts(
                rules=rules,
                stream=stream,
                ranges=list(cuts),
                by_client=list(session.client_cuts) if session is not None and cuts == before else [],
                sent_keys=sent_keys,
                moves_history=cuts != before,
                attention=dict(session.attention) if session is not None else {},
                dropped=dict(session.dropped) if session is not None and cuts else {},
                recalled=set(session.recalled) if session is not None and cuts else set(),
            ),
            reuse=Reuse(
                open_hint=open_hint,
                open_place=known,
                lost_lineage=bool(session and cuts and cuts == before and known < (session.lineage.joint or 0)),
            ),
        )

    def _shifted(self, request_id: str, name: SessionName, cut: ClientCut, rules: CutRules) -> RequestContext | None:
        """Return the context of a request whose client dropped messages itself, so that it uses the blocks that the
        client kept. Blocks are kept whole, so where messages end inside of blocks, the context may be up to a block
        longer than what was sent. Return None if too few blocks could be used again."""
        moved = cut.resume - cut.keep

        def in_stream(offset: int) -> int:
            return offset if offset < cut.keep else offset + moved

        rules = CutRules(
            allowed=rules.allowed,
            keep_first=rules.keep_first,
            message_starts=tuple(in_stream(start) for start in rules.message_starts),
            important=tuple((in_stream(a), in_stream(b - 1) + 1) for a, b in rules.important),
            begun_tokens=rules.begun_tokens,
        )
        known = self._known_cuts(name, cut.stream)
        own = self._own_cuts(name, known)
        if any(a < cut.resume < b for a, b in subtract(known, own)):
            known = own  # the client sends again what it had dropped
        context = self._begin(request_id, name, cut.stream, rules, known)
        first = -(-map_offset(cut.keep, context.cuts.ranges) // BLOCK_TOKENS) * BLOCK_TOKENS
        last = map_offset(cut.resume, context.cuts.ranges) // BLOCK_TOKENS * BLOCK_TOKENS
        spared = len(context.keys) * BLOCK_TOKENS - last
        inside = any(a < cut.resume < b for a, b in context.cuts.ranges)  # it kept what is not there any more
        if inside or spared < _MIN_SHIFTED_BLOCKS * BLOCK_TOKENS:
            return None
        if first < last:
            own = subtract(context.cuts.ranges, context.cuts.by_client)
            self._drop(context, [(first, last)])
            context.cuts.by_client = subtract(context.cuts.ranges, own)
        context.cuts.shifted_tokens = len(context.keys) * BLOCK_TOKENS - min(first, last)
        return context

    def _still_known(self, session: SessionContext, tokens: list[int]) -> int:
        """Return how many leading blocks of a session's last context these tokens begin with. The session knows only
        the blocks' keys; their tokens are in the table as long as they are stored, so other blocks cannot be compared
        and do not count."""
        count = 0
        for count, key in enumerate(session.keys):
            start = count * BLOCK_TOKENS
            row = self._table.get(key)
            if row is None or row.token_ids.tolist() != tokens[start : start + BLOCK_TOKENS]:
                return count
        return len(session.keys)

    def _cut(self, context: RequestContext, reserve: int, newest: int) -> bool:
        """Drop from a context what does not fit with `reserve` more tokens. Returns whether anything was dropped.
        newest: offset in the stream where the newest message begins."""
        rules, tokens = context.cuts.rules, context.token_ids
        if len(tokens) + reserve <= self._truncation.window:
            return False  # spares mapping hundreds of messages past the cuts for nothing
        outside = [start for start in rules.message_starts if not any(a <= start < b for a, b in context.cuts.ranges)]
        newest = map_offset(newest, context.cuts.ranges)
        more = plan_cut(
            len(tokens),
            window=self._truncation.window,
            ratio=self._truncation.ratio,
            reserve=reserve,
            keep_first=map_offset(rules.keep_first, context.cuts.ranges),
            newest=newest,
            starts=[map_offset(start, context.cuts.ranges) for start in outside],
            marked=[
                (map_offset(a, context.cuts.ranges), map_offset(b, context.cuts.ranges)) for a, b in rules.important
            ],
            scores_of=self._keeper.scores_of(context, newest),
        )
        if not more:
            return False
        self._stats.truncated_tokens += sum(b - a for a, b in more)
        self._drop(context, more)
        return True

    def _drop(self, context: RequestContext, cuts: list[Range]) -> None:
        """Remove ranges of whole blocks from a context that has no pages."""
        if self._recaller is not None:
            self._recaller.note_dropped(context, cuts)
        context.cuts.ranges, context.cuts.is_new, context.reuse.remembered = (
            merge_cuts(context.cuts.ranges, cuts),
            True,
            None,
        )
        if self._truncation.mode == "recompute":
            context.lineage, context.reuse.open_hint = Lineage(context.domain), None
            context.cuts.moves_history = True
        else:
            self._cut_lineage(context, cuts)
        context.token_ids[:] = apply_cuts(context.token_ids, cuts)
        context.prompt_tokens = len(context.token_ids)

    def _cut_lineage(self, context: RequestContext, cuts: Sequence[Range]) -> None:
        # Leave out the keys after `open_place`: their KV was never computed, and they would be taken for kept blocks.
        before = context.lineage.first(context.reuse.open_place)
        end = context.reuse.open_place * BLOCK_TOKENS
        if any(a <= end < b for a, b in cuts):
            context.reuse.open_hint = None
        context.reuse.open_place = map_offset(end, cuts) // BLOCK_TOKENS
        moved = context.reuse.open_hint is not None and cuts[0][0] < end
        context.lineage = before.without(cuts, context.reuse.open_hint if moved else None)


def _length(stream: Sequence[int], cuts: Sequence[Range]) -> int:
    return len(stream) - sum(b - a for a, b in cuts)
