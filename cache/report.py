"""Why the tokens of a prompt were cached, or were not."""

from cache.block import BLOCK_TOKENS
from cache.context import ExpiredContext, RunningContext, SessionContext
from cache.stats import PromptReport
from cache.table import CacheTable, common_prefix
from cache.truncate import map_offset


def report_prompt(
    context: RunningContext,
    session: SessionContext | None,
    table: CacheTable,
    *,
    reuse: bool,
    expired: ExpiredContext | None = None,
) -> PromptReport:
    """Explains the prompt of a request that was just admitted for the first time. session: as its last turn left it;
    expired: as it was when its time to live was over."""
    prompt = context.prompt_tokens
    tiers = {tier: min(count, prompt) for tier, count in context.sources.items()} if reuse else {}
    cached = sum(tiers.values())
    shared, seen = shared_history(context, session, table)
    had = 0
    if reuse and session is None and expired is not None and expired.is_in(context.stream, context.domain):
        had = min(map_offset(expired.end, context.cuts), prompt)
    history = max(shared, cached, had)
    reasons: dict[str, int] = {}
    if reuse and cached == prompt - 1 and (history == prompt or _holds_last(context, table)):
        history = prompt
        reasons["last_token"] = 1
    if lost := history - cached - reasons.get("last_token", 0):
        reasons["expired" if had == history else _why_lost(context, reuse)] = lost
    diverged = max(0, min(seen, prompt) - history) if session is not None and not context.cuts else 0
    if diverged:
        reasons["diverged"] = diverged
    if new := prompt - history - diverged:
        reasons["new"] = new
    return PromptReport(
        prompt_tokens=prompt,
        history_tokens=history,
        hbm_tokens=tiers.get("hbm", 0),
        dram_tokens=tiers.get("dram", 0),
        disk_tokens=tiers.get("disk", 0),
        miss_reasons=reasons,
        truncated_tokens=sum(b - a for a, b in context.cuts),
        shifted_tokens=min(context.shifted_tokens, cached),
    )


def _holds_last(context: RunningContext, table: CacheTable) -> bool:
    """Whether the last token of a prompt of which all else was found is stored, by whomever."""
    if context.cuts:
        return False
    block = (context.prompt_tokens - 1) // BLOCK_TOKENS
    tokens = context.token_ids[block * BLOCK_TOKENS : context.prompt_tokens]
    found = table.closest_child(context.lineage.parent(block), tokens, context.session_id, len(tokens))
    return found is not None and found[1] == len(tokens)


def _why_lost(context: RunningContext, reuse: bool) -> str:
    if not reuse:
        return "disabled"
    if context.miss_reason is not None:
        return context.miss_reason
    if context.moved_behind:
        return "truncated"
    return "lineage_reset" if context.lost_lineage else "evicted"


def shared_history(context: RunningContext, session: SessionContext | None, table: CacheTable) -> tuple[int, int]:
    """(tokens of the prompt that the session's last context begins with, tokens of that context). Where they part
    in the middle of a full block, its tokens count only while it is stored: the session knows its key alone."""
    if context.history is not None:  # of a cut context: its blocks stand elsewhere than they stood
        return min(context.history, context.prompt_tokens), 0 if session is None else session.num_tokens
    if session is None:
        return 0, 0
    shared = 0
    keys = context.chain()
    prompt_blocks = context.prompt_tokens // BLOCK_TOKENS
    for before, key in zip(session.keys, keys[:prompt_blocks], strict=False):
        if before != key:
            break
        shared += BLOCK_TOKENS
    rest = context.token_ids[shared : min(shared + BLOCK_TOKENS, context.prompt_tokens)]
    if shared == len(session.keys) * BLOCK_TOKENS:
        shared += common_prefix(session.open_tokens, rest, BLOCK_TOKENS)
    elif (row := table.get(session.keys[shared // BLOCK_TOKENS])) is not None:
        shared += common_prefix(row.token_ids, rest, BLOCK_TOKENS)
    return shared, session.num_tokens
