"""Explains which tokens of a prompt were cached, and why the others were not."""

from reprise.cache.blocks.context import ExpiredContext, SessionContext
from reprise.cache.blocks.keys import BLOCK_TOKENS
from reprise.cache.blocks.table import CacheTable, common_prefix
from reprise.cache.blocks.truncate import map_offset
from reprise.cache.requests.context import RequestContext
from reprise.cache.stats import MissReason, TokensBySource


def report_prompt(
    context: RequestContext,
    session: SessionContext | None,
    table: CacheTable,
    *,
    reuse: bool,
    expired: ExpiredContext | None = None,
) -> TokensBySource:
    """Return where the KV of a prompt came from, for a request that was just admitted for the first time. session: the
    session after its last turn. expired: what is known of the session if its time to live was over."""
    prompt = context.prompt_tokens
    tiers = {tier: min(count, prompt) for tier, count in context.sources.by_tier.items()} if reuse else {}
    cached = sum(tiers.values())
    shared, seen = _shared_history(context, session, table)
    shared, seen = (min(map_offset(end, context.cuts.ranges), prompt) for end in (shared, seen))
    had = 0
    if reuse and session is None and expired is not None and _goes_on(context, expired):
        had = min(map_offset(expired.num_tokens, context.cuts.ranges), prompt)
    history = max(shared, cached, had)
    reasons: dict[MissReason, int] = {}
    if reuse and cached == prompt - 1 and (history == prompt or _holds_last(context, table)):
        history = prompt
        reasons["last_token"] = 1
    if lost := history - cached - reasons.get("last_token", 0):
        reasons["expired" if had == history else _why_lost(context, reuse, lost)] = lost
    diverged = max(0, seen - history)
    if diverged:
        reasons["diverged"] = diverged
    if new := prompt - history - diverged:
        reasons["new"] = new
    return TokensBySource(
        prompt_tokens=prompt,
        history_tokens=history,
        hbm_tokens=tiers.get("hbm", 0),
        dram_tokens=tiers.get("dram", 0),
        disk_tokens=tiers.get("disk", 0),
        redis_tokens=tiers.get("redis", 0),
        miss_reasons=dict(reasons.items()),
        truncated_tokens=sum(b - a for a, b in context.cuts.ranges),
        shifted_tokens=min(context.cuts.shifted_tokens, cached),
        coded_tokens=min(context.sources.coded_tokens, cached),
        recalled_tokens=context.cuts.recalled_tokens,
    )


def _why_lost(context: RequestContext, reuse: bool, lost: int) -> MissReason:
    if not reuse:
        return "disabled"
    if context.reuse.miss_reason is not None:
        return context.reuse.miss_reason
    if context.cuts.ranges and (context.cuts.moves_history or (context.cuts.is_new and lost < BLOCK_TOKENS)):
        return "truncated"
    return "lineage_reset" if context.reuse.lost_lineage else "evicted"


def _goes_on(context: RequestContext, expired: ExpiredContext) -> bool:
    keys = context.conversation_keys()
    return len(keys) >= expired.num_blocks and keys[expired.num_blocks - 1] == expired.last_key


def _holds_last(context: RequestContext, table: CacheTable) -> bool:
    """Return whether a copy of the prompt's last token is stored, in any session, given that all tokens before it were
    found. That token is computed in any case, to get its logits."""
    if context.cuts.ranges:
        return False
    block = (context.prompt_tokens - 1) // BLOCK_TOKENS
    tokens = context.token_ids[block * BLOCK_TOKENS : context.prompt_tokens]
    found = table.closest_child(context.lineage.parent(block), tokens, context.session_id, len(tokens))
    return found is not None and found[1] == len(tokens)


def _shared_history(context: RequestContext, session: SessionContext | None, table: CacheTable) -> tuple[int, int]:
    """Return (leading tokens that the request's conversation shares with the session's, tokens of the session's
    conversation), both counted with nothing cut. If the two conversations differ inside a full block, the tokens that
    they share in that block count only while the block is stored, because the session knows only its key."""
    known = [] if session is None else session.conversation_keys
    if session is None or (session.cuts and not known):  # saved before its conversation was written down
        return 0, 0
    shared = 0
    for before, key in zip(known, context.conversation_keys(), strict=False):
        if before != key:
            break
        shared += BLOCK_TOKENS
    rest = context.cuts.stream[shared : shared + BLOCK_TOKENS]
    seen = session.num_tokens + session.truncated_tokens
    if shared == len(known) * BLOCK_TOKENS:
        shared += common_prefix(session.open_tokens, rest, BLOCK_TOKENS)
    elif not any(a <= shared < b for a, b in session.cuts):
        block = map_offset(shared, session.cuts) // BLOCK_TOKENS
        # A turn that was left in the middle of its prompt has computed less than its conversation's blocks.
        row = table.get(session.keys[block]) if block < len(session.keys) else None
        if row is not None:
            shared += common_prefix(row.token_ids, rest, BLOCK_TOKENS)
    return shared, seen
