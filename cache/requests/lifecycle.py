"""Follows a request from its arrival to its end, as the engine reports it."""

from collections.abc import Sequence

from reprise.cache.blocks.keys import BLOCK_TOKENS, given_salt, salt_of
from reprise.cache.blocks.truncate import CutRules
from reprise.cache.moves import CapturePiece
from reprise.cache.requests.context import RequestContext
from reprise.cache.requests.keeping import Keeper
from reprise.cache.requests.loading import Loads
from reprise.cache.requests.opening import ClientCut, ContextOpener
from reprise.cache.requests.provenance import report_prompt
from reprise.cache.requests.publishing import Publisher
from reprise.cache.requests.running import Requests
from reprise.cache.requests.saving import Saver
from reprise.cache.sessions import SessionStore
from reprise.cache.stats import TokensBySource
from reprise.cache.tiers.hierarchy import Hierarchy


class Lifecycle:
    """The steps of a request through the cache, for the engine's loop, on its thread: the request is opened on arrival,
    admitted by the scheduler (`SchedulerView`), committed after every step and closed at its end. Raises KeyError on a
    request that is not open."""

    def __init__(
        self,
        *,
        tiers: Hierarchy,
        running: Requests,
        sessions: SessionStore,
        opener: ContextOpener,
        loads: Loads,
        saver: Saver,
        publisher: Publisher,
        reuse: bool,
    ) -> None:
        self._tiers = tiers
        self._running, self._sessions = running, sessions
        self._opener, self._loads, self._saver, self._publisher = opener, loads, saver, publisher
        self._reuse = reuse

    def open(
        self,
        request_id: str,
        tenant: str,
        salt: str,
        session_id: str,
        stream: list[int],
        rules: CutRules,
        reserve: int,
        client_cut: ClientCut | None,
        now: float,
    ) -> list[int]:
        """Open a request that arrived with the conversation `stream`. rules: what may be dropped of it. client_cut: how
        the client itself has shortened the conversation, if it has. Returns its context's tokens, cut so that they and
        `reserve` more fit the window. The list belongs to the sequence from now on. Raises DoesNotFit."""
        if self._tiers.form.is_condemned:  # every request is served as one that asks for exact KV
            salt = salt_of(given_salt(salt), is_exact=True)
        name = (tenant, salt, session_id)
        context = self._opener.open(request_id, name, stream, rules, reserve, client_cut)
        self._running.begin(context)
        self._tiers.used(name, now, len(context.token_ids))
        return context.token_ids

    def resume(self, request_id: str, token_ids: Sequence[int]) -> int:
        """Append tokens that another engine has generated to a request that was opened just now, and drop history
        wherever that engine had to. Returns the number of tokens dropped. Raises DoesNotFit."""
        return self._opener.resume(self._running[request_id], token_ids)

    def compute_all(self, request_id: str) -> None:
        """Reuse nothing for a request that was opened just now, because it wants the logits of its whole prompt. The
        stored blocks of the prompt stay."""
        context = self._running[request_id]
        context.reuse.recompute_from, context.reuse.miss_reason = 0, "prompt_logprobs"

    def context(self, request_id: str) -> RequestContext:
        """Return the context of a request. The caller must not change it."""
        return self._running[request_id]

    def report(self, request_id: str) -> TokensBySource:
        """Return from which tiers the prompt's KV came, for a request that was just admitted for the first time."""
        context = self._running[request_id]
        session = self._sessions.contexts.get(context.session)
        expired = self._sessions.deletions.expired.get(context.session)
        return report_prompt(context, session, self._tiers.table, reuse=self._reuse, expired=expired)

    def patience_s(self, request_id: str) -> float:
        """Return how many more seconds a step may wait for the next layer of a request's load before the load is given
        up; inf if it is not to be given up."""
        return self._loads.patience_s(self._running[request_id])

    # --- steps --------------------------------------------------------------------------------------------------------

    def capture(self, request_id: str, num_tokens: int, batch_row: int) -> list[CapturePiece]:
        """Return where to save the KV of the next `num_tokens` rows, which a step computes as the rows of its batch
        from `batch_row` on. Call it before `commit`."""
        context = self._running[request_id]
        if num_tokens == 1:
            # Most decoded rows go on with a block that has its slot.
            block, place = divmod(context.rows.computed, BLOCK_TOKENS)
            if (slot := context.saving.slots.get(block)) is not None:
                return [CapturePiece(batch_row, slot, place, 1)]
        return self._saver.capture(context, num_tokens, batch_row)

    def commit(self, request_id: str, num_tokens: int) -> None:
        """Record that a step wrote the next `num_tokens` rows, and let other requests find the blocks that are full
        now."""
        context = self._running[request_id]
        context.rows.computed += num_tokens
        # Most decoded rows fill no block.
        if self._reuse and (context.rows.moved or context.rows.computed >= (context.rows.sealed + 1) * BLOCK_TOKENS):
            self._publisher.publish(context)

    def attended(self, request_id: str, shares: Sequence[float]) -> None:
        """Record how the rows of a step attended to the blocks of a request's context. shares: each block's share of
        all attention, in order."""
        Keeper.note_attention(self._running[request_id], shares)

    def take_failed(self) -> list[str]:
        """Return the ids of the requests whose load has failed, each once. What they have computed with the loaded KV
        is invalid: call `void` for each. When they are admitted again, they reuse what is still stored of their
        history."""
        return self._loads.take_failed() if self._loads.failed else []

    def void(self, request_id: str) -> int:
        """Take the pages from a request whose load has failed or is late, and let no other request find what it has
        computed with that load. Recalled blocks (once dropped from the window, then brought back) that could not be
        read leave its context. Returns the number of tokens that were dropped with them."""
        context = self._running[request_id]
        self._publisher.void(context)
        return self._opener.forget_unreadable(context)

    def truncate(self, request_id: str) -> int:
        """Drop history of a running request that has filled the window in the middle of its generation. The request
        loses its pages and has to be admitted again. Returns the number of tokens dropped. Raises DoesNotFit."""
        context = self._running[request_id]
        self._publisher.preempt(context)
        return self._opener.shorten(context)

    def distrust(self, request_id: str) -> None:
        """Remove all blocks of a request's context from the table, whichever request computed them, because they gave
        an impossible result: no request finds them any more. Running requests that share the first of these blocks keep
        their pages, and none of the blocks that they still compute are published."""
        keys = self._running[request_id].chain()
        for key in keys:
            self._tiers.forget(key)
        for context in self._running.values():
            if keys and context.chain()[:1] == keys[:1]:
                context.rows.is_trusted = False

    def close(self, request_id: str, num_tokens: int, now: float, *, goes_on: bool = True) -> None:
        """End a request whose context is its first `num_tokens` tokens (a stop string may have shortened it). Pages
        that nothing else needs become free, and full blocks stay cached. The request's context replaces the session's,
        except in two cases, in which the session's stays as it was: nothing was computed, or `goes_on` is False (the
        conversation is not expected to continue from there)."""
        context = self._running.end(request_id)
        self._tiers.scores.clear(request_id)
        self._loads.closed(request_id)
        reached = min(max(context.rows.computed, context.rows.reached), num_tokens)
        open_key = made_key = None
        if context.rows.pages:
            context.rows.computed = min(context.rows.computed, num_tokens)
            open_key = made_key = self._publisher.release(context)
        elif context.reuse.open_place == reached // BLOCK_TOKENS and context.reuse.open_hint is not None:
            row = self._tiers.table.get(context.reuse.open_hint)
            open_key = row.key if row is not None and len(row.token_ids) == reached % BLOCK_TOKENS else None
        if reached and goes_on:
            self._sessions.remember(context, reached, open_key, now)
        else:
            self._sessions.hand_over(context, made_key)
